#include "kernels/cuda/moe_stream_sm90.cuh"

namespace nibble::kernels::cuda {

StreamKernel stream_kernel_fp8_block(ScaleForm, Geometry geometry) {
  return pick_stream_kernel<FormatId::kFp8Block, ScaleForm::kPlain>(geometry);
}

}  // namespace nibble::kernels::cuda
