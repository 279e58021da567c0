#include "cli/cuda_model.h"

#include "kernels/cuda/moe_layer.h"
#include "load/cuda_loader.h"
#include "model/glm4_moe_cuda.h"
#include "plan/cuda_plan.h"

namespace nibble::cli {

Result<CudaModel> load_cuda_model(const recipe::Recipe& recipe, const plan::PlanOptions& options,
                                  kernels::KvType kv, const device::CudaDevice& device,
                                  ThreadPool& pool,
                                  const std::function<void(const load::LoadProgress&)>& progress) {
  if (recipe.config().family != "glm4_moe") {
    return Error(Code::kUnsupported,
                 cat("family '", recipe.config().family, "' has no CUDA graph; glm4_moe has one"));
  }
  using kernels::cuda::kMoeMajor;
  using kernels::cuda::kMoeSharedBytes;
  if (device.major < kMoeMajor || device.block_shared_bytes < kMoeSharedBytes) {
    return Error(Code::kUnsupported,
                 cat("cuda:", device.index, " (", device.name, "): compute capability ",
                     device.major, ".", device.minor, " with ", device.block_shared_bytes,
                     " bytes of shared memory a block; the expert kernels need ", kMoeMajor,
                     ".0 and ", kMoeSharedBytes));
  }
  NIBBLE_TRY(const plan::CudaPlan plan, plan::make_cuda_plan(recipe, options));
  const int64_t need = plan.weights_bytes + plan.device_staging_bytes;
  if (need > device.free_bytes) {
    return Error(
        Code::kResourceExhausted,
        cat("cuda:", device.index, ": weights of ", plan.weights_bytes, " bytes and staging of ",
            plan.device_staging_bytes, " do not fit in ", device.free_bytes, " free bytes"));
  }
  NIBBLE_TRY(load::LoadedCudaWeights loaded,
             load::load_cuda_weights(recipe, plan, device.index, pool, progress));
  CudaModel out;
  out.planned_bytes = plan.weights_bytes;
  out.host_staging_bytes = plan.host_staging_bytes;
  out.device_staging_bytes = plan.device_staging_bytes;
  out.max_context = plan.options.max_context;
  out.report = std::move(loaded.report);
  NIBBLE_TRY(out.model, model::make_glm4_moe_cuda(recipe.config(), std::move(loaded.weights), kv));
  return out;
}

}  // namespace nibble::cli
