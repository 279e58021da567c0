// A family: how its config reads, and every weight its graph needs with the stored module names.
// A new family is one file that defines a Family, and one row in families.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "checkpoint/checkpoint_index.h"
#include "recipe/module_tensors.h"
#include "recipe/recipe.h"

namespace nibble::recipe {

/// Matrices are cross-checked against the declared quantization; routers and embeddings, which
/// exporters leave alone without saying so, only if they are quantized.
enum class WeightKind : uint8_t { kVector, kMatrix, kSilentMatrix };

/// One weight of the graph and the module that should hold it.
struct ExpectedWeight {
  WeightKey key;
  WeightKind kind = WeightKind::kMatrix;
  ModuleRef module;  // kVector: the whole tensor name
  int64_t rows = 1, cols = 0;
  bool optional = false;
};

struct Family {
  std::string_view name;
  std::span<const std::string_view> model_types;
  Result<ModelConfig> (*parse_config)(const Json& config, const Json* generation_config);
  /// Number of MTP layers that the files hold at least a part of, whatever the config promises.
  int64_t (*stored_mtp_layers)(const ModelConfig& config, const checkpoint::CheckpointIndex& index);
  /// Every weight, MTP layers (layer >= config.layers) included. Looks at the index for prefixes
  /// and for experts that are stacked; never at dtypes or shapes.
  std::vector<ExpectedWeight> (*enumerate)(const ModelConfig& config,
                                           const checkpoint::CheckpointIndex& index);
};

extern const Family kGlm4Moe;

/// Null if unknown.
const Family* find_family(std::string_view model_type);
/// "glm4_moe, ..."
std::string known_families();

}  // namespace nibble::recipe
