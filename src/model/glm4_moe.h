// GLM-4.5 and GLM-4.6: grouped-query attention with optional QK norm and partial RoPE, dense first
// layers, then sigmoid-routed experts with a shared one. Source: the published configs and weights;
// numerics as Glm4MoeForCausalLM in Hugging Face transformers.
#pragma once

#include <memory>

#include "model/model.h"

namespace nibble::model {

Result<std::unique_ptr<Model>> make_glm4_moe(const recipe::ModelConfig& config,
                                             std::shared_ptr<const load::WeightStore> weights);
int64_t glm4_moe_workspace_bytes(const recipe::ModelConfig& config, int64_t max_rows,
                                 int64_t max_logit_rows, int threads);

}  // namespace nibble::model
