#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_held.cuh"
#include "kernels/cuda/linear_many.cuh"
#include "kernels/cuda/norm_linear.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_bf16() {
  return {launch_linear_few<FormatId::kBf16>,
          launch_linear_many<FormatId::kBf16>,
          linear_is_held,
          launch_linear_held,
          norm_linear_is_held,
          launch_norm_linear};
}

}  // namespace nibble::kernels::cuda
