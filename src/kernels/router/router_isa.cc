// Softmax and sigmoid of router logits, compiled once per ISA. The sum of a softmax is taken over
// sixteen interleaved partial sums, so the bits are equal everywhere.
#include "kernels/router/router_isa.h"

#include "kernels/cpu/vec.h"

namespace nibble::kernels::NIBBLE_ISA_NS {
namespace {

/// Lanes past n become `pad`.
F32x16 load_padded(const float* p, int64_t n, float pad) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : pad;
  return load(lanes);
}

void store_up_to(float* p, F32x16 v, int64_t n) {
  if (n >= kLanes) {
    store(p, v);
  } else {
    store_first(p, v, n);
  }
}

/// NaN becomes -inf: max(a, b) is b where either is NaN.
F32x16 without_nan(F32x16 x) { return max(x, set1(-INFINITY)); }

}  // namespace

void softmax_scores(const float* logits, int64_t n, float* scores) {
  F32x16 top = set1(-INFINITY);
  for (int64_t i = 0; i < n; i += kLanes) {
    top = max(without_nan(load_padded(logits + i, n - i, -INFINITY)), top);
  }
  const F32x16 peak = set1(reduce_max(top));
  F32x16 sum = set1(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 x = load_padded(logits + i, n - i, -INFINITY);
    sum = add(sum, exp(sub(without_nan(x), peak)));
  }
  const F32x16 total = set1(reduce_add(sum));
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 x = load_padded(logits + i, n - i, -INFINITY);
    store_up_to(scores + i, div(exp(sub(x, peak)), total), n - i);
  }
}

void sigmoid_scores(const float* logits, int64_t n, float* scores) {
  const F32x16 one = set1(1.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 x = load_padded(logits + i, n - i, 0.0f);
    store_up_to(scores + i, div(one, add(one, exp(sub(set1(0.0f), x)))), n - i);
  }
}

}  // namespace nibble::kernels::NIBBLE_ISA_NS
