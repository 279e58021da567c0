#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_many.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_nvfp4() {
  return {launch_linear_few<FormatId::kNvfp4>, launch_linear_many<FormatId::kNvfp4>};
}

}  // namespace nibble::kernels::cuda
