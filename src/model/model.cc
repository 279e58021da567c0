#include "model/model.h"

#include "model/glm4_moe.h"

namespace nibble::model {

Result<std::unique_ptr<Model>> make_model(const recipe::ModelConfig& config,
                                          std::shared_ptr<const load::WeightStore> weights) {
  if (config.family == "glm4_moe") return make_glm4_moe(config, std::move(weights));
  return Error(Code::kUnsupported,
               cat("no graph for model family '", config.family, "'; there is one for: glm4_moe"));
}

int64_t workspace_bytes(const recipe::ModelConfig& config, int64_t max_rows, int64_t max_logit_rows,
                        int threads) {
  return glm4_moe_workspace_bytes(config, max_rows, max_logit_rows, threads);
}

}  // namespace nibble::model
