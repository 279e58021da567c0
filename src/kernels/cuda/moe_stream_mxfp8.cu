#include "kernels/cuda/moe_stream_sm90.cuh"

namespace nibble::kernels::cuda {

StreamKernel stream_kernel_mxfp8(Geometry geometry) {
  return pick_stream_kernel<FormatId::kMxfp8>(geometry);
}

}  // namespace nibble::kernels::cuda
