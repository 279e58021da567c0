#include "cli/bench_moe.h"
#include "device/cuda.h"

namespace nibble::cli {

Result<void> bench_moe_cuda(const MoeBenchCommand&, std::ostream&) {
  return device::cuda_use(0).error().with_context("fused MoE layers run on a GPU");
}

}  // namespace nibble::cli
