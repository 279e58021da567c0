#include "cli/cuda_model.h"

namespace nibble::cli {

Result<CudaModel> load_cuda_model(const recipe::Recipe&, const plan::PlanOptions&, kernels::KvType,
                                  const device::CudaDevice&, ThreadPool&,
                                  const std::function<void(const load::LoadProgress&)>&) {
  return device::cuda_use(0).error();
}

}  // namespace nibble::cli
