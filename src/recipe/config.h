// config.json and generation_config.json to ModelConfig: both spellings (the published one with
// rope_theta, partial_rotary_factor and rope_scaling at the top, and transformers 5's
// rope_parameters), sizes checked so that later arithmetic cannot overflow. Families add what is
// theirs. Errors here are kCorruptInput naming the key, or kUnsupported for a feature we lack.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"
#include "recipe/recipe.h"

namespace nibble::recipe {

/// What a family assumes where a key is absent.
struct ConfigDefaults {
  double partial_rotary_factor = 1.0;
  int64_t first_dense_layers = 0;
  int64_t shared_experts = 0;
  bool qk_norm = false;
};

/// The text model's part: `text_config` if it holds hidden_size, else the config itself.
const Json& text_config(const Json& config);
/// `model_type` of the text model; "" if there is none.
std::string model_type(const Json& config);

/// Every field but `family`. Checks: sizes in range, heads a multiple of kv_heads, top_k within
/// the experts it may choose from, rotary_dim even and within head_dim.
Result<ModelConfig> parse_common_config(const Json& config, const Json* generation_config,
                                        const ConfigDefaults& defaults);

}  // namespace nibble::recipe
