// One row's choice of experts by one warp: scores, groups, top-k, weights. The rules are those of
// kernels/router/router.h; here they are done with comparisons of integers across lanes.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/layout.h"
#include "kernels/router/router.h"

namespace nibble::kernels::cuda {

/// Shared floats that a warp's choice takes (8-byte aligned): keys, scores, biased scores, weights.
NIBBLE_HD constexpr int choice_floats(int experts) {
  return (4 * experts + static_cast<int>(kMaxRouterTopK) + 1) / 2 * 2;
}

struct ChoiceParams {
  RouterScore score;
  int experts, top_k, groups, top_groups;
  bool normalize;
  float scaling;
  const float* correction_bias;
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
/// An integer that orders as the float does; both zeros are equal. Not for NaN.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float sigmoid_score(float logit) {
  return 1.0f / (1.0f + expf(0.0f - logit));
}
/// Softmax of n values in shared memory, in place; a NaN stays NaN and is left out of the sum.
__device__ __forceinline__ void softmax_in_place(float* v, int n, int lane) {
  float peak = -INFINITY;
  for (int i = lane; i < n; i += 32) peak = fmaxf(peak, v[i]);
  peak = warp_max(peak);
  float sum = 0.0f;
  for (int i = lane; i < n; i += 32) sum += expf(fmaxf(v[i], -INFINITY) - peak);
  sum = warp_sum(sum);
  for (int i = lane; i < n; i += 32) v[i] = expf(v[i] - peak) / sum;
  __syncwarp();
}

/// Sum of a group's two largest values, NaN counting as -inf; the largest alone if n is 1.
__device__ __forceinline__ float choice_group_score(const float* biased, int n) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < n; ++i) {
    const float s = biased[i];
    if (s > first) {
      second = first;
      first = s;
    } else if (s > second) {
      second = s;
    }
  }
  return n == 1 ? first : first + second;
}

/// Bit g: group g is among the top_groups best. Lane l looks after groups l and l + 32.
__device__ __forceinline__ uint64_t kept_groups(const float* biased, const ChoiceParams& p,
                                                int lane) {
  const int size = p.experts / p.groups;
  float score[2] = {-INFINITY, -INFINITY};
  for (int h = 0; h < 2; ++h) {
    const int g = lane + 32 * h;
    if (g < p.groups) score[h] = choice_group_score(biased + g * size, size);
  }
  uint64_t kept = 0;
  for (int n = 0; n < p.top_groups; ++n) {
    // The lowest group left stands until a strictly better one: a NaN there is never beaten.
    const int lowest = __ffsll(static_cast<long long>(~kept)) - 1;
    const float standing = __shfl_sync(~0u, lowest < 32 ? score[0] : score[1], lowest % 32);
    int best = lowest;
    if (standing == standing) {
      uint32_t mine = 0;
      int at = 0;
      for (int h = 1; h >= 0; --h) {
        const int g = lane + 32 * h;
        if (g >= p.groups || (kept >> g & 1) != 0 || score[h] != score[h]) continue;
        const uint32_t bits = ordered_bits(score[h]);  // at least 0x007FFFFF: -inf
        if (bits >= mine) {
          mine = bits;
          at = g;
        }
      }
      const uint32_t top = __reduce_max_sync(~0u, mine);
      best =
          static_cast<int>(__reduce_min_sync(~0u, mine == top ? static_cast<uint32_t>(at) : 1024u));
    }
    kept |= uint64_t{1} << best;
  }
  return kept;
}

/// Rank (2 bits: kept group 2, dropped group 1, NaN 0), biased score (32 bits), 1024 - id (11
/// bits): never 0.
__device__ __forceinline__ uint64_t choice_key(float biased, bool kept, int e) {
  const uint64_t id = static_cast<uint64_t>(1024 - e);
  if (biased != biased) return id;
  return uint64_t{kept ? 2u : 1u} << 43 | static_cast<uint64_t>(ordered_bits(biased)) << 11 | id;
}
__device__ __forceinline__ uint64_t best_key(const uint64_t* keys, int experts, int lane) {
  uint64_t best = 0;
  for (int e = lane; e < experts; e += 32) best = max(best, keys[e]);
  return best;
}

/// softmax_in_place of values in registers: lane l holds v[i] of index 32 i + l. Same bits.
template <int n>
__device__ __forceinline__ void softmax_of_lanes(float (&v)[n], int count, int lane) {
  float peak = -INFINITY;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (32 * i + lane < count) peak = fmaxf(peak, v[i]);
  }
  peak = warp_max(peak);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (32 * i + lane < count) sum += expf(fmaxf(v[i], -INFINITY) - peak);
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < n; ++i) v[i] = expf(v[i] - peak) / sum;
}

