#include "kernels/cuda/moe_stream_sm90.cuh"

namespace nibble::kernels::cuda {

StreamKernel stream_kernel_bf16(ScaleForm, Geometry geometry) {
  return pick_stream_kernel<FormatId::kBf16, ScaleForm::kPlain>(geometry);
}

}  // namespace nibble::kernels::cuda
