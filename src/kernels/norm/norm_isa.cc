// RMSNorm of rows, compiled once per ISA: sixteen interleaved partial sums, one order everywhere.
#include "kernels/norm/norm_isa.h"

#include "kernels/cpu/vec.h"

namespace nibble::kernels::NIBBLE_ISA_NS {
namespace {

F32x16 load_sum(float* x, const float* delta, int64_t i) {
  F32x16 v = load(x + i);
  if (delta != nullptr) {
    v = add(v, load(delta + i));
    store(x + i, v);
  }
  return v;
}

F32x16 load_sum_first(float* x, const float* delta, int64_t i, int64_t lanes) {
  F32x16 v = load_first(x + i, lanes);
  if (delta != nullptr) {
    v = add(v, load_first(delta + i, lanes));
    store_first(x + i, v, lanes);
  }
  return v;
}

}  // namespace

void rms_norm_rows(const RmsNormRows& r) {
  const int64_t whole = r.n / kLanes * kLanes;
  for (int64_t t = 0; t < r.rows; ++t) {
    float* x = r.x + t * r.n;
    const float* delta = r.delta == nullptr ? nullptr : r.delta + t * r.n;
    float* out = r.out + t * r.n;
    F32x16 sum = set1(0.0f);
    for (int64_t i = 0; i < whole; i += kLanes) {
      const F32x16 v = load_sum(x, delta, i);
      sum = fma(v, v, sum);
    }
    if (whole < r.n) {
      const F32x16 v = load_sum_first(x, delta, whole, r.n - whole);
      sum = fma(v, v, sum);
    }
    const F32x16 mean = set1(reduce_add(sum) / static_cast<float>(r.n));
    const F32x16 inverse = div(set1(1.0f), sqrt(add(mean, set1(r.eps))));
    for (int64_t i = 0; i < whole; i += kLanes) {
      store(out + i, mul(mul(load(x + i), inverse), load(r.weight + i)));
    }
    if (whole < r.n) {
      const int64_t lanes = r.n - whole;
      const F32x16 v = mul(load_first(x + whole, lanes), inverse);
      store_first(out + whole, mul(v, load_first(r.weight + whole, lanes)), lanes);
    }
  }
}

}  // namespace nibble::kernels::NIBBLE_ISA_NS
