// Scales of a tile to FP32 lanes; compiled per ISA. A reader is built for one tile.
#pragma once

#include "kernels/matmul/decode_tile.h"

namespace nibble::kernels::NIBBLE_ISA_NS {

inline float e8m0_value(uint8_t code) {
  if (code == 0xFF) return std::bit_cast<float>(0x7FC00000u);
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

// Scales: at(s) are the 16 lanes' scales for columns 16 s .. 16 s + 15; block(b, out) those of the
// block of 32 columns, one for each of its sums (kPer32: one sum, else two).

#if defined(NIBBLE_VEC_AVX512)
NIBBLE_INLINE inline __m128i scale_bytes(const std::byte* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
NIBBLE_INLINE inline F32x16 e4m3_lanes(__m128i b, F32x16 factor) {
  const __m128i magnitude = _mm_set1_epi8(0x7F);
  const __mmask16 number = _mm_cmpneq_epi8_mask(_mm_and_si128(b, magnitude), magnitude);
  // As half floats the same bits mean value / 256, subnormals too (an FP32 detour would meet FP32
  // subnormals, which cost tens of cycles). Sign-extended, so one mask keeps sign and magnitude.
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(b), 7),
                                        _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
  const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
  const __m512 value =
      _mm512_mask_mul_ps(quiet, number, _mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  return {_mm512_mul_ps(value, factor.v)};
}
/// What turns E4M3 bytes of two columns into F32(e4m3 * g). As half floats the bits mean value /
/// 256, so one factor of 256 g does both: multiplying by 256 rounds nothing, so the product is the
/// same. Only where 256 g overflows it takes two steps.
struct E4m3Pair {
  F32x16 factor, factor256;
  bool fused;
  explicit E4m3Pair(float g)
      : factor(set1(g)), factor256(set1(g * 256.0f)), fused(std::isfinite(g * 256.0f)) {}

  /// The lower and the upper 16 bytes.
  NIBBLE_INLINE void convert(__m256i b, F32x16* out) const {
    if (!fused) [[unlikely]] {
      out[0] = e4m3_lanes(_mm256_castsi256_si128(b), factor);
      out[1] = e4m3_lanes(_mm256_extracti128_si256(b, 1), factor);
      return;
    }
    const __m256i magnitude = _mm256_set1_epi8(0x7F);
    const __mmask32 number = _mm256_cmpneq_epi8_mask(_mm256_and_si256(b, magnitude), magnitude);
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(b), 7),
                                          _mm512_set1_epi16(static_cast<int16_t>(0xBF80)));
    const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    out[0].v = _mm512_mask_mul_ps(quiet, static_cast<__mmask16>(number), low, factor256.v);
    out[1].v = _mm512_mask_mul_ps(quiet, static_cast<__mmask16>(number >> 16), high, factor256.v);
  }
  /// The same for bytes below 0x7F: neither sign nor NaN to look for. Needs `fused`.
  NIBBLE_INLINE void convert_small(__m256i b, F32x16* out) const {
    const __m512i half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(b), 7);
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    out[0].v = _mm512_mul_ps(low, factor256.v);
    out[1].v = _mm512_mul_ps(high, factor256.v);
  }
};
NIBBLE_INLINE inline F32x16 e8m0_lanes(__m128i b) {
  const __mmask16 nan = _mm_cmpeq_epi8_mask(b, _mm_set1_epi8(static_cast<char>(0xFF)));
  const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(b), 23),
                                        _mm512_set1_epi32(0x00400000));
  return {_mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, bits, _mm512_set1_epi32(0x7FC00000)))};
}
#else
inline const std::byte* scale_bytes(const std::byte* p) { return p; }
inline F32x16 e4m3_lanes(const std::byte* p, F32x16 factor) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = e4m3_look_up(static_cast<uint32_t>(p[i]));
  return mul(load(lanes), factor);
}
inline F32x16 e8m0_lanes(const std::byte* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = e8m0_value(static_cast<uint8_t>(p[i]));
  return load(lanes);
}
#endif

