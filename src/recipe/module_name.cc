#include "recipe/module_name.h"

namespace nibble::recipe {
namespace {

constexpr std::string_view kLayers = "layers.";
constexpr std::string_view kExperts = "experts.";

/// Position of `word` at the start of a dotted component, or npos.
size_t find_component(std::string_view name, std::string_view word, size_t from = 0) {
  for (size_t at = name.find(word, from); at != std::string_view::npos;
       at = name.find(word, at + 1)) {
    if (at == 0 || name[at - 1] == '.') return at;
  }
  return std::string_view::npos;
}

}  // namespace

int64_t leading_number(std::string_view text) {
  int64_t value = -1;
  for (size_t i = 0; i < text.size() && text[i] >= '0' && text[i] <= '9'; ++i) {
    if (i == 9) return -1;
    value = (value < 0 ? 0 : value) * 10 + (text[i] - '0');
  }
  return value;
}

std::string_view without_prefix(std::string_view name) {
  for (bool again = true; again;) {
    again = false;
    for (const std::string_view prefix : {"model.", "language_model."}) {
      if (name.starts_with(prefix) && name.size() > prefix.size()) {
        name.remove_prefix(prefix.size());
        again = true;
      }
    }
  }
  return name;
}

ModuleNumbers module_numbers(std::string_view module) {
  ModuleNumbers out;
  const size_t layers = find_component(module, kLayers);
  if (layers != std::string_view::npos) {
    const bool draft = find_component(module.substr(0, layers), "mtp.") != std::string_view::npos;
    if (!draft) out.layer = leading_number(module.substr(layers + kLayers.size()));
  }
  const size_t experts = find_component(module, kExperts);
  if (experts != std::string_view::npos) {
    out.expert = leading_number(module.substr(experts + kExperts.size()));
    out.experts_module = module.substr(0, experts + kExperts.size() - 1);
  }
  return out;
}

}  // namespace nibble::recipe
