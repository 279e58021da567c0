// Roles and keys in words.
#include "recipe/recipe.h"

namespace nibble::recipe {

std::string_view role_name(Role role) {
  switch (role) {
    case Role::kEmbedding: return "embedding";
    case Role::kHead: return "head";
    case Role::kFinalNorm: return "final norm";
    case Role::kInputNorm: return "input norm";
    case Role::kPostAttentionNorm: return "post-attention norm";
    case Role::kQ: return "q";
    case Role::kK: return "k";
    case Role::kV: return "v";
    case Role::kO: return "o";
    case Role::kQBias: return "q bias";
    case Role::kKBias: return "k bias";
    case Role::kVBias: return "v bias";
    case Role::kOBias: return "o bias";
    case Role::kQNorm: return "q norm";
    case Role::kKNorm: return "k norm";
    case Role::kRouter: return "router";
    case Role::kRouterBias: return "router bias";
    case Role::kExpertGate: return "gate";
    case Role::kExpertUp: return "up";
    case Role::kExpertDown: return "down";
    case Role::kDenseGate: return "dense gate";
    case Role::kDenseUp: return "dense up";
    case Role::kDenseDown: return "dense down";
    case Role::kSharedGate: return "shared gate";
    case Role::kSharedUp: return "shared up";
    case Role::kSharedDown: return "shared down";
    case Role::kMtpProjection: return "mtp projection";
    case Role::kMtpEmbeddingNorm: return "mtp embedding norm";
    case Role::kMtpHiddenNorm: return "mtp hidden norm";
    case Role::kMtpHeadNorm: return "mtp head norm";
    case Role::kMtpEmbedding: return "mtp embedding";
    case Role::kMtpHead: return "mtp head";
  }
  NIBBLE_CHECK(false, "role ", static_cast<int>(role));
  return {};
}

std::string key_text(const WeightKey& key) {
  std::string out;
  if (key.layer >= 0) out += cat("layer ", key.layer, " ");
  if (key.expert >= 0) out += cat("expert ", key.expert, " ");
  return out + std::string(role_name(key.role));
}

}  // namespace nibble::recipe