/// NVFP4: F32(e4m3 * g) per 16 columns.
struct E4m3Per16 {
  static constexpr bool kPer32 = false;
  const std::byte* p;
#if defined(NIBBLE_VEC_AVX512)
  E4m3Pair pair;
  explicit E4m3Per16(const TileArgs& a) : p(a.scales), pair(a.view->global) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const {
    return e4m3_lanes(scale_bytes(p + 16 * s), pair.factor);
  }
  NIBBLE_INLINE void block(int64_t b, F32x16* out) const {
    pair.convert(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * b)), out);
  }
#else
  F32x16 factor;
  explicit E4m3Per16(const TileArgs& a) : p(a.scales), factor(set1(a.view->global)) {}
  F32x16 at(int64_t s) const { return e4m3_lanes(scale_bytes(p + 16 * s), factor); }
#endif
};
/// NF3: e4m3 / 2^bias per 32 columns.
struct E4m3Per32 {
  static constexpr bool kPer32 = true;
  const std::byte* p;
  F32x16 factor;
  explicit E4m3Per32(const TileArgs& a)
      : p(a.scales), factor(set1(std::ldexp(1.0f, -a.view->nf3_bias_log2))) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const {
    return e4m3_lanes(scale_bytes(p + 16 * (s / 2)), factor);
  }
  NIBBLE_INLINE void block(int64_t b, F32x16* out) const { out[0] = at(2 * b); }
};
struct E8m0Per32 {
  static constexpr bool kPer32 = true;
  const std::byte* p;
  explicit E8m0Per32(const TileArgs& a) : p(a.scales) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const { return e8m0_lanes(scale_bytes(p + 16 * (s / 2))); }
  NIBBLE_INLINE void block(int64_t b, F32x16* out) const { out[0] = at(2 * b); }
};
/// Block FP8 with several block columns, each a multiple of 16 columns.
struct PerBlockColumn {
  static constexpr bool kPer32 = false;
  const float* p;
  int64_t origin, width;  // in units of 16 columns
  explicit PerBlockColumn(const TileArgs& a)
      : p(reinterpret_cast<const float*>(a.scales)),
        origin(a.view->origin_col / 16),
        width(a.view->block_cols / 16) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const { return load(p + 16 * ((origin + s) / width)); }
  NIBBLE_INLINE void block(int64_t b, F32x16* out) const {
    out[0] = at(2 * b);
    out[1] = at(2 * b + 1);
  }
};
/// Channel and tensor FP8, block FP8 with one block column, and 1 for formats without scales.
struct PerRow {
  static constexpr bool kPer32 = true;
  F32x16 scale;
  explicit PerRow(const TileArgs& a) : scale(set1(1.0f)) {
    if (a.view->format == formats::FormatId::kFp8Tensor) {
      scale = set1(*reinterpret_cast<const float*>(a.scales));
    } else if (a.view->format == formats::FormatId::kFp8Channel ||
               a.view->format == formats::FormatId::kFp8Block) {
      scale = load(reinterpret_cast<const float*>(a.scales));
    }
  }
  NIBBLE_INLINE F32x16 at(int64_t) const { return scale; }
  NIBBLE_INLINE void block(int64_t, F32x16* out) const { out[0] = scale; }
};

#if defined(NIBBLE_VEC_AVX512)

// Scales read from a compressed tile (codec/csf_tile16.h) as they are needed, for the one-row
// kernels: decoding the tile to memory first costs them a tenth of their speed. Columns must be
// asked for in ascending order, as every kernel does.

/// Where the next exception is. All in registers: a call here would spill the decoded weights
/// around it.
struct CsfExceptions {
  mutable const uint32_t* next;
  const uint32_t* end;
  mutable uint32_t next_position;  // 16 * column + row
  explicit CsfExceptions(const TileArgs& a)
      : next(a.exceptions), end(a.exceptions_end), next_position(position()) {}
  NIBBLE_INLINE uint32_t position() const { return next != end ? *next & 0xFFFFFF : UINT32_MAX; }
  NIBBLE_INLINE bool before(int64_t column) const {
    return next_position < static_cast<uint32_t>(16 * column);
  }
  /// Calls replace(column - first, lane, byte) for the exceptions before column `last`.
  template <typename Replace>
  NIBBLE_INLINE void each(int64_t first, int64_t last, Replace replace) const {
    while (before(last)) {
      const auto place = static_cast<int64_t>(next_position) - 16 * first;
      if (place >= 0) replace(place / 16, place % 16, static_cast<uint8_t>(*next >> 24));
      ++next;
      next_position = position();
    }
  }
};

