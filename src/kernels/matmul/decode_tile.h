// Codes of a tile to values; compiled per ISA. A decoder of a block of 32 columns has
//   pair<j>(Block(block))         AVX-512: columns 2j and 2j + 1 as (even, odd) BF16 pairs,
//   value(block + 4 lane, c)      elsewhere: column c of one lane as FP32;
// FP32 weights are simply loaded.
// All give the exact values of the format. tile16.h says where the bits are.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "kernels/cpu/vec.h"
#include "kernels/matmul/tile_ops.h"

namespace nibble::kernels::NIBBLE_ISA_NS {

/// E4M3 without a table: exponent and mantissa moved into an FP32 and rescaled, exact.
constexpr float e4m3_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return std::bit_cast<float>(0x7FC00000u);
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return (code & 0x80u) != 0 ? -value : value;
}
/// The sixteen E2M1 values as BF16 bits, twice: the fifth bit of a word index belongs to the next
/// code.
alignas(64) constexpr std::array<uint16_t, 32> kE2m1Bf16 = [] {
  constexpr uint16_t kMagnitudes[8] = {0x0000, 0x3F00, 0x3F80, 0x3FC0,
                                       0x4000, 0x4040, 0x4080, 0x40C0};
  std::array<uint16_t, 32> t{};
  for (size_t i = 0; i < 32; ++i) {
    t[i] = static_cast<uint16_t>(kMagnitudes[i % 8] | ((i & 8) != 0 ? 0x8000 : 0));
  }
  return t;
}();
/// The 128 E4M3 magnitudes as BF16 bits; all are exact.
alignas(64) constexpr std::array<uint16_t, 128> kE4m3Bf16 = [] {
  std::array<uint16_t, 128> t{};
  for (size_t i = 0; i < 128; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(e4m3_value(static_cast<uint8_t>(i)));
    t[i] = static_cast<uint16_t>(bits >> 16);
  }
  return t;
}();

inline float e4m3_look_up(uint32_t code) {
  return bf16_value(static_cast<uint16_t>(kE4m3Bf16[code & 127u] | (code & 128u) << 8));
}
inline uint32_t dword(const std::byte* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

#define NIBBLE_INLINE __attribute__((always_inline))

/// How many F32x16 the register file holds.
#if defined(NIBBLE_VEC_AVX512)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 8;
#endif

/// Calls f(0) .. f(N - 1), the arguments being integral constants: unrolled, since the values live
/// in registers.
template <int N, typename F>
NIBBLE_INLINE inline void repeat(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) NIBBLE_INLINE {
    (f(std::integral_constant<int, I>{}), ...);
  }
  (std::make_integer_sequence<int, N>{});
}

#if defined(NIBBLE_VEC_AVX512)

/// kCount dwords of 16 lanes, in registers.
template <int kCount>
struct Lines {
  __m512i d[kCount];
  NIBBLE_INLINE explicit Lines(const std::byte* block) {
    repeat<kCount>([&](auto i) NIBBLE_INLINE {
      d[i] = _mm512_loadu_si512(block + i * 64);
      // Keeps GCC from loading it again for every shift: load ports are what one row runs out of.
      asm("" : "+v"(d[i]));
    });
  }
};
NIBBLE_INLINE inline F32x16 even_column(__m512i pair) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16))};
}
NIBBLE_INLINE inline F32x16 odd_column(__m512i pair) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}

struct E2m1Codes {
  static constexpr int64_t kBlockBytes = 256;
  __m512i table;
  explicit E2m1Codes(const formats::MatrixView&) : table(_mm512_load_si512(kE2m1Bf16.data())) {}
  using Block = Lines<4>;
  template <int kPair>
  NIBBLE_INLINE __m512i pair(const Block& block) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(block.d[kPair / 4], kPair % 4 * 4), table);
  }
};

