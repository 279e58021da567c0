#include "cli/bench_moe.h"

namespace nibble::cli {

Result<void> bench_moe_cuda(const MoeBenchCommand&, std::ostream&) {
  return Error(Code::kUnsupported,
               "fused MoE layers run on a GPU, and this build has no CUDA (no CUDA compiler was "
               "found)");
}

}  // namespace nibble::cli
