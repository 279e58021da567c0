// Finding and parsing the declared quantization; look-ups are in declared.cc.
#include "recipe/quantization.h"

#include <algorithm>

#include "base/json.h"
#include "recipe/module_name.h"

namespace nibble::recipe {
namespace {

constexpr int64_t kMaxFp8Block = 1 << 20;

std::string upper(std::string text) {
  for (char& c : text) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return text;
}

Error unknown_method(const std::string& what, std::string_view known) {
  return Error(Code::kUnsupported, cat("quant_method: ", what, " is not known; known are ", known));
}

/// One string of `object` under any of two keys, "" if absent or null.
Result<std::string> text_of(const Json& object, const std::string& key) {
  return json_string(object, key, "");
}

/// The text model's own object: its sizes, and in some files its quantization.
const Json& text_object(const Json& config) {
  const Json* text = json_find(config, "text_config");
  return text != nullptr && text->is_object() ? *text : config;
}

Result<int64_t> expert_count(const Json& text) {
  for (const char* key : {"n_routed_experts", "num_experts", "num_local_experts"}) {
    if (json_find(text, key) == nullptr) continue;
    NIBBLE_TRY(const int64_t count, json_int(text, key));
    if (count < 0) {
      return Error(Code::kCorruptInput, cat("key '", key, "': expected 0 or more, found ", count));
    }
    return count;
  }
  return 0;
}

}  // namespace

Result<void> add_names(const Json& object, const std::string& key, NameList& list) {
  const Json* names = json_find(object, key);
  if (names == nullptr) return {};
  if (!names->is_array()) {
    return Error(Code::kCorruptInput, cat("key '", key, "': expected a list of names, found ",
                                          json_dump(*names).substr(0, 60)));
  }
  for (const Json& name : *names) {
    if (!name.is_string()) {
      return Error(Code::kCorruptInput,
                   cat("key '", key, "': expected names, found ", json_dump(name).substr(0, 60)));
    }
    NIBBLE_TRY(list.add(name.get_ref<const std::string&>()));
  }
  return {};
}

Result<std::optional<DeclaredForm>> modelopt_form(const std::string& algo) {
  using formats::FormatId;
  const std::string name = upper(algo);
  if (name.empty() || name == "NONE") return std::optional<DeclaredForm>();
  DeclaredForm form;
  form.label = cat("quant_algo ", algo);
  if (name == "NVFP4" || name == "W4A16_NVFP4") {
    form.format = FormatId::kNvfp4;
  } else if (name == "MXFP8") {
    form.format = FormatId::kMxfp8;
  } else if (name == "FP8") {
    form.format = FormatId::kFp8Tensor;
  } else if (name == "FP8_PER_CHANNEL_PER_TOKEN") {
    form.format = FormatId::kFp8Channel;
  } else if (name == "FP8_PB_WO" || name == "FP8_BLOCK_SCALES") {
    form.format = FormatId::kFp8Block;
    form.block_rows = form.block_cols = 128;
  } else {
    return unknown_method(cat("quant_algo '", algo.substr(0, 60), "'"),
                          "NVFP4, W4A16_NVFP4, MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, "
                          "FP8_BLOCK_SCALES, MIXED_PRECISION");
  }
  return std::optional<DeclaredForm>(std::move(form));
}

Result<void> Quantization::parse_quantized_layers(const Json& layers) {
  if (!layers.is_object()) {
    return Error(Code::kCorruptInput, cat("key 'quantized_layers': expected an object, found ",
                                          json_dump(layers).substr(0, 60)));
  }
  for (const auto& [module, value] : layers.items()) {
    NIBBLE_TRY(const std::string algo, text_of(value, "quant_algo"),
               cat("quantized_layers '", module, "'"));
    LayerEntry entry;
    NIBBLE_TRY(entry.form, modelopt_form(algo));
    if (const Json* encoding = json_find(value, "weight_scale_encoding")) {
      if (!encoding->is_string() || encoding->get_ref<const std::string&>() != "csf") {
        return Error(Code::kCorruptInput,
                     cat("scale_encoding: module '", module, "': expected csf, found ",
                         json_dump(*encoding).substr(0, 60)));
      }
      if (upper(algo) != "NVFP4") {
        return Error(Code::kCorruptInput,
                     cat("scale_encoding: module '", module,
                         "': csf goes with quant_algo NVFP4, found '", algo, "'"));
      }
      entry.encoded_scale = true;
      ++encoded_modules_;
    }
    const std::string key(without_prefix(module));
    const std::string_view experts = module_numbers(key).experts_module;
    if (!experts.empty()) experts_below_.emplace(experts, entry);
    layers_.insert_or_assign(key, std::move(entry));
  }
  return {};
}

Result<void> Quantization::parse_modelopt(const Json& quant) {
  method_ = QuantMethod::kModelOpt;
  NIBBLE_TRY(const std::string algo, text_of(quant, "quant_algo"));
  ignore_ = NameList(/*substrings=*/true);
  NIBBLE_TRY(add_names(quant, "ignore", ignore_));
  NIBBLE_TRY(add_names(quant, "exclude_modules", ignore_));
  mixed_ = upper(algo) == "MIXED_PRECISION";
  if (!mixed_) {
    NIBBLE_TRY(default_form_, modelopt_form(algo));
  }
  // A single-algorithm config may repeat itself per layer; only MIXED_PRECISION reads the table,
  // but an encoding declared there must never be overlooked.
  if (const Json* layers = json_find(quant, "quantized_layers")) {
    NIBBLE_TRY(parse_quantized_layers(*layers));
  }
  return {};
}

Result<void> Quantization::parse_fp8(const Json& quant) {
  method_ = QuantMethod::kFp8;
  DeclaredForm form;
  form.any_fp8 = true;
  form.format = formats::FormatId::kFp8Block;
  form.label = "quant_method fp8";
  if (const Json* block = json_find(quant, "weight_block_size")) {
    const bool two = block->is_array() && block->size() == 2;
    int64_t extents[2] = {0, 0};
    for (size_t i = 0; two && i < 2; ++i) {
      if (!(*block)[i].is_number_integer()) break;
      const Json holder = {{"weight_block_size", (*block)[i]}};
      NIBBLE_TRY(extents[i], json_int(holder, "weight_block_size"));
    }
    if (std::min(extents[0], extents[1]) < 1 || std::max(extents[0], extents[1]) > kMaxFp8Block) {
      return Error(Code::kCorruptInput,
                   cat("key 'weight_block_size': expected two numbers from 1 to ", kMaxFp8Block,
                       ", found ", json_dump(*block).substr(0, 60)));
    }
    form.any_fp8 = false;
    form.block_rows = extents[0];
    form.block_cols = extents[1];
    form.label = cat("quant_method fp8, weight_block_size [", extents[0], ", ", extents[1], "]");
  }
  default_form_ = std::move(form);
  ignore_ = NameList(/*substrings=*/true);
  NIBBLE_TRY(add_names(quant, "modules_to_not_convert", ignore_));
  NIBBLE_TRY(add_names(quant, "ignored_layers", ignore_));
  return {};
}

Result<void> Quantization::parse_mxfp4(const Json& quant) {
  method_ = QuantMethod::kMxfp4;
  DeclaredForm form;
  form.format = formats::FormatId::kMxfp4;
  form.label = "quant_method mxfp4";
  expert_form_ = std::move(form);
  ignore_ = NameList(/*substrings=*/true);
  return add_names(quant, "modules_to_not_convert", ignore_);
}

Result<void> Quantization::parse_hybrid(const Json& quant, int64_t experts) {
  method_ = QuantMethod::kHybrid;
  NIBBLE_TRY(hybrid_, parse_hybrid_map(quant, experts));
  if (const Json* levels = json_find(quant, "nf3_levels")) {
    NIBBLE_TRY(nf3_levels_, parse_nf3_levels(*levels));
  }
  NIBBLE_TRY(const int64_t bias, json_int(quant, "nf3_scale_bias_log2", 4));
  if (bias < -formats::kMaxNf3BiasLog2 || bias > formats::kMaxNf3BiasLog2) {
    return Error(Code::kCorruptInput,
                 cat("key 'nf3_scale_bias_log2': expected a magnitude of at most ",
                     formats::kMaxNf3BiasLog2, ", found ", bias));
  }
  nf3_bias_log2_ = static_cast<int>(bias);
  ignore_ = NameList(/*substrings=*/true);
  NIBBLE_TRY(add_names(quant, "exclude_modules", ignore_));
  return add_names(quant, "ignore", ignore_);
}

Json source_quantization(const Json& serving) {
  if (const Json* source = json_find(serving, "source_quantization_config")) return *source;
  Json out = serving;
  out.erase("format_version");
  out.erase("checkpoint_root");
  // The MXFP4 form overwrites the method, so what else stands there has to tell it.
  out["quant_method"] = json_find(out, "config_groups") != nullptr ? "compressed-tensors" : "fp8";
  return out;
}

Result<Quantization> Quantization::parse(const Json& quantization, int64_t experts) {
  Quantization out;
  if (quantization.is_null()) return out;
  if (!quantization.is_object()) {
    return Error(Code::kCorruptInput, cat("quantization_config: expected an object, found ",
                                          json_dump(quantization).substr(0, 60)));
  }
  if (quantization.empty()) return out;
  const Json* inner = json_find(quantization, "quantization");
  const bool nested = inner != nullptr && inner->is_object();
  const Json& quant = nested ? *inner : quantization;
  NIBBLE_TRY(std::string method, text_of(quantization, "quant_method"));
  if (method.empty() && nested) {
    NIBBLE_TRY(method, text_of(quant, "quant_method"));
  }
  if (method.empty() && (nested || json_find(quant, "quant_algo") != nullptr)) method = "modelopt";
  if (method == "nvfp4_csf" || method == "mxfp4_csf") {
    if (method == "nvfp4_csf" && json_find(quant, "source_quantization_config") == nullptr) {
      return Error(Code::kCorruptInput,
                   "quant_method: nvfp4_csf without source_quantization_config");
    }
    const Json original = source_quantization(quant);
    if (json_find(original, "quant_method") != nullptr && original["quant_method"] == method) {
      return unknown_method(cat("'", method, "' inside source_quantization_config"),
                            "its source's");
    }
    NIBBLE_TRY(out, parse(original, experts));
    out.set_manifest_csf(method == "nvfp4_csf" ? codec::CsfKind::kNvfp4 : codec::CsfKind::kMxfp4);
    return out;
  }
  // Newer ModelOpt files name the algorithm in the method: modelopt_fp4, modelopt_mixed.
  if (json_find(quant, "hybrid_bit_map") != nullptr || method == "nvfp4_nf3_hybrid") {
    NIBBLE_TRY(out.parse_hybrid(quant, experts));
  } else if (method == "modelopt" || method.starts_with("modelopt_")) {
    NIBBLE_TRY(out.parse_modelopt(quant));
  } else if (method == "compressed-tensors") {
    NIBBLE_TRY(out.parse_compressed_tensors(quant));
  } else if (method == "fp8") {
    NIBBLE_TRY(out.parse_fp8(quant));
  } else if (method == "mxfp4") {
    NIBBLE_TRY(out.parse_mxfp4(quant));
  } else {
    return unknown_method(cat("'", method.substr(0, 60), "'"),
                          "modelopt, compressed-tensors, fp8, mxfp4, nvfp4_nf3_hybrid");
  }
  return out;
}

Result<Quantization> Quantization::from_config(const Json& config, const Json* hf_quant_config) {
  const Json& text = text_object(config);
  const Json* quant = json_find(config, "quantization_config");
  if (quant == nullptr) quant = json_find(text, "quantization_config");
  if (quant == nullptr) quant = hf_quant_config;
  if (quant == nullptr) return Quantization();
  NIBBLE_TRY(const int64_t experts, expert_count(text));
  NIBBLE_TRY(Quantization out, parse(*quant, experts));
  NIBBLE_TRY(const std::string expert_dtype, json_string(text, "expert_dtype", ""));
  if (out.method_ == QuantMethod::kFp8 && expert_dtype == "fp4") {
    DeclaredForm form;
    form.format = formats::FormatId::kMxfp4;
    form.label = "expert_dtype fp4";
    out.expert_form_ = std::move(form);
  }
  return out;
}

}  // namespace nibble::recipe
