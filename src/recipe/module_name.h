// Reading stored module names: the prefixes dialects disagree on, and the layer and expert numbers
// inside a name. Pure text; knows no family. Spec: containers, sections 2 and 7.
#pragma once

#include <cstdint>
#include <string_view>

namespace nibble::recipe {

/// Layer and expert numbers of "…layers.N…" and "….experts.E.…", -1 where absent. The layer of a
/// draft named "mtp.layers.N" is -1: that N does not count with the main model's layers.
struct ModuleNumbers {
  int64_t layer = -1;
  int64_t expert = -1;
  /// "…layers.N.mlp.experts", empty if the module is no routed expert (or stacked experts).
  std::string_view experts_module;
};
ModuleNumbers module_numbers(std::string_view module);

/// Without leading "model." and "language_model." components, so that names of configs and of
/// files compare: "model.language_model.layers.0.mlp" gives "layers.0.mlp".
std::string_view without_prefix(std::string_view name);

/// Decimal digits at the start of `text` as a number, at most 9 of them; -1 if there is none.
int64_t leading_number(std::string_view text);

}  // namespace nibble::recipe
