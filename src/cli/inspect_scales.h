// The scale section of `nibble inspect --scales csf`: bytes before and after, per layer and
// projection.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "base/json.h"
#include "load/scale_compression.h"

namespace nibble::cli {

void print_scale_table(std::ostream& out, const std::vector<load::ScaleReport>& reports);
Json scale_json(const std::vector<load::ScaleReport>& reports);

/// A labelled value of a bar chart; `note` is shown behind the bar.
struct Bar {
  std::string label, note;
  double value = 0;
};
struct Chart {
  std::string title, caption;
  std::vector<Bar> bars;
};
/// One self-contained page: a heading, lines of text, then horizontal bar charts as inline SVG.
std::string html_page(const std::string& title, const std::vector<std::string>& lines,
                      const std::vector<Chart>& charts);

/// Exception rate by layer, and compressed share by projection.
std::vector<Chart> scale_charts(const std::vector<load::ScaleReport>& reports);

}  // namespace nibble::cli
