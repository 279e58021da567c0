// GLM-4.5 and GLM-4.6: grouped-query attention with optional QK norm and partial RoPE, dense first
// layers, then sigmoid-routed experts with a shared one. Source: the published configs and weights;
// numerics as Glm4MoeForCausalLM in Hugging Face transformers.
#pragma once

#include <memory>
#include <vector>

#include "kernels/router/router.h"
#include "model/model.h"

namespace nibble::model {

Result<std::unique_ptr<Model>> make_glm4_moe(const recipe::ModelConfig& config,
                                             std::shared_ptr<const load::WeightStore> weights);
/// What the graphs of every device take from the config. correction_bias is left null.
kernels::RouterParams glm4_moe_router(const recipe::ModelConfig& config);
/// FP32 as the reference: 1 / theta^(2i / rotary_dim), [rotary_dim / 2].
std::vector<float> glm4_moe_inv_freq(const recipe::ModelConfig& config);
int64_t glm4_moe_workspace_bytes(const recipe::ModelConfig& config, int64_t max_rows,
                                 int64_t max_logit_rows, int threads);

}  // namespace nibble::model
