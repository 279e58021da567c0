// Sixteen FP32 lanes, the same meaning on every ISA. This header is compiled once per ISA, in the
// namespace NIBBLE_ISA_NS, with that ISA's compiler flags; every operation is one correctly rounded
// IEEE operation per lane (fma is fused everywhere), so kernels written with it give the same bits
// on scalar, AVX2, AVX-512 and NEON. Only *_isa.cc files include it.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(NIBBLE_VEC_AVX512) || defined(NIBBLE_VEC_AVX2)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the deliberately undefined operands inside its own AVX-512 header (its PR
// 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(NIBBLE_VEC_NEON)
#include <arm_neon.h>
#endif

#ifndef NIBBLE_ISA_NS
#error "vec.h is for files compiled per ISA: see kernels/CMakeLists.txt"
#endif

namespace nibble::kernels::NIBBLE_ISA_NS {

constexpr int kLanes = 16;

#if defined(NIBBLE_VEC_AVX512)

struct F32x16 {
  __m512 v;
};
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
/// a * b + c, rounded once.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/// a > b ? a : b; so b where either is NaN.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
/// a < b ? a : b; so b where either is NaN.
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
/// Nearest integer, ties to even.
inline F32x16 round(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// 2^n for integral n in [-126, 127].
inline F32x16 pow2i(F32x16 n) {
  const __m512i i = _mm512_cvtps_epi32(n.v);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(127)), 23))};
}
/// x < limit ? yes : no, lane by lane (no where x is NaN).
inline F32x16 select_less(F32x16 x, F32x16 limit, F32x16 yes, F32x16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline F32x16 load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}

#elif defined(NIBBLE_VEC_AVX2)

