// Router: checks, work split and the choice of experts. Scores (the part with exp) come from
// router_isa.cc; the choice compares integers, so it needs no ISA.
#include "kernels/router/router.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/router/router_isa.h"

namespace nibble::kernels {
namespace {

struct ScoreFns {
  ScoreFn softmax, sigmoid;
};

ScoreFns score_fns(device::Isa isa) {
  switch (isa) {
#define NIBBLE_CASE(ns, value) \
  case value: return {ns::softmax_scores, ns::sigmoid_scores};
    NIBBLE_FOR_EACH_ISA(NIBBLE_CASE)
#undef NIBBLE_CASE
    default: break;
  }
  check_failed(__FILE__, __LINE__, "isa is in this build", std::string(device::isa_name(isa)));
}

/// An integer that orders as the float does; both zeros are equal. Not for NaN.
uint32_t ordered_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// What is compared first; the score's ordered bits come second.
enum Rank : uint64_t { kNan = 0, kDroppedGroup = 1, kKeptGroup = 2 };

uint64_t key_of(float biased, Rank rank) {
  if (std::isnan(biased)) return 0;
  return (static_cast<uint64_t>(rank) << 32) | ordered_bits(biased);
}

/// Sum of the two largest of scores[0, n), NaN counting as -inf; the largest alone if n is 1.
float group_score(const float* scores, int64_t n) {
  float first = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    const float s = scores[i];
    if (s > first) {
      second = first;
      first = s;
    } else if (s > second) {
      second = s;
    }
  }
  return n == 1 ? first : first + second;
}

/// kept[g]: group g is among the top_groups best.
void keep_groups(const float* biased, const RouterParams& p,
                 std::array<bool, kMaxRouterGroups>& kept) {
  const int64_t size = p.experts / p.groups;
  std::array<float, kMaxRouterGroups> score;
  for (int64_t g = 0; g < p.groups; ++g) {
    score[static_cast<size_t>(g)] = group_score(biased + g * size, size);
    kept[static_cast<size_t>(g)] = false;
  }
  for (int64_t n = 0; n < p.top_groups; ++n) {
    size_t best = kMaxRouterGroups;
    for (size_t g = 0; g < static_cast<size_t>(p.groups); ++g) {
      if (kept[g]) continue;
      if (best == kMaxRouterGroups || score[g] > score[best]) best = g;
    }
    kept[best] = true;
  }
}

/// ids of the top_k largest keys, ascending; ties to the lower id.
void choose(const float* biased, const RouterParams& p, int32_t* ids) {
  std::array<bool, kMaxRouterGroups> kept;
  keep_groups(biased, p, kept);
  const int64_t size = p.experts / p.groups;
  std::array<uint64_t, kMaxRouterTopK> keys;  // descending, beside ids
  int64_t count = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    const Rank rank = kept[static_cast<size_t>(e / size)] ? kKeptGroup : kDroppedGroup;
    const uint64_t key = key_of(biased[e], rank);
    if (count == p.top_k && key <= keys[static_cast<size_t>(count - 1)]) continue;
    int64_t at = count < p.top_k ? count++ : count - 1;
    for (; at > 0 && keys[static_cast<size_t>(at - 1)] < key; --at) {
      keys[static_cast<size_t>(at)] = keys[static_cast<size_t>(at - 1)];
      ids[at] = ids[at - 1];
    }
    keys[static_cast<size_t>(at)] = key;
    ids[at] = static_cast<int32_t>(e);
  }
  std::sort(ids, ids + p.top_k);
}

void route_row(const ScoreFns& fns, const RouterParams& p, const float* logits, int32_t* ids,
               float* weights) {
  std::array<float, kMaxRouterExperts> scores, biased;
  switch (p.score) {
    case RouterScore::kSoftmax: fns.softmax(logits, p.experts, scores.data()); break;
    case RouterScore::kSigmoid: fns.sigmoid(logits, p.experts, scores.data()); break;
    case RouterScore::kSoftmaxSelected: std::copy_n(logits, p.experts, scores.data()); break;
  }
  for (size_t e = 0; e < static_cast<size_t>(p.experts); ++e) {
    biased[e] = p.correction_bias == nullptr ? scores[e] : scores[e] + p.correction_bias[e];
  }
  choose(biased.data(), p, ids);
  for (int64_t i = 0; i < p.top_k; ++i) weights[i] = scores[static_cast<size_t>(ids[i])];
  if (p.score == RouterScore::kSoftmaxSelected) {
    fns.softmax(weights, p.top_k, weights);
  } else if (p.normalize) {
    float sum = 0.0f;
    for (int64_t i = 0; i < p.top_k; ++i) sum += weights[i];
    for (int64_t i = 0; i < p.top_k; ++i) weights[i] /= sum + 1e-20f;
  }
  for (int64_t i = 0; i < p.top_k; ++i) weights[i] *= p.scaling;
}

}  // namespace

void route(const Exec& exec, const float* logits, int64_t rows, const RouterParams& p, int32_t* ids,
           float* weights) {
  NIBBLE_CHECK(exec.pool != nullptr && rows >= 0, rows, " rows");
  NIBBLE_CHECK(p.experts > 0 && p.experts <= kMaxRouterExperts, p.experts, " experts");
  NIBBLE_CHECK(p.top_k > 0 && p.top_k <= std::min(p.experts, kMaxRouterTopK), "top ", p.top_k,
               " of ", p.experts);
  NIBBLE_CHECK(p.groups > 0 && p.groups <= kMaxRouterGroups && p.experts % p.groups == 0, p.groups,
               " groups of ", p.experts);
  NIBBLE_CHECK(p.top_groups > 0 && p.top_groups <= p.groups, p.top_groups, " of ", p.groups);
  const ScoreFns fns = score_fns(exec.isa);
  constexpr int64_t kTaskRows = 16;
  exec.pool->parallel_for((rows + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * kTaskRows);
    for (int64_t t = task * kTaskRows; t < end; ++t) {
      route_row(fns, p, logits + t * p.experts, ids + t * p.top_k, weights + t * p.top_k);
    }
  });
}

}  // namespace nibble::kernels