/// NVFP4: 16 bases, then for every two columns 16 bytes with one row's two codes each.
struct CsfE4m3Per16 {
  static constexpr bool kPer32 = false;
  const std::byte* codes;
  __m256i base;  // twice
  E4m3Pair pair;
  bool small;  // base + code < 0x7F everywhere
  CsfExceptions exceptions;
  explicit CsfE4m3Per16(const TileArgs& a)
      : codes(a.scales + 16),
        base(_mm256_broadcastsi128_si256(scale_bytes(a.scales))),
        pair(a.view->global),
        small(pair.fused &&
              _mm_cmpgt_epu8_mask(scale_bytes(a.scales), _mm_set1_epi8(0x7E - 15)) == 0),
        exceptions(a) {}
  NIBBLE_INLINE void block(int64_t b, F32x16* out) const {
    const __m256i twice = _mm256_broadcastsi128_si256(scale_bytes(codes + 16 * b));
    const __m256i counts = _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi16(4), 1);
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi16(twice, counts), _mm256_set1_epi8(0x0F));
    __m256i bytes = _mm256_add_epi8(base, code);
    const bool patched = exceptions.before(2 * b + 2);
    if (patched) [[unlikely]] {
      exceptions.each(2 * b, 2 * b + 2, [&](int64_t column, int64_t lane, uint8_t byte) {
        bytes = _mm256_mask_set1_epi8(bytes, __mmask32{1} << (16 * column + lane),
                                      static_cast<char>(byte));
      });
    }
    if (small && !patched) [[likely]] {
      pair.convert_small(bytes, out);
    } else {
      pair.convert(bytes, out);
    }
  }
  /// For the half block at the end of a row of FP32 products.
  NIBBLE_INLINE F32x16 at(int64_t s) const {
    F32x16 two[2];
    block(s / 2, two);
    return two[s % 2];
  }
};
/// E8M0: 16 bases, then for every eight columns 16 bytes with one row's eight code bits each. A
/// lane has two values, base and base + 1, so a code bit chooses between two registers.
struct CsfE8m0Per32 {
  static constexpr bool kPer32 = true;
  const std::byte* codes;
  F32x16 zero, one;
  CsfExceptions exceptions;
  explicit CsfE8m0Per32(const TileArgs& a)
      : codes(a.scales + 16),
        zero(e8m0_lanes(scale_bytes(a.scales))),
        one(e8m0_lanes(_mm_add_epi8(scale_bytes(a.scales), _mm_set1_epi8(1)))),
        exceptions(a) {}
  NIBBLE_INLINE void block(int64_t b, F32x16* out) const {
    const __m128i bit = _mm_set1_epi8(static_cast<char>(1 << (b % 8)));
    const __mmask16 up = _mm_test_epi8_mask(scale_bytes(codes + 16 * (b / 8)), bit);
    out[0].v = _mm512_mask_blend_ps(up, zero.v, one.v);
    if (exceptions.before(b + 1)) [[unlikely]] {
      exceptions.each(b, b + 1, [&](int64_t, int64_t lane, uint8_t byte) {
        out[0].v = _mm512_mask_blend_ps(static_cast<__mmask16>(1u << lane), out[0].v,
                                        set1(e8m0_value(byte)).v);
      });
    }
  }
  NIBBLE_INLINE F32x16 at(int64_t s) const {
    F32x16 scale;
    block(s / 2, &scale);
    return scale;
  }
};

#endif

}  // namespace nibble::kernels::NIBBLE_ISA_NS
