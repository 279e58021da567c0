#include "recipe/config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/json.h"

namespace nibble::recipe {
namespace {

constexpr int64_t kMaxWidth = 1 << 20;  // hidden and intermediate sizes, heads * head_dim
constexpr int64_t kMaxHeads = 1 << 16;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxVocab = 1 << 26;
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kMaxPositions = int64_t{1} << 40;
constexpr int64_t kMaxMtpLayers = 64;

Error fault(std::string_view what, const std::string& expected, const std::string& found) {
  return Error(Code::kCorruptInput,
               cat("config.json: ", what, ": expected ", expected, ", found ", found));
}

/// The first of `keys` that is present; min <= value <= max. `fallback` < 0: required.
Result<int64_t> size_of(const Json& text, std::initializer_list<const char*> keys, int64_t min,
                        int64_t max, int64_t fallback = -1) {
  for (const char* key : keys) {
    if (json_find(text, key) == nullptr) continue;
    NIBBLE_TRY(const int64_t value, json_int(text, key), "config.json");
    if (value < min || value > max) {
      return fault(cat("key '", key, "'"), cat(min, " to ", max), cat(value));
    }
    return value;
  }
  if (fallback < 0) return fault(cat("key '", *keys.begin(), "'"), "a number", "nothing");
  return fallback;
}

Result<double> factor_of(const Json& object, const std::string& key, double fallback, double max) {
  NIBBLE_TRY(const double value, json_number(object, key, fallback), "config.json");
  if (!(value > 0 && value <= max)) {
    return fault(cat("key '", key, "'"), cat("above 0, at most ", max), cat(value));
  }
  return value;
}

Result<void> parse_sizes(const Json& text, const ConfigDefaults& defaults, ModelConfig& out) {
  NIBBLE_TRY(out.hidden_size, size_of(text, {"hidden_size"}, 1, kMaxWidth));
  NIBBLE_TRY(out.layers, size_of(text, {"num_hidden_layers"}, 1, kMaxLayers));
  NIBBLE_TRY(out.vocab_size, size_of(text, {"vocab_size"}, 1, kMaxVocab));
  NIBBLE_TRY(out.max_positions, size_of(text, {"max_position_embeddings"}, 1, kMaxPositions, 4096));
  NIBBLE_TRY(out.heads, size_of(text, {"num_attention_heads"}, 1, kMaxHeads));
  NIBBLE_TRY(out.kv_heads, size_of(text, {"num_key_value_heads"}, 1, kMaxHeads, out.heads));
  if (out.heads % out.kv_heads != 0) {
    return fault("key 'num_attention_heads'",
                 cat("a multiple of num_key_value_heads ", out.kv_heads), cat(out.heads));
  }
  if (json_find(text, "head_dim") == nullptr && out.hidden_size % out.heads != 0) {
    return fault("key 'head_dim'",
                 cat("a number, as hidden_size ", out.hidden_size, " is no multiple of ", out.heads,
                     " heads"),
                 "nothing");
  }
  NIBBLE_TRY(out.head_dim, size_of(text, {"head_dim"}, 1, kMaxWidth, out.hidden_size / out.heads));
  if (out.heads * out.head_dim > kMaxWidth) {
    return fault("num_attention_heads * head_dim", cat("at most ", kMaxWidth),
                 cat(out.heads, " * ", out.head_dim));
  }
  NIBBLE_TRY(out.first_dense_layers,
             size_of(text, {"first_k_dense_replace"}, 0, kMaxLayers, defaults.first_dense_layers));
  out.first_dense_layers = std::min(out.first_dense_layers, out.layers);
  NIBBLE_TRY(out.intermediate_size, size_of(text, {"intermediate_size"}, 1, kMaxWidth,
                                            out.first_dense_layers > 0 ? -1 : 0));
  NIBBLE_TRY(out.mtp_layers, size_of(text, {"num_nextn_predict_layers", "mtp_num_hidden_layers"}, 0,
                                     kMaxMtpLayers, 0));
  return {};
}

Result<void> parse_experts(const Json& text, const ConfigDefaults& defaults, ModelConfig& out) {
  NIBBLE_TRY(out.experts, size_of(text, {"n_routed_experts", "num_experts", "num_local_experts"}, 1,
                                  kMaxExperts));
  NIBBLE_TRY(out.top_k, size_of(text, {"num_experts_per_tok"}, 1, out.experts));
  NIBBLE_TRY(out.moe_intermediate_size, size_of(text, {"moe_intermediate_size"}, 1, kMaxWidth));
  NIBBLE_TRY(out.shared_experts,
             size_of(text, {"n_shared_experts"}, 0, 64, defaults.shared_experts));
  if (out.shared_experts * out.moe_intermediate_size > kMaxWidth) {
    return fault("n_shared_experts * moe_intermediate_size", cat("at most ", kMaxWidth),
                 cat(out.shared_experts, " * ", out.moe_intermediate_size));
  }
  NIBBLE_TRY(out.groups, size_of(text, {"n_group"}, 1, out.experts, 1));
  NIBBLE_TRY(out.top_groups, size_of(text, {"topk_group"}, 1, out.groups, 1));
  if (out.experts % out.groups != 0) {
    return fault("key 'n_group'", cat("a divisor of ", out.experts, " experts"), cat(out.groups));
  }
  if (out.top_k > out.experts / out.groups * out.top_groups) {
    return fault("key 'num_experts_per_tok'",
                 cat("at most the ", out.experts / out.groups * out.top_groups, " experts of ",
                     out.top_groups, " of ", out.groups, " groups"),
                 cat(out.top_k));
  }
  NIBBLE_TRY(const double scaling, factor_of(text, "routed_scaling_factor", 1.0, 1e6));
  out.routed_scaling = static_cast<float>(scaling);
  NIBBLE_TRY(out.normalize_top_k, json_bool(text, "norm_topk_prob", true), "config.json");
  return {};
}

/// rope_type of either spelling must be the plain one.
Result<void> check_rope_type(const Json* scaling, const char* key) {
  if (scaling == nullptr) return {};
  if (!scaling->is_object()) {
    return fault(cat("key '", key, "'"), "an object", json_dump(*scaling).substr(0, 60));
  }
  for (const char* name : {"rope_type", "type"}) {
    NIBBLE_TRY(const std::string type, json_string(*scaling, name, "default"), "config.json");
    if (type != "default") {
      return Error(Code::kUnsupported,
                   cat("config.json: key '", key, "': expected rope_type default, found '",
                       type.substr(0, 60), "'"));
    }
  }
  return {};
}

Result<void> parse_rope(const Json& text, const ConfigDefaults& defaults, ModelConfig& out) {
  const Json* parameters = json_find(text, "rope_parameters");
  NIBBLE_TRY(check_rope_type(parameters, "rope_parameters"));
  NIBBLE_TRY(check_rope_type(json_find(text, "rope_scaling"), "rope_scaling"));
  NIBBLE_TRY(out.rope_theta, factor_of(text, "rope_theta", 10000.0, 1e15));
  NIBBLE_TRY(double partial,
             factor_of(text, "partial_rotary_factor", defaults.partial_rotary_factor, 1.0));
  if (parameters != nullptr) {  // the newer spelling wins where a file has both
    NIBBLE_TRY(out.rope_theta, factor_of(*parameters, "rope_theta", out.rope_theta, 1e15));
    NIBBLE_TRY(partial, factor_of(*parameters, "partial_rotary_factor", partial, 1.0));
  }
  out.rotary_dim = static_cast<int64_t>(static_cast<double>(out.head_dim) * partial);
  if (out.rotary_dim < 2 || out.rotary_dim % 2 != 0) {
    return fault("head_dim * partial_rotary_factor", "an even number from 2", cat(out.rotary_dim));
  }
  return {};
}

Result<void> add_eos(const Json& value, const ModelConfig& config, std::vector<int32_t>& out) {
  if (value.is_array()) {
    for (const Json& item : value) {
      if (item.is_array())
        return fault("key 'eos_token_id'", "token ids", json_dump(item).substr(0, 60));
      NIBBLE_TRY(add_eos(item, config, out));
    }
    return {};
  }
  const Json holder = {{"eos_token_id", value}};
  NIBBLE_TRY(const int64_t id, json_int(holder, "eos_token_id"));
  if (id < 0 || id >= config.vocab_size) {
    return fault("key 'eos_token_id'", cat("an id below vocab_size ", config.vocab_size), cat(id));
  }
  const int32_t token = static_cast<int32_t>(id);
  if (std::find(out.begin(), out.end(), token) == out.end()) out.push_back(token);
  return {};
}

}  // namespace

const Json& text_config(const Json& config) {
  const Json* text = json_find(config, "text_config");
  return text != nullptr && json_find(*text, "hidden_size") != nullptr ? *text : config;
}

std::string model_type(const Json& config) {
  for (const Json* object : {&text_config(config), &config}) {
    const Json* type = json_find(*object, "model_type");
    if (type != nullptr && type->is_string()) return type->get<std::string>();
  }
  return {};
}

Result<ModelConfig> parse_common_config(const Json& config, const Json* generation_config,
                                        const ConfigDefaults& defaults) {
  if (!config.is_object()) return fault("file", "an object", json_dump(config).substr(0, 60));
  const Json& text = text_config(config);
  ModelConfig out;
  NIBBLE_TRY(parse_sizes(text, defaults, out));
  NIBBLE_TRY(parse_experts(text, defaults, out));
  NIBBLE_TRY(parse_rope(text, defaults, out));
  NIBBLE_TRY(const double eps, factor_of(text, "rms_norm_eps", 1e-5, 1.0));
  out.rms_eps = static_cast<float>(eps);
  NIBBLE_TRY(out.attention_bias, json_bool(text, "attention_bias", false), "config.json");
  NIBBLE_TRY(out.qk_norm, json_bool(text, "use_qk_norm", defaults.qk_norm), "config.json");
  NIBBLE_TRY(const bool outer_tie, json_bool(config, "tie_word_embeddings", false), "config.json");
  NIBBLE_TRY(out.tied_embeddings, json_bool(text, "tie_word_embeddings", outer_tie), "config.json");
  NIBBLE_TRY(const std::string act, json_string(text, "hidden_act", "silu"), "config.json");
  if (act != "silu" && act != "swish") {
    return Error(Code::kUnsupported, cat("config.json: key 'hidden_act': expected silu, found '",
                                         act.substr(0, 60), "'"));
  }
  for (const Json* source : {&config, &text, generation_config}) {
    const Json* eos = source == nullptr ? nullptr : json_find(*source, "eos_token_id");
    if (eos == nullptr) continue;
    NIBBLE_TRY(add_eos(*eos, out, out.eos_ids));
  }
  return out;
}

}  // namespace nibble::recipe
