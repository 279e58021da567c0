#include "kernels/moe/expert_groups.h"

#include <algorithm>

namespace nibble::kernels {

ExpertGroups group_by_expert(const MoeArgs& args, Workspace& workspace) {
  const auto experts = static_cast<int64_t>(args.experts.size());
  const int64_t routed = args.tokens * args.top_k;
  ExpertGroups g;
  g.slots = args.top_k + (args.shared != nullptr ? 1 : 0);
  g.pairs = args.tokens * g.slots;
  g.active = workspace.take<ActiveExpert>(experts + 1);
  g.token = workspace.take<int32_t>(g.pairs);
  g.position = workspace.take<int32_t>(g.pairs);
  g.weight = workspace.take<float>(g.pairs);
  int32_t* next = workspace.take<int32_t>(experts);

  // Counting sort; tokens keep their order within an expert.
  std::fill_n(next, experts, 0);
  for (int64_t i = 0; i < routed; ++i) {
    NIBBLE_CHECK(args.ids[i] >= 0 && args.ids[i] < experts, "expert ", args.ids[i], " of ",
                 experts);
    ++next[args.ids[i]];
  }
  int32_t first = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t rows = next[e];
    next[e] = first;
    if (rows == 0) continue;
    g.active[g.active_count++] = {&args.experts[static_cast<size_t>(e)], first, rows};
    first += rows;
  }
  for (int64_t t = 0; t < args.tokens; ++t) {
    for (int64_t s = 0; s < args.top_k; ++s) {
      const int32_t pair = next[args.ids[t * args.top_k + s]]++;
      g.token[pair] = static_cast<int32_t>(t);
      g.position[t * g.slots + s] = pair;
      g.weight[t * g.slots + s] = args.weights[t * args.top_k + s];
    }
  }
  if (args.shared != nullptr) {
    g.active[g.active_count++] = {args.shared, routed, args.tokens};
    for (int64_t t = 0; t < args.tokens; ++t) {
      g.token[routed + t] = static_cast<int32_t>(t);
      g.position[t * g.slots + args.top_k] = static_cast<int32_t>(routed + t);
      g.weight[t * g.slots + args.top_k] =
          args.shared_weights != nullptr ? args.shared_weights[t] : 1.0f;
    }
  }
  return g;
}

int64_t expert_groups_bytes(int64_t tokens, int64_t top_k, int64_t experts) {
  const int64_t pairs = tokens * (top_k + 1);
  return Workspace::bytes_for<ActiveExpert>(experts + 1) +
         3 * Workspace::bytes_for<int32_t>(pairs) + Workspace::bytes_for<int32_t>(experts);
}

}  // namespace nibble::kernels
