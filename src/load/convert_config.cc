#include "load/convert_config.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/json.h"

namespace nibble::load {
namespace {

using formats::FormatId;

/// "….layers.3.mlp.experts" of "….layers.3.mlp.experts.7.up_proj".
std::string experts_module(const std::string& name) {
  return name.substr(0, name.find(".experts.") + 8);
}

std::string last_component(const std::string& name) { return name.substr(name.rfind('.') + 1); }

Json names_of(const std::vector<ResultModule>& modules) {
  Json names = Json::array();
  for (const ResultModule& module : modules) names.push_back(module.name);
  return names;
}

// ModelOpt.

Json modelopt_entry(const ResultModule& module) {
  switch (module.format) {
    case FormatId::kNvfp4:
      // Without a stored input scale only the weights are quantized.
      return {{"quant_algo", module.input_scale ? "NVFP4" : "W4A16_NVFP4"}, {"group_size", 16}};
    case FormatId::kMxfp8: return {{"quant_algo", "MXFP8"}, {"group_size", 32}};
    case FormatId::kFp8Block: return {{"quant_algo", "FP8_PB_WO"}};
    case FormatId::kFp8Channel: return {{"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"}};
    default: return {{"quant_algo", "FP8"}};
  }
}

/// Ignore entries match any part of a name: whether one would hide a quantized module.
bool ignore_hides(const ConvertPlan& plan) {
  std::map<int32_t, std::vector<const std::string*>> quantized;
  for (const ResultModule& module : plan.quantized) {
    quantized[module.key.layer].push_back(&module.name);
  }
  for (const ResultModule& module : plan.plain) {
    for (const auto& [layer, names] : quantized) {
      if (module.key.layer >= 0 && module.key.layer != layer) continue;
      for (const std::string* name : names) {
        if (name->find(module.name) != std::string::npos) return true;
      }
    }
  }
  return false;
}

Json quantized_layers(const ConvertPlan& plan) {
  Json layers = Json::object();
  std::map<std::string, std::vector<const ResultModule*>> experts;
  std::map<std::string, int64_t> plain_experts;
  for (const ResultModule& module : plan.quantized) {
    if (is_routed_expert(module.key.role)) {
      experts[experts_module(module.name)].push_back(&module);
    } else {
      layers[module.name] = modelopt_entry(module);
    }
  }
  for (const ResultModule& module : plan.plain) {
    if (is_routed_expert(module.key.role)) ++plain_experts[experts_module(module.name)];
  }
  for (const auto& [name, modules] : experts) {
    const Json first = modelopt_entry(*modules.front());
    const bool equal = !plain_experts.contains(name) &&
                       std::all_of(modules.begin(), modules.end(), [&first](const ResultModule* m) {
                         return modelopt_entry(*m) == first;
                       });
    if (equal) {
      layers[name] = first;
    } else {
      for (const ResultModule* module : modules) layers[module->name] = modelopt_entry(*module);
    }
  }
  return layers;
}

/// The keys that config.json and hf_quant_config.json share; only the ignore list's name differs.
Json modelopt_keys(const ConvertPlan& plan, const char* ignore_key) {
  std::set<Json> entries;
  for (const ResultModule& module : plan.quantized) entries.insert(modelopt_entry(module));
  Json quant;
  if (entries.size() == 1 && !ignore_hides(plan)) {
    quant = *entries.begin();
    quant[ignore_key] = names_of(plan.plain);
  } else {
    quant["quant_algo"] = "MIXED_PRECISION";
    quant["quantized_layers"] = quantized_layers(plan);
  }
  return quant;
}

// compressed-tensors.

struct GroupFacts {
  const char* format;
  Json weights;
};

GroupFacts group_facts(FormatId format) {
  Json weights = {{"num_bits", format == FormatId::kMxfp8 ? 8 : 4},
                  {"type", "float"},
                  {"symmetric", true},
                  {"dynamic", false},
                  {"strategy", format == FormatId::kNvfp4 ? "tensor_group" : "group"},
                  {"group_size", format == FormatId::kNvfp4 ? 16 : 32}};
  if (format != FormatId::kNvfp4) weights["scale_dtype"] = "torch.uint8";
  const char* name = "nvfp4-pack-quantized";
  if (format == FormatId::kMxfp4) name = "mxfp4-pack-quantized";
  if (format == FormatId::kMxfp8) name = "mxfp8-quantized";
  return {name, std::move(weights)};
}

std::string regex_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '.') out += '\\';
    out += c;
  }
  return out;
}

