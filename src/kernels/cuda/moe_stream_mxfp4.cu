#include "kernels/cuda/moe_stream_sm90.cuh"

namespace nibble::kernels::cuda {

StreamKernel stream_kernel_mxfp4(Geometry geometry) {
  return pick_stream_kernel<FormatId::kMxfp4>(geometry);
}

}  // namespace nibble::kernels::cuda