/// The choice among up to 32 n experts without groups, in registers. Writes ids (ascending) and
/// `chosen`, their scores.
template <int n>
__device__ __forceinline__ void choose_in_registers(const ChoiceParams& p, const float* logits,
                                                    int lane, int32_t* ids, float* chosen) {
  float score[n];
  uint32_t key[n], taken = 0;  // keys: 0 for nothing or taken, 1 for NaN, else ordered
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int e = 32 * i + lane;
    score[i] = 0.0f;
    if (e >= p.experts) continue;
    const float v = logits[e];
    score[i] = p.score == RouterScore::kSigmoid ? sigmoid_score(v) : v;
  }
  if (p.score == RouterScore::kSoftmax) softmax_of_lanes(score, p.experts, lane);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int e = 32 * i + lane;
    key[i] = 0;
    if (e >= p.experts) continue;
    const float biased = p.correction_bias == nullptr ? score[i] : score[i] + p.correction_bias[e];
    key[i] = biased == biased ? ordered_bits(biased) : 1u;
  }
  for (int round = 0; round < p.top_k; ++round) {
    uint32_t mine = key[0];
    int place = 0;
#pragma unroll
    for (int i = 1; i < n; ++i) {
      if (key[i] > mine) {
        mine = key[i];
        place = i;
      }
    }
    const uint32_t top = __reduce_max_sync(~0u, mine);
    bool winner = mine == top;
    if (const uint32_t equal = __ballot_sync(~0u, winner); (equal & (equal - 1)) != 0) {
      const auto e = static_cast<uint32_t>(32 * place + lane);
      winner = e == __reduce_min_sync(~0u, winner ? e : 1024u);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (winner && i == place) key[i] = 0;
    }
    if (winner) taken |= 1u << place;
  }
  int before = 0;  // chosen experts of smaller id
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const bool mine = (taken >> i & 1) != 0;
    const uint32_t all = __ballot_sync(~0u, mine);
    if (mine) {
      const int place = before + __popc(all & ((1u << lane) - 1));
      ids[place] = 32 * i + lane;
      chosen[place] = score[i];
    }
    before += __popc(all);
  }
  __syncwarp();
}

/// The general choice in shared memory, for any number of experts and groups.
template <bool kFar>
__device__ __forceinline__ void choose_in_memory(const ChoiceParams& p, const float* logits,
                                                 float* smem, int lane, int32_t* ids,
                                                 float* chosen) {
  auto* keys = reinterpret_cast<uint64_t*>(smem);
  float* scores = smem + 2 * p.experts;
  float* biased = scores + p.experts;
  for (int e = lane; e < p.experts; e += 32) {
    const float v = kFar ? __ldcg(logits + e) : logits[e];
    scores[e] = p.score == RouterScore::kSigmoid ? sigmoid_score(v) : v;
  }
  __syncwarp();
  if (p.score == RouterScore::kSoftmax) softmax_in_place(scores, p.experts, lane);
  for (int e = lane; e < p.experts; e += 32) {
    biased[e] = p.correction_bias == nullptr ? scores[e] : scores[e] + p.correction_bias[e];
  }
  __syncwarp();
  if (p.top_groups == p.groups) {
    for (int e = lane; e < p.experts; e += 32) keys[e] = choice_key(biased[e], true, e);
  } else {
    const uint64_t kept = kept_groups(biased, p, lane);
    const int size = p.experts / p.groups;
    for (int e = lane; e < p.experts; e += 32) {
      keys[e] = choice_key(biased[e], (kept >> (e / size) & 1) != 0, e);
    }
  }
  int first = -1, second = -1;                      // what rounds `lane` and `lane + 32` chose
  uint64_t best = best_key(keys, p.experts, lane);  // a lane reads only what it wrote
  for (int n = 0; n < p.top_k; ++n) {
    // A key has 45 bits: compared in two parts.
    const auto high = static_cast<uint32_t>(best >> 13), low = static_cast<uint32_t>(best & 0x1FFF);
    const uint32_t top = __reduce_max_sync(~0u, high);
    const uint32_t rest = __reduce_max_sync(~0u, high == top ? low : 0u);
    const int e = 1024 - static_cast<int>(rest & 0x7FF);
    if (high == top && low == rest) {
      keys[e] = 0;
      best = best_key(keys, p.experts, lane);
    }
    if (lane == n % 32) (n < 32 ? first : second) = e;
  }
  // Ascending ids: a chosen expert's place is the number of smaller ones.
  int place[2] = {0, 0};
  for (int n = 0; n < p.top_k; ++n) {
    const int other = __shfl_sync(~0u, n < 32 ? first : second, n % 32);
    place[0] += other < first ? 1 : 0;
    place[1] += other < second ? 1 : 0;
  }
  if (lane < p.top_k) {
    ids[place[0]] = first;
    chosen[place[0]] = scores[first];
  }
  if (lane + 32 < p.top_k) {
    ids[place[1]] = second;
    chosen[place[1]] = scores[second];
  }
  __syncwarp();
}

