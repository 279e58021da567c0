// Decisions for one NVIDIA GPU, from headers alone: which experts form a group of equal format,
// what every weight takes in the packed layout (kernels/cuda/layout.h), and what loading stages.
// Building it fails if a weight has no CUDA kernel. No GPU is needed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "plan/plan.h"
#include "recipe/recipe.h"

namespace nibble::plan {

/// Experts of one layer whose gate and up share a format, and whose downs do.
struct CudaExpertGroup {
  std::vector<int32_t> experts;  // ascending
};

struct CudaPlan {
  PlanOptions options;
  std::vector<std::vector<CudaExpertGroup>> groups;  // [layers]; empty for a dense layer
  std::map<std::string, int64_t> weights_by_format;  // device bytes, plain scales
  int64_t weights_bytes = 0;
  int64_t kv_bytes_per_token = 0;
  /// Page-locked host memory and device memory that loading uses at most, beside the weights.
  int64_t host_staging_bytes = 0, device_staging_bytes = 0;
};

/// Source bytes that one slot of the loading ring holds, and how many slots there are. Together
/// they should stay in the last-level cache: a 19 GB load on a host with 300 MiB of it and 16 cores
/// ran at 24 GB/s with three slots of 64 MiB and at 32 with four of 16.
constexpr int64_t kCudaSlotBytes = int64_t{16} << 20;
constexpr int kCudaSlots = 4;

/// Errors: kUnsupported naming the weight and its format: gate and up of different formats, more
/// than four groups in a layer, or a format without a CUDA kernel in that role.
Result<CudaPlan> make_cuda_plan(const recipe::Recipe& recipe, const PlanOptions& options);

}  // namespace nibble::plan
