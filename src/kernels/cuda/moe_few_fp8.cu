#include "kernels/cuda/moe_few.cuh"

namespace nibble::kernels::cuda {

FewKernel few_kernel_mxfp8(ScaleForm form, bool deep) {
  return form == ScaleForm::kCsf ? pick_few_kernel<FormatId::kMxfp8, ScaleForm::kCsf>(deep)
                                 : pick_few_kernel<FormatId::kMxfp8>(deep);
}
FewKernel few_kernel_fp8_block(ScaleForm, bool deep) {
  return pick_few_kernel<FormatId::kFp8Block>(deep);
}

}  // namespace nibble::kernels::cuda
