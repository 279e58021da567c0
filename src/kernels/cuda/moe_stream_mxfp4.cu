#include "kernels/cuda/moe_stream_sm90.cuh"

namespace nibble::kernels::cuda {

StreamKernel stream_kernel_mxfp4(ScaleForm form, Geometry geometry) {
  return form == ScaleForm::kCsf
             ? pick_stream_kernel<FormatId::kMxfp4, ScaleForm::kCsf>(geometry)
             : pick_stream_kernel<FormatId::kMxfp4, ScaleForm::kPlain>(geometry);
}

}  // namespace nibble::kernels::cuda
