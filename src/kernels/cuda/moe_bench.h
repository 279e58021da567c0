// Timing of whole fused MoE layers on the GPU at hand: what `nibble bench moe` and moe_cuda_bench
// print. No device code here.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/result.h"

namespace nibble::kernels::cuda {

struct MoeBenchOptions {
  std::string shape = "glm";                    // qwen, glm, tp8, gptoss, a3b or "E,H,I,K"
  std::string format = "nvfp4";                 // or two: "gate_up+down"
  std::vector<std::string> scales = {"plain"};  // plain, csf, or both in turn
  std::vector<int64_t> rows = {1, 8, 64, 256, 1024, 4096};
  std::string geometry = "auto";  // few, slices, small, narrow, wide: force a kernel
};

/// One row count and one form of the scales.
struct MoeTiming {
  std::string scales;
  int64_t rows = 0;
  double active_experts = 0;    // mean over the graph's layers
  double microseconds = 0;      // of a layer, median of the replays
  double spread = 0;            // (largest - smallest) / median
  double bytes_per_second = 0;  // active experts' codes and scales, once
  double flops = 0;             // a second, of the products
  double error = 0;             // relative, against the reference, before timing
};

struct MoeBenchReport {
  std::string device;
  int64_t experts = 0, hidden = 0, inter = 0, top_k = 0;
  double copy_bandwidth = 0;  // bytes a second read and written by a copy, in the same run
  double csf_share = 0;       // compressed layer's bytes over the plain one's; 0 without csf
  std::vector<MoeTiming> timings;
};

/// Runs on the current device; `progress` is called when the device is measured and after every
/// row count. Every layer of a graph has its own routing, its own x and the next weight set in
/// turn, so that weights come from memory and not from the L2. Two tokens of every size are checked
/// against the reference before timing. Errors: kInvalidArgument (an unknown name, a shape that the
/// format does not divide), kInternal (a wrong result, a failed call, too little device memory).
Result<MoeBenchReport> bench_moe(const MoeBenchOptions& options,
                                 const std::function<void(const MoeBenchReport&)>& progress);

/// The table of docs/results: the heading (no timings yet), or the timings of the last row count.
void print_moe_progress(const MoeBenchOptions& options, const MoeBenchReport& report,
                        std::ostream& out);

}  // namespace nibble::kernels::cuda
