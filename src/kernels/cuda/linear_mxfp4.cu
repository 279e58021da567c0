#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_many.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_mxfp4() {
  return {launch_linear_few<FormatId::kMxfp4>, launch_linear_many<FormatId::kMxfp4>};
}

}  // namespace nibble::kernels::cuda
