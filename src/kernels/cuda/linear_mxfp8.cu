#include "kernels/cuda/linear_few.cuh"
#include "kernels/cuda/linear_many.cuh"

namespace nibble::kernels::cuda {

LinearLaunchers linear_launchers_mxfp8() {
  return {launch_linear_few<FormatId::kMxfp8>, launch_linear_many<FormatId::kMxfp8>};
}

}  // namespace nibble::kernels::cuda