/// One pattern for all routed experts where they share a format, else every name.
Json expert_targets(const std::vector<const ResultModule*>& experts, bool all_alike) {
  Json targets = Json::array();
  std::set<std::string> tails;  // ".mlp.experts"
  for (const ResultModule* module : experts) {
    const std::string base = experts_module(module->name);
    const std::string number = cat("layers.", module->key.layer, ".");
    const size_t at = base.find(number);
    tails.insert(at == std::string::npos ? base : base.substr(at + number.size() - 1));
  }
  if (all_alike && tails.size() == 1 && tails.begin()->starts_with('.')) {
    targets.push_back(cat("re:.*layers\\.[0-9]+", regex_escaped(*tails.begin()), "\\..*"));
    return targets;
  }
  for (const ResultModule* module : experts) targets.push_back(module->name);
  return targets;
}

Json compressed_tensors_keys(const ConvertPlan& plan) {
  struct Members {
    std::vector<const ResultModule*> experts, others;
  };
  std::map<FormatId, Members> by_format;
  std::set<FormatId> expert_formats;
  for (const ResultModule& module : plan.quantized) {
    Members& members = by_format[module.format];
    const bool expert = is_routed_expert(module.key.role);
    (expert ? members.experts : members.others).push_back(&module);
    if (expert) expert_formats.insert(module.format);
  }
  const bool plain_experts =
      std::any_of(plan.plain.begin(), plan.plain.end(),
                  [](const ResultModule& m) { return is_routed_expert(m.key.role); });
  Json groups = Json::object();
  Json ignore = names_of(plan.plain);
  for (const auto& [format, members] : by_format) {
    GroupFacts facts = group_facts(format);
    Json targets = Json::array();
    if (by_format.size() == 1) {
      targets.push_back("Linear");
    } else {
      if (!members.experts.empty()) {
        targets = expert_targets(members.experts, expert_formats.size() == 1 && !plain_experts);
      }
      for (const ResultModule* module : members.others) targets.push_back(module->name);
    }
    groups[cat("group_", groups.size())] = {{"format", facts.format},
                                            {"targets", std::move(targets)},
                                            {"weights", std::move(facts.weights)},
                                            {"input_activations", nullptr},
                                            {"output_activations", nullptr}};
  }
  const bool single = by_format.size() == 1;
  return {{"quant_method", "compressed-tensors"},
          {"format", single ? group_facts(by_format.begin()->first).format : "mixed-precision"},
          {"quantization_status", "compressed"},
          {"config_groups", std::move(groups)},
          {"ignore", std::move(ignore)}};
}

// Hybrid.

Error cannot_say(const std::string& what) {
  return Error(Code::kUnsupported, cat("the hybrid config cannot say that ", what));
}

/// ignored_layers: components that name every plain matrix and no MXFP8 one.
Result<Json> ignored_layers(const ConvertPlan& plan) {
  std::set<std::string> components;
  for (const ResultModule& module : plan.plain) {
    if (!is_routed_expert(module.key.role)) components.insert(last_component(module.name));
  }
  components.insert("embed_tokens");
  for (const ResultModule& module : plan.quantized) {
    if (module.format != FormatId::kMxfp8) continue;
    for (size_t begin = 0; begin <= module.name.size();) {
      const size_t end = std::min(module.name.find('.', begin), module.name.size());
      const std::string component = module.name.substr(begin, end - begin);
      if (components.contains(component)) {
        return cannot_say(
            cat("'", module.name, "' is mxfp8 while another '", component, "' is not"));
      }
      begin = end + 1;
    }
  }
  return Json(std::vector<std::string>(components.begin(), components.end()));
}

