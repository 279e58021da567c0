// Many tensor names as few lines: "model.layers.{3..40}.mlp.experts.{0..7}.up_proj.weight: 304".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nibble::recipe {

struct NamePattern {
  std::string text;   // numbers that vary as {3..40} or {1,3,5..7}
  int64_t count = 0;  // names; may be fewer than the pattern spans
};

/// Names that differ only in dotted components that are numbers become one pattern; in order of
/// first appearance. O(total length * log).
std::vector<NamePattern> summarize_names(const std::vector<std::string>& names);

/// One line "PATTERN: COUNT WORD" each, joined by `separator`, at most `limit` of them; the rest is
/// counted.
std::string pattern_lines(const std::vector<std::string>& names, const std::string& word,
                          const std::string& separator, size_t limit);

}  // namespace nibble::recipe
