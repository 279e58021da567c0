// Scales of a tile to FP32 lanes; compiled per ISA. A reader is built for one tile.
#pragma once

#include "kernels/matmul/decode_tile.h"

namespace nibble::kernels::NIBBLE_ISA_NS {

inline float e8m0_value(uint8_t code) {
  if (code == 0xFF) return std::bit_cast<float>(0x7FC00000u);
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

// Scales: at(s) are the 16 lanes' scales for columns 16 s .. 16 s + 15.

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
  F32x16 factor;
  explicit E4m3Per16(const TileArgs& a) : p(a.scales), factor(set1(a.view->global)) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const { return e4m3_lanes(scale_bytes(p + 16 * s), factor); }
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
};
struct E8m0Per32 {
  static constexpr bool kPer32 = true;
  const std::byte* p;
  explicit E8m0Per32(const TileArgs& a) : p(a.scales) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const { return e8m0_lanes(scale_bytes(p + 16 * (s / 2))); }
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
};

#if defined(NIBBLE_VEC_AVX512)

// Scales read from a compressed tile (codec/csf_tile16.h) as they are needed, for the one-row
// kernels: decoding the tile to memory first costs them a tenth of their speed. at() must be called
// with ascending columns, as every kernel does.

/// The bytes of scale column `column`, given base + code: replaced where an exception says so. All
/// in registers: a call here would spill the decoded weights around it.
struct CsfExceptions {
  mutable const uint32_t* next;
  const uint32_t* end;
  mutable uint32_t next_position;
  explicit CsfExceptions(const TileArgs& a)
      : next(a.exceptions), end(a.exceptions_end), next_position(position()) {}
  NIBBLE_INLINE uint32_t position() const { return next != end ? *next & 0xFFFFFF : UINT32_MAX; }
  NIBBLE_INLINE __m128i patch(__m128i bytes, int64_t column) const {
    const auto limit = static_cast<uint32_t>(16 * column + 16);
    while (next_position < limit) [[unlikely]] {
        if (next_position >= limit - 16) {
          const auto row = static_cast<__mmask16>(1u << (next_position & 15));
          bytes = _mm_mask_set1_epi8(bytes, row, static_cast<char>(*next >> 24));
        }
        ++next;
        next_position = position();
      }
    return bytes;
  }
};

/// NVFP4: 16 bases, then for every two columns 16 bytes with one row's two codes each.
struct CsfE4m3Per16 {
  static constexpr bool kPer32 = false;
  const std::byte* codes;
  __m128i base;
  F32x16 factor;
  CsfExceptions exceptions;
  explicit CsfE4m3Per16(const TileArgs& a)
      : codes(a.scales + 16),
        base(scale_bytes(a.scales)),
        factor(set1(a.view->global)),
        exceptions(a) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const {
    __m128i code = scale_bytes(codes + 16 * (s / 2));
    if (s % 2 != 0) code = _mm_srli_epi16(code, 4);
    code = _mm_and_si128(code, _mm_set1_epi8(0x0F));
    return e4m3_lanes(exceptions.patch(_mm_add_epi8(base, code), s), factor);
  }
};
/// E8M0: 16 bases, then for every eight columns 16 bytes with one row's eight code bits each.
struct CsfE8m0Per32 {
  static constexpr bool kPer32 = true;
  const std::byte* codes;
  __m128i base;
  CsfExceptions exceptions;
  mutable F32x16 last{};
  explicit CsfE8m0Per32(const TileArgs& a)
      : codes(a.scales + 16), base(scale_bytes(a.scales)), exceptions(a) {}
  NIBBLE_INLINE F32x16 at(int64_t s) const {
    const int64_t column = s / 2;
    if (s % 2 != 0) return last;  // the second half of a block shares the first's scales
    const __m128i bits = _mm_srl_epi16(scale_bytes(codes + 16 * (column / 8)),
                                       _mm_cvtsi32_si128(static_cast<int>(column % 8)));
    const __m128i code = _mm_and_si128(bits, _mm_set1_epi8(1));
    last = e8m0_lanes(exceptions.patch(_mm_add_epi8(base, code), column));
    return last;
  }
};

#endif

}  // namespace nibble::kernels::NIBBLE_ISA_NS