Result<Json> hybrid_keys(const ConvertPlan& plan) {
  std::map<int32_t, std::map<int32_t, std::set<FormatId>>> tiers;  // by layer and expert
  std::set<FormatId> kept;
  const ResultModule* nf3 = nullptr;
  bool dense_mxfp8 = false;
  for (const ResultModule& module : plan.quantized) {
    dense_mxfp8 = dense_mxfp8 || module.format == FormatId::kMxfp8;
    if (!is_routed_expert(module.key.role)) continue;
    tiers[module.key.layer][module.key.expert].insert(module.format);
    if (module.format != FormatId::kNf3) {
      kept.insert(module.format);
    } else if (nf3 == nullptr) {
      nf3 = &module;
    } else if (module.meta.nf3_levels != nf3->meta.nf3_levels ||
               module.meta.nf3_bias_log2 != nf3->meta.nf3_bias_log2) {
      return cannot_say(cat("'", module.name, "' has other levels or bias than '", nf3->name, "'"));
    }
  }
  if (kept.size() > 1) return cannot_say("kept experts have two formats");
  for (const ResultModule& module : plan.plain) {
    if (is_routed_expert(module.key.role)) {
      return cannot_say(cat("'", module.name, "' is not quantized"));
    }
  }
  Json map = Json::object();
  for (const auto& [layer, experts] : tiers) {
    Json bits = Json::array();
    for (const auto& [expert, found] : experts) {
      if (found.size() != 1) {
        return cannot_say(cat("expert ", expert, " of layer ", layer, " has two formats"));
      }
      bits.push_back(*found.begin() == FormatId::kNf3 ? 3 : 4);
    }
    map[cat(layer)] = std::move(bits);
  }
  Json quant = {{"quant_method", "nvfp4_nf3_hybrid"}, {"hybrid_bit_map", std::move(map)}};
  if (!kept.empty()) {
    quant["kept_format"] = kept.contains(FormatId::kMxfp4) ? "mxfp4_e8m0k32" : "NVFP4";
  }
  if (nf3 != nullptr) {
    quant["nf3_levels"] = nf3->meta.nf3_levels;
    if (nf3->meta.nf3_bias_log2 != 0) quant["nf3_scale_bias_log2"] = nf3->meta.nf3_bias_log2;
  }
  if (dense_mxfp8) {
    quant["dense_format"] = "mxfp8";
    NIBBLE_TRY(quant["ignored_layers"], ignored_layers(plan));
  }
  return quant;
}

const Json* old_quantization(const Json& config) {
  if (const Json* quant = json_find(config, "quantization_config")) return quant;
  const Json* text = json_find(config, "text_config");
  return text == nullptr ? nullptr : json_find(*text, "quantization_config");
}

}  // namespace

Result<ConvertedConfig> converted_config(const Json& source, const ConvertPlan& plan) {
  ConvertedConfig out;
  out.config = source;
  // What the source says of its KV cache stays true.
  Json kv_scheme;
  if (const Json* old = old_quantization(source)) {
    if (const Json* scheme = json_find(*old, "kv_cache_scheme")) kv_scheme = *scheme;
  }
  out.config.erase("quantization_config");
  if (const auto text = out.config.find("text_config");
      text != out.config.end() && text->is_object()) {
    text->erase("quantization_config");
  }
  if (plan.quantized.empty()) return out;
  Json quant;
  switch (plan.dialect) {
    case ConvertDialect::kModelOpt: {
      const Json producer = {{"name", "nibble"}};
      quant = modelopt_keys(plan, "ignore");
      quant["quant_method"] = "modelopt";
      quant["producer"] = producer;
      Json inner = modelopt_keys(plan, "exclude_modules");
      inner["kv_cache_quant_algo"] = nullptr;
      out.hf_quant_config = Json{{"producer", producer}, {"quantization", std::move(inner)}};
      break;
    }
    case ConvertDialect::kCompressedTensors: quant = compressed_tensors_keys(plan); break;
    case ConvertDialect::kHybrid: {
      NIBBLE_TRY(quant, hybrid_keys(plan));
      break;
    }
  }
  if (!kv_scheme.is_null()) quant["kv_cache_scheme"] = std::move(kv_scheme);
  out.config["quantization_config"] = std::move(quant);
  return out;
}

}  // namespace nibble::load
