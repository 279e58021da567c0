// The quantization a config declares, as one look-up: module name to expected form. A hint that is
// cross-checked against the stored tensors (module_resolver.h), which decide; only where shapes
// leave a choice, and for the tiers of a hybrid, does the config decide.
// Spec: containers, sections 2, 4, 5, 6 and 7.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "codec/csf.h"
#include "formats/block_format.h"
#include "recipe/name_pattern.h"

namespace nibble::recipe {

enum class QuantMethod : uint8_t { kNone, kModelOpt, kCompressedTensors, kFp8, kMxfp4, kHybrid };

/// One stored form as a config names it.
struct DeclaredForm {
  formats::FormatId format = formats::FormatId::kBf16;
  bool any_fp8 = false;  // FP8 whose scale form the config leaves open
  int64_t block_rows = 0, block_cols = 0;
  std::string label;  // "quant_algo NVFP4": what the config says, for messages
};

/// What the config says about one module.
struct Declared {
  bool known = false;                  // false: the config says nothing about it
  const DeclaredForm* form = nullptr;  // null: left in source precision
  bool required = false;               // a hybrid's tier: other tensors are an error
  bool encoded_scale = false;          // weight_scale_encoding is set
  std::string_view because;            // "on the ignore list", "quant_algo NVFP4", ...
};

/// Whether stored tensors of format `id` are what `declared` says. Unknown fits everything.
bool fits(const Declared& declared, formats::FormatId id);

/// Two tiers per layer: `bits` 4 keeps an expert, 3 makes it NF3.
struct HybridMap {
  std::map<int64_t, std::vector<uint8_t>> bits;  // by layer, one entry per expert
  bool dense_mxfp8 = false;
  std::vector<std::string> ignored_layers;  // dotted components of names
  DeclaredForm kept, demoted, unmapped, dense;
};

class Quantization {
 public:
  /// `quantization` is a quantization_config object, or hf_quant_config.json's (nested under
  /// `quantization`); null or empty: nothing is declared. experts: the model's routed experts, 0
  /// if unknown (list lengths of a hybrid are then not checked).
  /// The serving configs of manifest containers (nvfp4_csf, mxfp4_csf) read as their originals.
  /// Errors: kUnsupported starting with "quant_method: "; kCorruptInput starting with
  /// scale_encoding, bit_map, kept_format, nf3_levels, demoted_format or the key.
  static Result<Quantization> parse(const Json& quantization, int64_t experts);
  /// Finds the object: `quantization_config` of config.json, at the top or in `text_config`, else
  /// `hf_quant_config` (may be null). Reads the expert count and `expert_dtype` from config.json.
  static Result<Quantization> from_config(const Json& config, const Json* hf_quant_config);

  QuantMethod method() const { return method_; }
  /// Errors: kCorruptInput starting with ignored_partial, or with bit_map for an expert beyond it.
  Result<Declared> declared(std::string_view module) const;
  /// Extents of an FP8 block: the module's own, else the config's, else 128 x 128.
  std::array<int64_t, 2> fp8_block(const Declared& declared) const;
  const std::array<float, 8>& nf3_levels() const { return nf3_levels_; }
  /// Bias of NF3 scales stored as U8.
  int nf3_bias_log2() const { return nf3_bias_log2_; }
  bool has_encoded_scales() const { return encoded_modules_ > 0; }
  /// Inside a manifest container, where any expert's scale may be compressed undeclared.
  std::optional<codec::CsfKind> manifest_csf() const { return manifest_csf_; }
  void set_manifest_csf(codec::CsfKind kind) { manifest_csf_ = kind; }

 private:
  struct LayerEntry {
    std::optional<DeclaredForm> form;  // absent: source precision
    bool encoded_scale = false;
  };
  struct Group {
    NameList targets;
    bool every_linear = false;
    DeclaredForm form;
  };
  Result<void> parse_modelopt(const Json& quant);
  Result<void> parse_quantized_layers(const Json& layers);
  Result<void> parse_compressed_tensors(const Json& quant);
  Result<void> parse_fp8(const Json& quant);
  Result<void> parse_mxfp4(const Json& quant);
  Result<void> parse_hybrid(const Json& quant, int64_t experts);
  Result<Declared> declared_hybrid(std::string_view module) const;
  const LayerEntry* mixed_entry(std::string_view module) const;

  QuantMethod method_ = QuantMethod::kNone;
  std::optional<DeclaredForm> default_form_;
  std::optional<DeclaredForm> expert_form_;  // where experts differ from the rest
  NameList ignore_;
  bool mixed_ = false;
  // Keys without prefix. An experts module also stands for what lies below it.
  std::unordered_map<std::string, LayerEntry> layers_;
  std::unordered_map<std::string, LayerEntry> experts_below_;
  int64_t encoded_modules_ = 0;
  std::optional<codec::CsfKind> manifest_csf_;
  std::vector<Group> groups_;
  std::optional<HybridMap> hybrid_;
  std::array<float, 8> nf3_levels_ = formats::kNf3Levels;
  int nf3_bias_log2_ = 4;
};

/// What a manifest container's serving config says about its source: the original object.
Json source_quantization(const Json& serving);

// Parts of parse(), one file each.

/// "NVFP4" and its kin, case-insensitive. Null for null and "none". Errors: kUnsupported starting
/// with "quant_method: " for an unknown algorithm.
Result<std::optional<DeclaredForm>> modelopt_form(const std::string& algo);
/// A config_groups entry's `weights` under `format`. Errors: kUnsupported, "quant_method: ".
Result<std::optional<DeclaredForm>> compressed_tensors_form(const std::string& format,
                                                            const Json* weights);
/// Reads the keys of containers, section 7, but levels and bias.
Result<HybridMap> parse_hybrid_map(const Json& quant, int64_t experts);
/// Eight levels, BF16-rounded. Errors: kCorruptInput, "nf3_levels: ".
Result<std::array<float, 8>> parse_nf3_levels(const Json& value);
/// Adds every string of the array `object[key]` to `list`. Errors: kCorruptInput if it is none.
Result<void> add_names(const Json& object, const std::string& key, NameList& list);
/// q_proj gives {q_proj, k_proj, v_proj}, gate_proj {gate_proj, up_proj}; empty for others.
std::vector<std::string_view> fused_sources(std::string_view last_component);
/// The fused name of such a component ("qkv_proj", "gate_up_proj"), empty for others.
std::string_view fused_name(std::string_view last_component);

}  // namespace nibble::recipe