struct Nf3Codes {
  static constexpr int64_t kBlockBytes = 192;
  __m512i table;
  explicit Nf3Codes(const formats::MatrixView& view) {
    // Levels are BF16 values; repeated, since the upper two index bits belong to the next code.
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(view.nf3_levels.data()));
    const __m128i words = _mm256_cvtepi32_epi16(_mm256_srli_epi32(bits, 16));
    table = _mm512_broadcast_i32x4(words);
  }
  using Block = Lines<3>;
  template <int kPair>
  NIBBLE_INLINE __m512i pair(const Block& block) const {
    if constexpr (kPair < 15) {
      const __m512i d = block.d[kPair / 5];
      return _mm512_permutexvar_epi16(_mm512_srli_epi16(d, 3 * (kPair % 5)), table);
    } else {
      // Bit 15 of three words: each shifted to its place, then chosen by bit.
      const __m512i bit0 = _mm512_srli_epi16(block.d[0], 15);
      const __m512i bit1 = _mm512_srli_epi16(block.d[1], 14);
      const __m512i bit2 = _mm512_srli_epi16(block.d[2], 13);
      const __m512i low = _mm512_ternarylogic_epi32(_mm512_set1_epi16(1), bit0, bit1, 0xCA);
      const __m512i index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), low, bit2, 0xCA);
      return _mm512_permutexvar_epi16(index, table);
    }
  }
};

#if defined(NIBBLE_VEC_BF16)
template <int kShift>
constexpr std::array<uint8_t, 128> e4m3_bytes() {
  std::array<uint8_t, 128> t{};
  for (size_t i = 0; i < 128; ++i) t[i] = static_cast<uint8_t>(kE4m3Bf16[i] >> kShift);
  return t;
}
alignas(64) constexpr std::array<uint8_t, 128> kE4m3Low = e4m3_bytes<0>();
alignas(64) constexpr std::array<uint8_t, 128> kE4m3High = e4m3_bytes<8>();
#endif

/// E4M3 to BF16, exact: 128 magnitudes in tables, the sign moved.
struct E4m3Codes {
  static constexpr int64_t kBlockBytes = 512;
  using Block = Lines<8>;
#if defined(NIBBLE_VEC_BF16)
  __m512i low[2], high[2];  // bytes of the 128 BF16 values
  explicit E4m3Codes(const formats::MatrixView&) {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_load_si512(kE4m3Low.data() + 64 * i);
      high[i] = _mm512_load_si512(kE4m3High.data() + 64 * i);
    }
  }
  template <int kPair>
  NIBBLE_INLINE __m512i pair(const Block& block) const {
    const __m512i even = _mm512_set1_epi16(0x00FF);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i d = block.d[kPair / 2];  // bytes: columns 0, 2, 1, 3
    const __m512i l = _mm512_permutex2var_epi8(low[0], d, low[1]);
    const __m512i m = _mm512_permutex2var_epi8(high[0], d, high[1]);
    const __m512i h = _mm512_ternarylogic_epi32(m, d, sign, 0xF8);  // m | (d & sign)
    if constexpr (kPair % 2 == 0) {
      return _mm512_ternarylogic_epi32(even, l, _mm512_slli_epi16(h, 8), 0xCA);
    } else {
      return _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(l, 8), h, 0xCA);
    }
  }
#else
  __m512i table[4];  // the 128 BF16 values
  explicit E4m3Codes(const formats::MatrixView&) {
    for (int i = 0; i < 4; ++i) table[i] = _mm512_load_si512(kE4m3Bf16.data() + 32 * i);
  }
  template <int kPair>
  NIBBLE_INLINE __m512i pair(const Block& block) const {
    const __m512i d = block.d[kPair / 2];
    const __m512i codes = kPair % 2 == 0 ? d : _mm512_srli_epi16(d, 8);  // in low bytes
    const __m512i small = _mm512_permutex2var_epi16(table[0], codes, table[1]);
    const __m512i large = _mm512_permutex2var_epi16(table[2], codes, table[3]);
    const __mmask32 is_large = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __m512i magnitude = _mm512_mask_blend_epi16(is_large, small, large);
    const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    return _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(codes, 8), sign, 0xF8);
  }
#endif
};

struct Bf16Codes {
  static constexpr int64_t kBlockBytes = 1024;
  explicit Bf16Codes(const formats::MatrixView&) {}
  struct Block {  // used once each: not held in registers
    const std::byte* p;
    NIBBLE_INLINE explicit Block(const std::byte* block) : p(block) {}
  };
  template <int kPair>
  NIBBLE_INLINE __m512i pair(const Block& block) const {
    return _mm512_loadu_si512(block.p + 64 * kPair);
  }
};

