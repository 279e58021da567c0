// GLM-4.5 and GLM-4.6: names and shapes of every weight. Source: the published checkpoints and
// configs; the MTP layer is stored behind the last decoder layer, or as mtp.layers.N by some tools.
#include <algorithm>
#include <initializer_list>

#include "base/json.h"
#include "recipe/config.h"
#include "recipe/families/family.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;

/// The first candidate that the files hold anything of, else the first.
std::string pick(const CheckpointIndex& index, std::initializer_list<std::string> candidates) {
  for (const std::string& candidate : candidates) {
    if (module_exists(index, candidate)) return candidate;
  }
  return *candidates.begin();
}

/// "model." or "model.language_model.": whichever the layers are stored under.
std::string model_prefix(const CheckpointIndex& index) {
  for (const char* prefix : {"model.", "model.language_model.", "language_model.model."}) {
    if (module_exists(index, cat(prefix, "layers"))) return prefix;
  }
  return "model.";
}

/// MTP layer `number` (0-based) as the files name it, without a final dot.
std::string mtp_base(const CheckpointIndex& index, const ModelConfig& config,
                     const std::string& prefix, int64_t number) {
  return pick(index, {cat(prefix, "layers.", config.layers + number), cat("mtp.layers.", number),
                      cat(prefix, "mtp.layers.", number)});
}

struct Builder {
  const ModelConfig& config;
  const CheckpointIndex& index;
  std::vector<ExpectedWeight> out;

  void vector(WeightKey key, std::string tensor, int64_t elems) {
    out.push_back({key, WeightKind::kVector, {std::move(tensor), -1, 0}, 1, elems, false});
  }
  void matrix(WeightKey key, std::string module, int64_t rows, int64_t cols,
              WeightKind kind = WeightKind::kMatrix, bool optional = false) {
    out.push_back({key, kind, {std::move(module), -1, 0}, rows, cols, optional});
  }

  void experts(int32_t layer, const std::string& base, Role role, const char* projection,
               int64_t rows, int64_t cols) {
    const std::string stacked = cat(base, ".", projection);
    const bool is_stacked = module_exists(index, stacked);
    for (int64_t e = 0; e < config.experts; ++e) {
      ExpectedWeight weight;
      weight.key = {layer, role, static_cast<int32_t>(e)};
      if (is_stacked) {
        weight.module = ModuleRef{stacked, e, config.experts};
      } else {
        weight.module.name.append(base).append(".").append(std::to_string(e));
        weight.module.name.append(".").append(projection);
      }
      weight.rows = rows;
      weight.cols = cols;
      out.push_back(std::move(weight));
    }
  }

  void attention(int32_t layer, const std::string& base) {
    const int64_t hidden = config.hidden_size;
    const int64_t q = config.heads * config.head_dim, kv = config.kv_heads * config.head_dim;
    matrix({layer, Role::kQ}, base + ".q_proj", q, hidden);
    matrix({layer, Role::kK}, base + ".k_proj", kv, hidden);
    matrix({layer, Role::kV}, base + ".v_proj", kv, hidden);
    matrix({layer, Role::kO}, base + ".o_proj", hidden, q);
    if (config.attention_bias) {  // the output projection never has one
      vector({layer, Role::kQBias}, base + ".q_proj.bias", q);
      vector({layer, Role::kKBias}, base + ".k_proj.bias", kv);
      vector({layer, Role::kVBias}, base + ".v_proj.bias", kv);
    }
    if (config.qk_norm) {
      vector({layer, Role::kQNorm}, base + ".q_norm.weight", config.head_dim);
      vector({layer, Role::kKNorm}, base + ".k_norm.weight", config.head_dim);
    }
  }

  void moe(int32_t layer, const std::string& base) {
    const int64_t hidden = config.hidden_size, inner = config.moe_intermediate_size;
    matrix({layer, Role::kRouter}, base + ".gate", config.experts, hidden,
           WeightKind::kSilentMatrix);
    vector({layer, Role::kRouterBias}, base + ".gate.e_score_correction_bias", config.experts);
    experts(layer, base + ".experts", Role::kExpertGate, "gate_proj", inner, hidden);
    experts(layer, base + ".experts", Role::kExpertUp, "up_proj", inner, hidden);
    experts(layer, base + ".experts", Role::kExpertDown, "down_proj", hidden, inner);
    if (config.shared_experts > 0) {
      const int64_t shared = config.shared_experts * inner;
      matrix({layer, Role::kSharedGate}, base + ".shared_experts.gate_proj", shared, hidden);
      matrix({layer, Role::kSharedUp}, base + ".shared_experts.up_proj", shared, hidden);
      matrix({layer, Role::kSharedDown}, base + ".shared_experts.down_proj", hidden, shared);
    }
  }

