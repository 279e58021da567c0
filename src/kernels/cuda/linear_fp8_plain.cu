#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_many.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_fp8_plain() {
  return {launch_linear_few<FormatId::kFp8Channel>, launch_linear_many<FormatId::kFp8Channel>};
}

}  // namespace nibble::kernels::cuda
