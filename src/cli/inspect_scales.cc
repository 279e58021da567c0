#include "cli/inspect_scales.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <ostream>

#include "base/json.h"
#include "cli/session.h"

namespace nibble::cli {
namespace {

using load::ScaleReport;

double ratio(const ScaleReport& r) {
  return static_cast<double>(r.csf_bytes) / static_cast<double>(r.plain_bytes);
}

std::string percent(double share, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << 100.0 * share << " %";
  return out.str();
}

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else {
      out += c;
    }
  }
  return out;
}

void append_chart(std::string& html, const Chart& chart) {
  constexpr int kLeft = 230, kWidth = 420, kRow = 22;
  double largest = 0;
  for (const Bar& bar : chart.bars) largest = std::max(largest, bar.value);
  const int height = kRow * static_cast<int>(chart.bars.size()) + 6;
  html += cat("<h2>", escape(chart.title), "</h2><p>", escape(chart.caption),
              "</p><svg viewBox='0 0 900 ", height, "' width='900' role='img'>");
  for (size_t i = 0; i < chart.bars.size(); ++i) {
    const Bar& bar = chart.bars[i];
    const int y = kRow * static_cast<int>(i) + 4;
    const double width = largest > 0 ? bar.value / largest * kWidth : 0;
    html +=
        cat("<text class='l' x='", kLeft - 8, "' y='", y + 13, "'>", escape(bar.label),
            "</text><rect x='", kLeft, "' y='", y, "' height='16' width='", width, "'/><text x='",
            kLeft + width + 8, "' y='", y + 13, "'>", escape(bar.note), "</text>");
  }
  html += "</svg>";
}

}  // namespace

void print_scale_table(std::ostream& out, const std::vector<ScaleReport>& reports) {
  out << "\nscales, compressed without loss (csf)\n  " << std::right << std::setw(5) << "layer"
      << "  " << std::left << std::setw(16) << "projection" << std::right << std::setw(7)
      << "planes" << std::setw(11) << "before" << std::setw(11) << "after" << std::setw(8)
      << "ratio" << std::setw(12) << "exceptions" << std::setw(9) << "rate" << '\n';
  ScaleReport total;
  int64_t kept = 0;
  for (const ScaleReport& r : reports) {
    out << "  " << std::setw(5) << r.layer << "  " << std::left << std::setw(16)
        << recipe::role_name(r.role) << std::right << std::setw(7) << r.planes << std::setw(11)
        << bytes_text(r.plain_bytes) << std::setw(11) << bytes_text(r.csf_bytes) << std::fixed
        << std::setprecision(3) << std::setw(8) << ratio(r) << std::setw(12) << r.exceptions
        << std::setw(9)
        << percent(static_cast<double>(r.exceptions) / static_cast<double>(r.scales), 2)
        << (r.compressed() ? "" : "  stays plain") << '\n';
    total.planes += r.planes;
    total.plain_bytes += r.plain_bytes;
    total.exceptions += r.exceptions;
    kept += r.kept_bytes();
  }
  if (total.plain_bytes == 0) {
    out << "  no scale plane that the kernels could read compressed\n";
    return;
  }
  out << "  in all " << total.planes << " planes, " << bytes_text(total.plain_bytes) << " -> "
      << bytes_text(kept) << " (" << std::setprecision(3)
      << static_cast<double>(kept) / static_cast<double>(total.plain_bytes) << "), "
      << total.exceptions << " exceptions\n";
}

Json scale_json(const std::vector<ScaleReport>& reports) {
  Json list = Json::array();
  for (const ScaleReport& r : reports) {
    list.push_back({{"layer", r.layer},
                    {"projection", recipe::role_name(r.role)},
                    {"planes", r.planes},
                    {"scales", r.scales},
                    {"plain_bytes", r.plain_bytes},
                    {"csf_bytes", r.csf_bytes},
                    {"exceptions", r.exceptions},
                    {"compressed", r.compressed()}});
  }
  return list;
}

std::vector<Chart> scale_charts(const std::vector<ScaleReport>& reports) {
  std::map<int32_t, std::pair<int64_t, int64_t>> by_layer;  // exceptions, scales
  std::map<recipe::Role, ScaleReport> by_role;
  for (const ScaleReport& r : reports) {
    by_layer[r.layer].first += r.exceptions;
    by_layer[r.layer].second += r.scales;
    by_role[r.role].plain_bytes += r.plain_bytes;
    by_role[r.role].csf_bytes += r.csf_bytes;
  }
  Chart rates{"Exceptions by layer", "Share of scale bytes outside their row's window.", {}};
  for (const auto& [layer, counts] : by_layer) {
    const double rate = static_cast<double>(counts.first) / static_cast<double>(counts.second);
    rates.bars.push_back({layer < 0 ? std::string("model") : cat("layer ", layer),
                          cat(percent(rate, 2), ", ", counts.first), rate});
  }
  Chart ratios{
      "Compressed size by projection", "Compressed bytes as a share of the stored ones.", {}};
  for (const auto& [role, r] : by_role) {
    ratios.bars.push_back({std::string(recipe::role_name(role)),
                           cat(percent(ratio(r), 1), ", ", bytes_text(r.plain_bytes), " to ",
                               bytes_text(r.csf_bytes)),
                           ratio(r)});
  }
  return {rates, ratios};
}

std::string html_page(const std::string& title, const std::vector<std::string>& lines,
                      const std::vector<Chart>& charts) {
  std::string html = cat(
      "<!doctype html><html lang='en'><meta charset='utf-8'><title>", escape(title),
      "</title><style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:920px;"
      "color:#1d2733;background:#fbfbf9}h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2rem 0 0}"
      "p{margin:.2rem 0 .6rem;color:#56616e}svg{max-width:100%;height:auto}rect{fill:#2f6f8f}"
      "text{font:12px system-ui,sans-serif;fill:#1d2733}.l{text-anchor:end}</style><h1>",
      escape(title), "</h1>");
  for (const std::string& line : lines) html += cat("<p>", escape(line), "</p>");
  for (const Chart& chart : charts) append_chart(html, chart);
  return html + "</html>\n";
}

}  // namespace nibble::cli