  void decoder_layer(int32_t layer, const std::string& base) {
    vector({layer, Role::kInputNorm}, base + ".input_layernorm.weight", config.hidden_size);
    vector({layer, Role::kPostAttentionNorm}, base + ".post_attention_layernorm.weight",
           config.hidden_size);
    attention(layer, base + ".self_attn");
    if (layer >= config.first_dense_layers) return moe(layer, base + ".mlp");
    const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
    matrix({layer, Role::kDenseGate}, base + ".mlp.gate_proj", inner, hidden);
    matrix({layer, Role::kDenseUp}, base + ".mlp.up_proj", inner, hidden);
    matrix({layer, Role::kDenseDown}, base + ".mlp.down_proj", hidden, inner);
  }

  void mtp_layer(int64_t number, const std::string& prefix) {
    const int32_t layer = static_cast<int32_t>(config.layers + number);
    const std::string base = mtp_base(index, config, prefix, number);
    const int64_t hidden = config.hidden_size;
    decoder_layer(layer, base);
    matrix({layer, Role::kMtpProjection}, pick(index, {base + ".eh_proj", "mtp.fc"}), hidden,
           2 * hidden);
    vector({layer, Role::kMtpEmbeddingNorm},
           pick(index, {base + ".enorm", "mtp.pre_fc_norm_embedding"}) + ".weight", hidden);
    vector({layer, Role::kMtpHiddenNorm},
           pick(index, {base + ".hnorm", "mtp.pre_fc_norm_hidden"}) + ".weight", hidden);
    vector({layer, Role::kMtpHeadNorm},
           pick(index, {base + ".shared_head.norm", "mtp.norm"}) + ".weight", hidden);
    matrix({layer, Role::kMtpEmbedding}, base + ".embed_tokens", config.vocab_size, hidden,
           WeightKind::kSilentMatrix, /*optional=*/true);
    matrix({layer, Role::kMtpHead}, base + ".shared_head.head", config.vocab_size, hidden,
           WeightKind::kSilentMatrix, /*optional=*/true);
  }
};

std::vector<ExpectedWeight> enumerate(const ModelConfig& config, const CheckpointIndex& index) {
  const std::string prefix = model_prefix(index);
  Builder build{config, index, {}};
  build.matrix({-1, Role::kEmbedding}, prefix + "embed_tokens", config.vocab_size,
               config.hidden_size, WeightKind::kSilentMatrix);
  build.matrix(
      {-1, Role::kHead}, pick(index, {"lm_head", "language_model.lm_head", prefix + "lm_head"}),
      config.vocab_size, config.hidden_size, WeightKind::kSilentMatrix, config.tied_embeddings);
  build.vector({-1, Role::kFinalNorm}, prefix + "norm.weight", config.hidden_size);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    build.decoder_layer(static_cast<int32_t>(layer), cat(prefix, "layers.", layer));
  }
  for (int64_t number = 0; number < config.mtp_layers; ++number) {
    build.mtp_layer(number, prefix);
  }
  return std::move(build.out);
}

int64_t stored_mtp_layers(const ModelConfig& config, const CheckpointIndex& index) {
  constexpr int64_t kMost = 64;
  const std::string prefix = model_prefix(index);
  int64_t count = 0;
  while (count < kMost && module_exists(index, mtp_base(index, config, prefix, count))) ++count;
  return count;
}

Result<ModelConfig> parse_config(const Json& config, const Json* generation_config) {
  ConfigDefaults defaults;
  defaults.partial_rotary_factor = 0.5;
  defaults.first_dense_layers = 1;
  defaults.shared_experts = 1;
  NIBBLE_TRY(ModelConfig out, parse_common_config(config, generation_config, defaults));
  NIBBLE_TRY(const std::string scoring,
             json_string(text_config(config), "scoring_func", "sigmoid"));
  if (scoring != "sigmoid") {
    return Error(Code::kUnsupported,
                 cat("config.json: key 'scoring_func': expected sigmoid, found '", scoring, "'"));
  }
  return out;
}

constexpr std::string_view kModelTypes[] = {"glm4_moe", "glm4v_moe_text"};

}  // namespace

const Family kGlm4Moe = {"glm4_moe", kModelTypes, parse_config, stored_mtp_layers, enumerate};

}  // namespace nibble::recipe
