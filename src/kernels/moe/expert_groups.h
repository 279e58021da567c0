// (token, slot) pairs sorted by expert, so that every active expert runs once over its tokens.
#pragma once

#include <cstdint>

#include "kernels/moe/moe.h"

namespace nibble::kernels {

struct ActiveExpert {
  const ExpertRef* ref = nullptr;
  int64_t first = 0;  // its pairs are [first, first + rows)
  int64_t rows = 0;
};

/// A pair is a token's row for one expert. Slots of a token: its top_k, then the shared expert.
struct ExpertGroups {
  ActiveExpert* active = nullptr;
  int64_t active_count = 0;
  int64_t pairs = 0;
  int64_t slots = 0;            // per token
  int32_t* token = nullptr;     // [pairs]
  int32_t* position = nullptr;  // [tokens, slots], the pair's index
  float* weight = nullptr;      // [tokens, slots]
};

/// Carves its arrays from `workspace`; the caller's scope frees them.
ExpertGroups group_by_expert(const MoeArgs& args, Workspace& workspace);
int64_t expert_groups_bytes(int64_t tokens, int64_t top_k, int64_t experts);

}  // namespace nibble::kernels