struct F32x16 {
  __m256 lo, hi;
};
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 add(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F32x16 sub(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F32x16 mul(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F32x16 div(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline F32x16 sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline F32x16 round(F32x16 a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
inline __m256 pow2i_half(__m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(i, _mm256_set1_epi32(127)), 23));
}
inline F32x16 pow2i(F32x16 n) { return {pow2i_half(n.lo), pow2i_half(n.hi)}; }
inline F32x16 select_less(F32x16 x, F32x16 limit, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ))};
}
inline __m256 load_bf16_half(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline F32x16 load_bf16(const uint16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }

#elif defined(NIBBLE_VEC_NEON)

struct F32x16 {
  float32x4_t q[4];
};
#define NIBBLE_EACH4(expr)                     \
  F32x16 r;                                    \
  for (int i = 0; i < 4; ++i) r.q[i] = (expr); \
  return r
inline F32x16 load(const float* p) { NIBBLE_EACH4(vld1q_f32(p + 4 * i)); }
inline void store(float* p, F32x16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.q[i]);
}
inline F32x16 set1(float x) { NIBBLE_EACH4(vdupq_n_f32(x)); }
inline F32x16 add(F32x16 a, F32x16 b) { NIBBLE_EACH4(vaddq_f32(a.q[i], b.q[i])); }
inline F32x16 sub(F32x16 a, F32x16 b) { NIBBLE_EACH4(vsubq_f32(a.q[i], b.q[i])); }
inline F32x16 mul(F32x16 a, F32x16 b) { NIBBLE_EACH4(vmulq_f32(a.q[i], b.q[i])); }
inline F32x16 div(F32x16 a, F32x16 b) { NIBBLE_EACH4(vdivq_f32(a.q[i], b.q[i])); }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { NIBBLE_EACH4(vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
inline F32x16 max(F32x16 a, F32x16 b) {
  NIBBLE_EACH4(vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]));
}
inline F32x16 min(F32x16 a, F32x16 b) {
  NIBBLE_EACH4(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]));
}
inline F32x16 sqrt(F32x16 a) { NIBBLE_EACH4(vsqrtq_f32(a.q[i])); }
inline F32x16 round(F32x16 a) { NIBBLE_EACH4(vrndnq_f32(a.q[i])); }
inline F32x16 pow2i(F32x16 n) {
  NIBBLE_EACH4(
      vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.q[i]), vdupq_n_s32(127)), 23)));
}
inline F32x16 select_less(F32x16 x, F32x16 limit, F32x16 yes, F32x16 no) {
  NIBBLE_EACH4(vbslq_f32(vcltq_f32(x.q[i], limit.q[i]), yes.q[i], no.q[i]));
}
inline F32x16 load_bf16(const uint16_t* p) {
  NIBBLE_EACH4(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
#undef NIBBLE_EACH4

#else  // scalar

struct F32x16 {
  float v[kLanes];
};
#define NIBBLE_EACH(expr)                           \
  F32x16 r;                                         \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expr); \
  return r
inline F32x16 load(const float* p) { NIBBLE_EACH(p[i]); }
inline void store(float* p, const F32x16& a) {
  for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
}
inline F32x16 set1(float x) { NIBBLE_EACH(x); }
inline F32x16 add(const F32x16& a, const F32x16& b) { NIBBLE_EACH(a.v[i] + b.v[i]); }
inline F32x16 sub(const F32x16& a, const F32x16& b) { NIBBLE_EACH(a.v[i] - b.v[i]); }
inline F32x16 mul(const F32x16& a, const F32x16& b) { NIBBLE_EACH(a.v[i] * b.v[i]); }
inline F32x16 div(const F32x16& a, const F32x16& b) { NIBBLE_EACH(a.v[i] / b.v[i]); }
inline F32x16 fma(const F32x16& a, const F32x16& b, const F32x16& c) {
  NIBBLE_EACH(std::fma(a.v[i], b.v[i], c.v[i]));
}
inline F32x16 max(const F32x16& a, const F32x16& b) {
  NIBBLE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
inline F32x16 min(const F32x16& a, const F32x16& b) {
  NIBBLE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
inline F32x16 sqrt(const F32x16& a) { NIBBLE_EACH(std::sqrt(a.v[i])); }
inline F32x16 round(const F32x16& a) { NIBBLE_EACH(std::nearbyint(a.v[i])); }
inline F32x16 pow2i(const F32x16& n) {
  NIBBLE_EACH(std::bit_cast<float>((static_cast<int32_t>(n.v[i]) + 127) << 23));
}
inline F32x16 select_less(const F32x16& x, const F32x16& limit, const F32x16& yes,
                          const F32x16& no) {
  NIBBLE_EACH(x.v[i] < limit.v[i] ? yes.v[i] : no.v[i]);
}
inline F32x16 load_bf16(const uint16_t* p) {
  NIBBLE_EACH(std::bit_cast<float>(static_cast<uint32_t>(p[i]) << 16));
}
#undef NIBBLE_EACH

#endif

/// FP32 to BF16, nearest even; NaN becomes 0x7FC0.
inline uint16_t bf16_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
inline float bf16_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
#if defined(NIBBLE_VEC_AVX512)
inline void store_bf16(uint16_t* p, F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  r = _mm512_srli_epi32(r, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_blend_epi32(nan, r, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
#else
inline void store_bf16(uint16_t* p, F32x16 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = bf16_bits(lanes[i]);
}
#endif

/// The first n lanes (0 <= n < 16) of memory; the others are zero in a load, untouched by a store.
inline F32x16 load_first(const float* p, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline F32x16 load_bf16_first(const uint16_t* p, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = bf16_value(p[i]);
  return load(lanes);
}
inline void store_first(float* p, F32x16 a, int64_t n) {
  float lanes[kLanes];
  store(lanes, a);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

/// Sum of the lanes, halves first: ((l0+l8)+(l4+l12)) + ... One order on every ISA.
inline float reduce_add(F32x16 a) {
  float l[kLanes];
  store(l, a);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) l[i] += l[i + width];
  }
  return l[0];
}
/// Largest lane; lanes must not be NaN.
inline float reduce_max(F32x16 a) {
  float l[kLanes];
  store(l, a);
  float m = l[0];
  for (int i = 1; i < kLanes; ++i) m = l[i] > m ? l[i] : m;
  return m;
}

/// e^x within 2 ulp: 2^n * p(r), n = round(x / ln 2), p of degree 6 (Taylor, |r| <= 0.347). Below
/// -87.3 the result is 0, above 88.7 it is +inf; NaN stays NaN. Same bits on every ISA.
inline F32x16 exp(F32x16 x) {
  const F32x16 low = set1(-87.3f);
  const F32x16 high = set1(88.7f);
  F32x16 c = select_less(x, low, low, x);
  c = select_less(high, c, high, c);
  const F32x16 n = round(mul(c, set1(1.44269504088896341f)));
  F32x16 r = fma(n, set1(-0.693359375f), c);  // ln 2 in two parts (Cody-Waite)
  r = fma(n, set1(2.12194440e-4f), r);
  F32x16 p = set1(1.0f / 720.0f);
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  // n may be 128 at the upper end: two factors keep each a normal number.
  const F32x16 half = round(mul(n, set1(0.5f)));
  F32x16 y = mul(mul(p, pow2i(half)), pow2i(sub(n, half)));
  y = select_less(x, low, set1(0.0f), y);
  y = select_less(high, x, set1(INFINITY), y);
  return y;
}

}  // namespace nibble::kernels::NIBBLE_ISA_NS
