#include "kernels/cuda/moe_few.cuh"

namespace nibble::kernels::cuda {

FewKernel few_kernel_nvfp4(ScaleForm form, bool deep) {
  return form == ScaleForm::kCsf ? pick_few_kernel<FormatId::kNvfp4, ScaleForm::kCsf>(deep)
                                 : pick_few_kernel<FormatId::kNvfp4>(deep);
}
FewKernel few_kernel_mxfp4(ScaleForm form, bool deep) {
  return form == ScaleForm::kCsf ? pick_few_kernel<FormatId::kMxfp4, ScaleForm::kCsf>(deep)
                                 : pick_few_kernel<FormatId::kMxfp4>(deep);
}

}  // namespace nibble::kernels::cuda
