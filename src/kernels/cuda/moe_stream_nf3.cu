#include "kernels/cuda/moe_stream_sm90.cuh"

namespace nibble::kernels::cuda {

StreamKernel stream_kernel_nf3(ScaleForm, Geometry geometry) {
  return pick_stream_kernel<FormatId::kNf3, ScaleForm::kPlain>(geometry);
}

}  // namespace nibble::kernels::cuda
