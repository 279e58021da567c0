// Quantization's look-ups: what the config says about one module.
#include "recipe/module_name.h"
#include "recipe/quantization.h"

namespace nibble::recipe {
namespace {

std::string_view last_component(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

/// `name` with its last component replaced.
std::string sibling(std::string_view name, std::string_view last) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string(last) : cat(name.substr(0, dot + 1), last);
}

/// Whether `entry` stands in `name` as whole dotted components.
bool has_components(std::string_view name, std::string_view entry) {
  if (entry.empty()) return false;
  for (size_t at = name.find(entry); at != std::string_view::npos; at = name.find(entry, at + 1)) {
    const size_t end = at + entry.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return true;
  }
  return false;
}

bool ignored_dense(const HybridMap& map, std::string_view module) {
  for (const std::string& entry : map.ignored_layers) {
    if (has_components(module, without_prefix(entry))) return true;
  }
  return false;
}

Declared as_declared(const DeclaredForm* form) {
  Declared out;
  out.known = true;
  out.form = form;
  out.because = form == nullptr ? std::string_view("no algorithm") : form->label;
  return out;
}

Declared left_alone(std::string_view because) {
  Declared out;
  out.known = true;
  out.because = because;
  return out;
}

}  // namespace

std::vector<std::string_view> fused_sources(std::string_view last) {
  if (last == "q_proj" || last == "k_proj" || last == "v_proj") {
    return {"q_proj", "k_proj", "v_proj"};
  }
  if (last == "gate_proj" || last == "up_proj") return {"gate_proj", "up_proj"};
  return {};
}

std::string_view fused_name(std::string_view last) {
  if (last == "q_proj" || last == "k_proj" || last == "v_proj") return "qkv_proj";
  if (last == "gate_proj" || last == "up_proj") return "gate_up_proj";
  return {};
}

bool fits(const Declared& declared, formats::FormatId id) {
  using formats::FormatId;
  if (!declared.known) return true;
  const bool plain = id == FormatId::kF32 || id == FormatId::kF16 || id == FormatId::kBf16;
  if (declared.form == nullptr) return plain;
  if (declared.form->any_fp8) {
    return id == FormatId::kFp8Block || id == FormatId::kFp8Channel || id == FormatId::kFp8Tensor;
  }
  return declared.form->format == id;
}

const Quantization::LayerEntry* Quantization::mixed_entry(std::string_view module) const {
  const std::string name(without_prefix(module));
  if (const auto own = layers_.find(name); own != layers_.end()) return &own->second;
  if (const std::string_view fused = fused_name(last_component(name)); !fused.empty()) {
    if (const auto found = layers_.find(sibling(name, fused)); found != layers_.end()) {
      return &found->second;
    }
  }
  const std::string_view experts = module_numbers(name).experts_module;
  if (experts.empty()) return nullptr;
  if (const auto found = layers_.find(std::string(experts)); found != layers_.end()) {
    return &found->second;
  }
  const auto below = experts_below_.find(std::string(experts));
  return below == experts_below_.end() ? nullptr : &below->second;
}

Result<Declared> Quantization::declared_hybrid(std::string_view module) const {
  const std::string_view name = without_prefix(module);
  const ModuleNumbers numbers = module_numbers(module);
  if (!numbers.experts_module.empty() && numbers.expert >= 0) {
    const auto layer = hybrid_->bits.find(numbers.layer);
    if (layer == hybrid_->bits.end()) return as_declared(&hybrid_->unmapped);
    if (numbers.expert >= static_cast<int64_t>(layer->second.size())) {
      return Error(Code::kCorruptInput,
                   cat("bit_map: layer ", numbers.layer, " has ", layer->second.size(),
                       " entries, module '", module, "' is beyond them"));
    }
    const bool kept = layer->second[static_cast<size_t>(numbers.expert)] == 4;
    Declared out = as_declared(kept ? &hybrid_->kept : &hybrid_->demoted);
    out.required = true;
    return out;
  }
  if (ignore_.matches(module)) return left_alone("on the exclude_modules list");
  if (!hybrid_->dense_mxfp8) return Declared();
  const bool ignored = ignored_dense(*hybrid_, name);
  for (const std::string_view source : fused_sources(last_component(name))) {
    const std::string other = sibling(name, source);
    if (ignored_dense(*hybrid_, other) != ignored) {
      return Error(Code::kCorruptInput,
                   cat("ignored_partial: of one fused layer '", ignored ? std::string(name) : other,
                       "' is on the ignored_layers list and '", ignored ? other : std::string(name),
                       "' is not"));
    }
  }
  return ignored ? left_alone("on the ignored_layers list") : as_declared(&hybrid_->dense);
}

Result<Declared> Quantization::declared(std::string_view module) const {
  if (method_ == QuantMethod::kNone) return left_alone("no quantization_config");
  if (method_ == QuantMethod::kHybrid) return declared_hybrid(module);
  const LayerEntry* entry = layers_.empty() ? nullptr : mixed_entry(module);
  const bool encoded = entry != nullptr && entry->encoded_scale;
  Declared out;
  if (ignore_.matches(module)) {
    out = left_alone("on the ignore list");
  } else if (const std::string_view fused = fused_name(last_component(module));
             !fused.empty() && !ignore_.empty() && ignore_.matches(sibling(module, fused))) {
    out = left_alone("on the ignore list");
  } else if (mixed_) {
    out = entry == nullptr ? left_alone("no quantized_layers entry")
                           : as_declared(entry->form ? &*entry->form : nullptr);
  } else if (method_ == QuantMethod::kCompressedTensors) {
    out = left_alone("in no config group");
    for (const Group& group : groups_) {
      if (group.targets.matches(module)) {
        out = as_declared(&group.form);
        break;
      }
      if (group.every_linear && out.form == nullptr) out = as_declared(&group.form);
    }
  } else if (expert_form_ && !module_numbers(module).experts_module.empty()) {
    out = as_declared(&*expert_form_);
  } else {
    out = default_form_ ? as_declared(&*default_form_) : left_alone("no algorithm");
  }
  out.encoded_scale = encoded;
  return out;
}

std::array<int64_t, 2> Quantization::fp8_block(const Declared& declared) const {
  for (const DeclaredForm* form :
       {declared.form,
        default_form_ ? &*default_form_ : static_cast<const DeclaredForm*>(nullptr)}) {
    if (form != nullptr && form->block_rows > 0) return {form->block_rows, form->block_cols};
  }
  return {128, 128};
}

}  // namespace nibble::recipe
