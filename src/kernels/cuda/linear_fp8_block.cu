#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_many.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_fp8_block() {
  return {launch_linear_few<FormatId::kFp8Block>, launch_linear_many<FormatId::kFp8Block>};
}

}  // namespace nibble::kernels::cuda