#else  // one column at a time, lane by lane

struct E2m1Codes {
  static constexpr int64_t kBlockBytes = 256;
  explicit E2m1Codes(const formats::MatrixView&) {}
  float value(const std::byte* lane, int col) const {
    const uint32_t d = dword(lane + col / 8 * 64);
    return bf16_value(kE2m1Bf16[(d >> (col % 2 * 16 + col % 8 / 2 * 4)) & 15u]);
  }
};

struct Nf3Codes {
  static constexpr int64_t kBlockBytes = 192;
  const float* table;
  explicit Nf3Codes(const formats::MatrixView& view) : table(view.nf3_levels.data()) {}
  float value(const std::byte* lane, int col) const {
    const int pair = col / 2;
    const int half = col % 2 * 16;
    if (pair < 15) return table[(dword(lane + pair / 5 * 64) >> (half + 3 * (pair % 5))) & 7u];
    uint32_t code = 0;
    for (int i = 0; i < 3; ++i) code |= ((dword(lane + i * 64) >> (half + 15)) & 1u) << i;
    return table[code];
  }
};

struct E4m3Codes {
  static constexpr int64_t kBlockBytes = 512;
  explicit E4m3Codes(const formats::MatrixView&) {}
  float value(const std::byte* lane, int col) const {
    constexpr int kShift[4] = {0, 16, 8, 24};
    return e4m3_look_up((dword(lane + col / 4 * 64) >> kShift[col % 4]) & 255u);
  }
};

struct Bf16Codes {
  static constexpr int64_t kBlockBytes = 1024;
  explicit Bf16Codes(const formats::MatrixView&) {}
  float value(const std::byte* lane, int col) const {
    const uint32_t d = dword(lane + col / 2 * 64);
    return std::bit_cast<float>(col % 2 == 0 ? d << 16 : d & 0xFFFF0000u);
  }
};

#endif

struct F32Codes {
  static constexpr int64_t kBlockBytes = 2048;
  explicit F32Codes(const formats::MatrixView&) {}
  struct Block {
    const std::byte* p;
    NIBBLE_INLINE explicit Block(const std::byte* block) : p(block) {}
  };
};

#if defined(NIBBLE_VEC_AVX512)

/// Column kColumn of a block as FP32 lanes.
template <int kColumn, typename Codes>
NIBBLE_INLINE inline F32x16 column(const Codes& codes, const typename Codes::Block& block) {
  if constexpr (std::is_same_v<Codes, F32Codes>) {
    return load(reinterpret_cast<const float*>(block.p) + 16 * kColumn);
  } else {
    const __m512i pair = codes.template pair<kColumn / 2>(block);
    return kColumn % 2 == 0 ? even_column(pair) : odd_column(pair);
  }
}
/// Columns 16 half .. 16 half + 15.
template <typename Codes>
NIBBLE_INLINE inline void columns(const Codes& codes, const std::byte* p, bool second_half,
                                  F32x16* w) {
  const typename Codes::Block block(p);
  if (second_half) {
    repeat<16>([&](auto c) NIBBLE_INLINE { w[c] = column<16 + c>(codes, block); });
  } else {
    repeat<16>([&](auto c) NIBBLE_INLINE { w[c] = column<c>(codes, block); });
  }
}
/// Sixteen columns in registers.
template <typename F>
NIBBLE_INLINE inline void each_column(F&& f) {
  repeat<16>(f);
}

#else

template <typename Codes>
inline void columns(const Codes& codes, const std::byte* block, bool second_half, F32x16* w) {
  for (int c = 0; c < 16; ++c) {
    const int col = second_half ? 16 + c : c;
    if constexpr (std::is_same_v<Codes, F32Codes>) {
      w[c] = load(reinterpret_cast<const float*>(block) + 16 * col);
    } else {
      float lanes[kLanes];
      for (int i = 0; i < kLanes; ++i) lanes[i] = codes.value(block + i * 4, col);
      w[c] = load(lanes);
    }
  }
}
/// Sixteen columns in the L1 cache.
template <typename F>
NIBBLE_INLINE inline void each_column(F&& f) {
  for (int c = 0; c < 16; ++c) f(c);
}

#endif

}  // namespace nibble::kernels::NIBBLE_ISA_NS
