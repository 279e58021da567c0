#include "cli/cuda_model.h"

#include <utility>
#include <vector>

#include "kernels/cuda/moe_layer.h"
#include "load/cuda_loader.h"
#include "model/glm4_moe_cuda.h"
#include "plan/cuda_plan.h"

namespace nibble::cli {
namespace {

using kernels::cuda::MoeWeights;
using recipe::Role;

/// The formats of one expert's (or MLP's) matrices.
MoeWeights formats_of(const recipe::Recipe& recipe, int32_t layer, Role gate, Role down,
                      int32_t expert) {
  MoeWeights w;
  w.gate_up.format = recipe.find({layer, gate, expert})->meta.format;
  w.down.format = recipe.find({layer, down, expert})->meta.format;
  return w;
}

/// Before memory is allocated: the GPU has kernels for every layer's experts and MLP.
Result<void> check_experts(const recipe::Recipe& recipe, const plan::CudaPlan& plan,
                           const device::CudaDevice& device) {
  const recipe::ModelConfig& config = recipe.config();
  const kernels::cuda::Gpu gpu{device.major, device.processors, device.block_shared_bytes};
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    const auto check = [&](int64_t experts, int64_t inter, int64_t top_k,
                           const std::vector<MoeWeights>& groups) -> Result<void> {
      kernels::cuda::MoeShape shape;
      shape.experts = experts;
      shape.hidden = config.hidden_size;
      shape.inter = inter;
      shape.top_k = top_k;
      const Result<void> runs = kernels::cuda::moe_runs_on(gpu, shape, groups);
      if (runs) return {};
      return Error(runs.error().code(), cat("cuda:", device.index, " (", device.name, "), layer ",
                                            layer, ": ", runs.error().message()));
    };
    std::vector<MoeWeights> groups;
    for (const plan::CudaExpertGroup& group : plan.groups[static_cast<size_t>(layer)]) {
      groups.push_back(
          formats_of(recipe, layer, Role::kExpertGate, Role::kExpertDown, group.experts.front()));
    }
    if (!groups.empty()) {
      NIBBLE_TRY(check(config.experts, config.moe_intermediate_size, config.top_k, groups));
    }
    for (const auto& [gate, down] : {std::pair{Role::kSharedGate, Role::kSharedDown},
                                     std::pair{Role::kDenseGate, Role::kDenseDown}}) {
      const recipe::Weight* weight = recipe.find({layer, gate, -1});
      if (weight == nullptr) continue;
      NIBBLE_TRY(check(1, weight->meta.rows, 1, {formats_of(recipe, layer, gate, down, -1)}));
    }
  }
  return {};
}

}  // namespace

Result<CudaModel> load_cuda_model(const recipe::Recipe& recipe, const plan::PlanOptions& options,
                                  kernels::KvType kv, const device::CudaDevice& device,
                                  ThreadPool& pool,
                                  const std::function<void(const load::LoadProgress&)>& progress) {
  if (recipe.config().family != "glm4_moe") {
    return Error(Code::kUnsupported,
                 cat("family '", recipe.config().family, "' has no CUDA graph; glm4_moe has one"));
  }
  NIBBLE_TRY(const plan::CudaPlan plan, plan::make_cuda_plan(recipe, options));
  NIBBLE_TRY(check_experts(recipe, plan, device));
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
