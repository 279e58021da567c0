#include "cli/cuda_model.h"

namespace nibble::cli {

Result<CudaModel> load_cuda_model(const recipe::Recipe&, const plan::PlanOptions&, kernels::KvType,
                                  const device::CudaDevice&, ThreadPool&,
                                  const std::function<void(const load::LoadProgress&)>&) {
  return Error(Code::kUnsupported, "this build has no CUDA (no CUDA compiler was found)");
}

}  // namespace nibble::cli
