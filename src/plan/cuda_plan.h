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

/// What loading stages. Files are read into chunks of page-locked host memory, a few of its own for
/// each reading thread; chunks are copied into slots of device memory, which are repacked whole.
/// Chosen on an H200 with 16 cores (19.4 GB, page-locked bandwidth 52.6 GB/s; scales were checked
/// byte by byte then, half of the readers' time): three chunks of 1 MiB a thread 35.1 GB/s,
/// two 33.2; of 512 KiB 31.0 (a copy costs 2 us beside its bytes), of 2 MiB 32.7, of 4 MiB 20.3
/// (readers wait for slots). Four slots gave 26.8 where eight gave 32.7.
struct CudaStaging {
  int64_t slot_bytes = int64_t{16} << 20;  // of device memory
  int slots = 8;
  int64_t chunk_bytes = int64_t{1} << 20;  // of page-locked host memory
  int chunks = 3;                          // a thread
  int readers = 16;                        // reading threads, at most

  int64_t device_bytes() const { return slots * slot_bytes; }
  int64_t host_bytes(int threads) const { return threads * chunks * chunk_bytes; }
};

struct CudaPlan {
  PlanOptions options;
  std::vector<std::vector<CudaExpertGroup>> groups;  // [layers]; empty for a dense layer
  std::map<std::string, int64_t> weights_by_format;  // device bytes, plain scales
  int64_t weights_bytes = 0;
  int64_t kv_bytes_per_token = 0, kv_bytes = 0;  // BF16
  CudaStaging staging;
  /// Page-locked host memory and device memory that loading uses at most, beside the weights.
  int64_t host_staging_bytes = 0, device_staging_bytes = 0;
};

/// Errors: kUnsupported naming the weight and its format: gate and up of different formats, more
/// than four groups in a layer, or a format without a CUDA kernel in that role.
Result<CudaPlan> make_cuda_plan(const recipe::Recipe& recipe, const PlanOptions& options);

}  // namespace nibble::plan
