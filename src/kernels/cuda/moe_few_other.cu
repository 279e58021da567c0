#include "kernels/cuda/moe_few.cuh"

namespace nibble::kernels::cuda {

FewKernel few_kernel_bf16(ScaleForm, bool deep) { return pick_few_kernel<FormatId::kBf16>(deep); }
FewKernel few_kernel_nf3(ScaleForm, bool deep) { return pick_few_kernel<FormatId::kNf3>(deep); }

}  // namespace nibble::kernels::cuda
