#include "kernels/cuda/moe_bench.h"

#include <iomanip>
#include <ostream>

namespace nibble::kernels::cuda {

void print_moe_progress(const MoeBenchOptions& options, const MoeBenchReport& report,
                        std::ostream& out) {
  const auto precision = [](int digits) { return std::setprecision(digits); };
  out << std::fixed;
  if (report.timings.empty()) {
    out << report.device << ", " << options.shape << ' ' << options.format << " E "
        << report.experts << " hidden " << report.hidden << " inter " << report.inter << " top-k "
        << report.top_k << "; copy " << precision(2) << report.copy_bandwidth * 1e-12 << " TB/s\n";
    if (report.csf_share > 0) {
      out << "compressed scales: " << precision(4) << report.csf_share
          << " of the plain layer's bytes\n";
    }
    out << "| M | scales | active | layer us | spread % | TB/s | % copy | TFLOP/s | error |\n"
        << "|---:|---|---:|---:|---:|---:|---:|---:|---:|\n"
        << std::flush;
    return;
  }
  for (size_t i = report.timings.size() - options.scales.size(); i < report.timings.size(); ++i) {
    const MoeTiming& t = report.timings[i];
    out << "| " << t.rows << " | " << t.scales << " | " << precision(1) << t.active_experts << " | "
        << t.microseconds << " | " << 100 * t.spread << " | " << precision(2)
        << t.bytes_per_second * 1e-12 << " | " << precision(0)
        << 100 * t.bytes_per_second / report.copy_bandwidth << " | " << precision(1)
        << t.flops * 1e-12 << " | " << std::scientific << t.error << std::fixed << " |\n"
        << std::flush;
  }
}

}  // namespace nibble::kernels::cuda