/// The chosen experts' scores -> weights [top_k] in global memory, by one warp.
__device__ __forceinline__ void choice_weights(const ChoiceParams& p, float* chosen, int lane,
                                               float* weights) {
  float sum = 1.0f;
  if (p.score == RouterScore::kSoftmaxSelected) {
    softmax_in_place(chosen, p.top_k, lane);
  } else if (p.normalize) {
    sum = 0.0f;
#pragma unroll 8
    for (int n = 0; n < p.top_k; ++n) sum += chosen[n];
    sum += 1e-20f;
  }
  for (int n = lane; n < p.top_k; n += 32) weights[n] = chosen[n] / sum * p.scaling;
}

/// logits [experts] -> ids and weights [top_k] in global memory. `smem`: choice_floats floats.
/// kFar: the logits were written by other CTAs to global memory, otherwise they are in shared.
template <bool kFar>
__device__ __forceinline__ void choose_experts(const ChoiceParams& p, const float* logits,
                                               float* smem, int lane, int32_t* ids,
                                               float* weights) {
  float* chosen = smem + 4 * p.experts;
  // With far logits there are many rows, and registers are dearer than the last microsecond.
  if (!kFar && p.top_groups == p.groups && p.experts <= 128) {
    choose_in_registers<4>(p, logits, lane, ids, chosen);
  } else if (!kFar && p.top_groups == p.groups && p.experts <= 256) {
    choose_in_registers<8>(p, logits, lane, ids, chosen);
  } else {
    choose_in_memory<kFar>(p, logits, smem, lane, ids, chosen);
  }
  choice_weights(p, chosen, lane, weights);
}

/// The same for few experts without groups, in as few instructions as possible: they are run once a
/// launch, and fetching them takes longer than running them. `scores` in shared memory: already
/// sigmoids, otherwise logits (softmax changes them). `chosen`: top_k floats.
constexpr int kCompactExperts = 128, kCompactTopK = 32;
__device__ __forceinline__ bool choice_is_compact(const ChoiceParams& p) {
  return p.top_groups == p.groups && p.experts <= kCompactExperts && p.top_k <= kCompactTopK;
}
__device__ __forceinline__ void choose_compactly(const ChoiceParams& p, float* scores,
                                                 float* chosen, int lane, int32_t* ids,
                                                 float* weights) {
  constexpr int kOwn = kCompactExperts / 32;  // keys of a lane: 0 for nothing or taken, 1 for NaN
  if (p.score == RouterScore::kSoftmax) softmax_in_place(scores, p.experts, lane);
  uint32_t key[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int e = 32 * i + lane;
    key[i] = 0;
    if (e >= p.experts) continue;
    const float biased =
        p.correction_bias == nullptr ? scores[e] : scores[e] + p.correction_bias[e];
    key[i] = biased == biased ? ordered_bits(biased) : 1u;
  }
  int own = 0;  // what round `lane` chose
#pragma unroll 1
  for (int round = 0; round < p.top_k; ++round) {
    uint32_t best = key[0];
    int place = lane;
#pragma unroll
    for (int i = 1; i < kOwn; ++i) {
      if (key[i] > best) place = 32 * i + lane;
      best = max(best, key[i]);
    }
    const uint32_t top = __reduce_max_sync(~0u, best);
    const auto e = static_cast<int>(
        __reduce_min_sync(~0u, best == top ? static_cast<uint32_t>(place) : 1024u));
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (e == 32 * i + lane) key[i] = 0;
    }
    if (lane == round) own = e;
  }
  int place = 0;  // ascending ids
#pragma unroll 1
  for (int n = 0; n < p.top_k; ++n) place += __shfl_sync(~0u, own, n) < own ? 1 : 0;
  if (lane < p.top_k) {
    ids[place] = own;
    chosen[place] = scores[own];
  }
  __syncwarp();
  choice_weights(p, chosen, lane, weights);
}

}  // namespace nibble::kernels::cuda
