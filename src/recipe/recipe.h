// Facts of one checkpoint: its config, which stored tensors are which weight, and what their bits
// mean. Tensors decide (dtype, shape, sibling scales); the config is cross-checked, and where the
// two disagree both readings are reported. No decision for a host is made here, no tensor data is
// read but scalars and (on request) scale planes. Source: spec, containers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"
#include "checkpoint/checkpoint_index.h"
#include "formats/block_format.h"

namespace nibble::recipe {

enum class Role : uint8_t {
  kEmbedding,
  kHead,
  kFinalNorm,
  kInputNorm,
  kPostAttentionNorm,
  kQ,
  kK,
  kV,
  kO,
  kQBias,
  kKBias,
  kVBias,
  kOBias,
  kQNorm,
  kKNorm,
  kRouter,
  kRouterBias,  // kRouterBias: e_score_correction_bias
  kExpertGate,
  kExpertUp,
  kExpertDown,  // routed, expert >= 0
  kDenseGate,
  kDenseUp,
  kDenseDown,  // a layer without router
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kMtpProjection,
  kMtpEmbeddingNorm,
  kMtpHiddenNorm,
  kMtpHeadNorm,  // eh_proj, enorm, hnorm, shared_head.norm
  kMtpEmbedding,
  kMtpHead,  // the layer's own copies, where stored
};
std::string_view role_name(Role role);

/// layer: 0-based decoder layer; MTP layers continue the count; -1 for model-wide weights.
struct WeightKey {
  int32_t layer = -1;
  Role role = Role::kEmbedding;
  int32_t expert = -1;
  auto operator<=>(const WeightKey&) const = default;
};
/// "layer 3 expert 17 gate"
std::string key_text(const WeightKey& key);

/// A part of a stored tensor: `tensor` names it, [begin, begin + bytes) lies inside it.
struct Plane {
  const checkpoint::TensorInfo* tensor = nullptr;
  int64_t begin = 0, bytes = 0;
};

/// One weight: a matrix [rows, cols], or a vector (rows = 1, F32/BF16/F16).
struct Weight {
  formats::MatrixView meta;  // pointers null; global filled in
  std::string dialect;  // "modelopt nvfp4", "compressed-tensors mxfp4", "deepseek fp8", "plain";
                        // stored CSF: "modelopt nvfp4 csf"
  std::string name;     // module name as stored, without ".weight"
  Plane codes, scales;  // scales.tensor null for plain formats and for stored CSF
  /// Stored CSF in place of a plain scale plane, else null. meta describes the decoded plane;
  /// scale_plane.h reads either form. Headers are checked, the streams are not yet.
  Plane csf_fixed, csf_exceptions;
  bool stored_csf() const { return csf_fixed.tensor != nullptr; }
  /// Bytes of the scales as stored, in whatever form.
  int64_t stored_scale_bytes() const {
    return scales.bytes + csf_fixed.bytes + csf_exceptions.bytes;
  }
  bool has_input_scale = false;
};

/// Sizes and constants of the model, in the field's words. Family fields that do not apply are 0.
struct ModelConfig {
  std::string family;  // "glm4_moe"
  int64_t hidden_size = 0, layers = 0, vocab_size = 0, max_positions = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t intermediate_size = 0, moe_intermediate_size = 0;
  int64_t experts = 0, top_k = 0, shared_experts = 0, first_dense_layers = 0;
  int64_t groups = 1, top_groups = 1;
  int64_t mtp_layers = 0;  // config's promise; Recipe::mtp_present says what is stored
  bool attention_bias = false, qk_norm = false, tied_embeddings = false, normalize_top_k = true;
  float rms_eps = 1e-5f, routed_scaling = 1.0f;
  double rope_theta = 10000.0;
  int64_t rotary_dim = 0;
  std::vector<int32_t> eos_ids;  // config.json and generation_config.json together
};

class Recipe {
 public:
  const checkpoint::CheckpointIndex& index() const { return *index_; }
  const ModelConfig& config() const { return config_; }
  const Json& raw_config() const { return *raw_config_; }
  const std::map<WeightKey, Weight>& weights() const { return weights_; }
  /// Null if the checkpoint does not hold it (optional weights only: a required one is an error).
  const Weight* find(const WeightKey& key) const;
  bool mtp_present() const { return mtp_present_; }
  /// Things a user should see once: config against tensors, absent MTP layer, orphans, ignored
  /// tensors on the allow list. Each names layer, expert and tensor where it can.
  const std::vector<std::string>& notices() const { return notices_; }

 private:
  friend struct RecipeBuilder;
  std::shared_ptr<const checkpoint::CheckpointIndex> index_;
  ModelConfig config_;
  std::shared_ptr<const Json> raw_config_;
  std::map<WeightKey, Weight> weights_;
  std::vector<std::string> notices_;
  bool mtp_present_ = false;
};

/// Reads config.json (and hf_quant_config.json, generation_config.json), the shard headers and the
/// scalar tensors (global scales). Errors list every missing and every surplus tensor by pattern
/// and count: kCorruptInput. Unknown family: kUnsupported with the list of known ones. `directory`
/// may be any container (container.h).
Result<Recipe> read_recipe(const std::string& directory);
Result<Recipe> read_recipe(checkpoint::CheckpointIndex index, const std::string& directory);

/// What a module's stored tensors say, without a family: used for roles of every family and by the
/// container tests. `module` is the name without ".weight"; rows, cols are what the graph expects
/// (0: take them from the tensors). Errors start with tensor_missing, tensor_form or global_scale.
Result<Weight> resolve_module(const checkpoint::CheckpointIndex& index, const Json& quantization,
                              const std::string& module, int64_t rows, int64_t cols);

/// Scans one weight's scale plane, given its bytes: NaN, negative (E4M3 or FP32) or all-zero scales
/// are errors naming weight, tensor and element index.
Result<void> check_scales(const WeightKey& key, const Weight& weight,
                          std::span<const std::byte> scales);

}  // namespace nibble::recipe
