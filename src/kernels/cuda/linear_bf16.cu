#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_held.cuh"
#include "kernels/cuda/linear_many.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_bf16() {
  return {launch_linear_few<FormatId::kBf16>, launch_linear_many<FormatId::kBf16>, linear_is_held,
          launch_linear_held};
}

}  // namespace nibble::kernels::cuda
