// From packed tiles (layout.h) to BF16 fragments in registers: what a lane reads of a tile, and
// the four registers of step j that are the A operand of m64nNk16 and m16n8k16 alike.
//
// Every value is exact: E2M1 * E4M3 has six significant bits, E2M1 * 2^n two, E4M3 * 2^n four, and
// BF16 holds eight. E2M1 bits put into a BF16's exponent and mantissa fields mean v * 2^-126 (the
// subnormal 0.5 included), so one multiplication applies scale and unit together.
#pragma once

#include <cstdint>

#include "kernels/cuda/layout.h"
#include "kernels/cuda/shift_factors.h"

namespace nibble::kernels::cuda {

/// a * b on two BF16, exactly rounded, subnormals kept. An FMA with -0: sm_80 has no plain product.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}
/// The same, a times half 0 (low) or 1 of `pair`: as the compiler knows, the instruction can take
/// either half for both.
template <int half>
__device__ __forceinline__ uint32_t mul_bf16x2_half(uint32_t a, uint32_t pair) {
  uint32_t d;
  asm("{.reg .b16 half<2>; .reg .b32 both;\n\t"
      "mov.b32 {half0, half1}, %2; mov.b32 both, {half%4, half%4};\n\t"
      "fma.rn.bf16x2 %0, %1, both, %3;}"
      : "=r"(d)
      : "r"(a), "r"(pair), "r"(0x80008000u), "n"(half));
  return d;
}
/// (a & mask_a) | (b & mask_b) in two instructions.
__device__ __forceinline__ uint32_t pick(uint32_t a, uint32_t mask_a, uint32_t b, uint32_t mask_b) {
  return (a & mask_a) | (b & mask_b);
}

/// Where the eight E2M1 codes of a word sit: pair i (register i of the step) has its low column in
/// the low half. In each half, sign and magnitude bits of the pairs are placed so that most of them
/// reach BF16's bits 15 and 8..6 with one shared shift: 11 operations for eight codes, against 15
/// for four plain nibbles.
///   pair 0: sign 15, magnitude 8..6     pair 1: sign 14, magnitude 5..3
///   pair 2: sign 9,  magnitude 2..0     pair 3: sign 10, magnitude 13..11
NIBBLE_HD constexpr uint32_t spread_codes(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  return (c0 >> 3) << 15 | (c0 & 7) << 6 | (c1 >> 3) << 14 | (c1 & 7) << 3 | (c2 >> 3) << 9 |
         (c2 & 7) | (c3 >> 3) << 10 | (c3 & 7) << 11;
}
/// Inverse of spread_codes: code of pair `i`.
NIBBLE_HD constexpr uint32_t gather_code(uint32_t half, int i) {
  return i == 0   ? (half >> 15 & 1) << 3 | (half >> 6 & 7)
         : i == 1 ? (half >> 14 & 1) << 3 | (half >> 3 & 7)
         : i == 2 ? (half >> 9 & 1) << 3 | (half & 7)
                  : (half >> 10 & 1) << 3 | (half >> 11 & 7);
}
/// The magnitudes of the low or of the high row's codes in such a word (RowPairScales: registers 0
/// and 2 are the low row's).
NIBBLE_HD constexpr uint32_t row_magnitudes(int high) {
  return (high == 0 ? spread_codes(7, 0, 7, 0) : spread_codes(0, 7, 0, 7)) * 0x10001u;
}
/// Shifts to the left as the compiler likes: by multiplication, or on the integer pipe, which is
/// what limits the expansion. Or by multiplication with factors that it does not know, for a kernel
/// where it likes the wrong one (moe_stream.h).
struct AnyShift {
  template <int bits>
  __device__ __forceinline__ uint32_t left(uint32_t w) const {
    return w << bits;
  }
};
struct MultiplyShift {
  const ShiftFactors& factors;
  template <int bits>
  __device__ __forceinline__ uint32_t left(uint32_t w) const {
    return w * factors.power[bits];
  }
};

template <typename Shift>
__device__ __forceinline__ void expand_e2m1(uint32_t w, uint32_t (&a)[4], Shift shift) {
  constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x01C001C0u;
  a[0] = w & (kSign | kMagnitude);
  a[1] = pick(shift.template left<1>(w), kSign, shift.template left<3>(w), kMagnitude);
  a[2] = shift.template left<6>(w) & (kSign | kMagnitude);
  a[3] = pick(shift.template left<5>(w), kSign, w >> 5, kMagnitude);
}

/// Scale bytes of the low and the high row, as two BF16 in one register.
/// E4M3 (sign cleared: packing moved it into the codes): byte << 4 means s * 2^-120; the result is
/// s * 2^119. Two products, because 2^239 is no BF16. `halves`: a byte << 4 in each.
__device__ __forceinline__ uint32_t expand_e4m3_halves(uint32_t halves) {
  return mul_bf16x2(mul_bf16x2(halves & 0x07F007F0u, 0x7B807B80u), 0x7B007B00u);
}
__device__ __forceinline__ uint32_t expand_e4m3_scales(uint32_t two_bytes) {
  return expand_e4m3_halves(__byte_perm(two_bytes, 0, 0x4140) << 4);
}
/// E8M0 byte b as 2^(b - 127 + unit): an addition to the exponent field. Needs b + unit <= 254.
template <int unit>
__device__ __forceinline__ uint32_t expand_e8m0_scales(uint32_t two_bytes) {
  return (__byte_perm(two_bytes, 0, 0x4140) << 7) + static_cast<uint32_t>(unit) * 0x00800080u;
}
constexpr int kE8m0UnitMxfp4 = 126, kE8m0UnitMxfp8 = 120;

/// E4M3 codes in the bytes of two registers' words as BF16 * 2^-120: upper bytes of the halves, and
/// lower bytes.
__device__ __forceinline__ uint32_t e4m3_upper(uint32_t w) {
  return pick(w, 0x80008000u, w >> 4, 0x07F007F0u);
}
template <typename Shift = AnyShift>
__device__ __forceinline__ uint32_t e4m3_lower(uint32_t w, Shift shift = {}) {
  return pick(shift.template left<8>(w), 0x80008000u, shift.template left<4>(w), 0x07F007F0u);
}
constexpr uint32_t kTwoTo120 = 0x7B807B80u;

/// NF3's eight levels as byte tables for prmt: lower and upper bytes of their BF16 bits.
struct LevelTable {
  uint32_t lower[2], upper[2];
};
__device__ __forceinline__ LevelTable level_table(const uint16_t (&levels)[8]) {
  LevelTable t;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    t.lower[i] = t.upper[i] = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      t.lower[i] |= static_cast<uint32_t>(levels[4 * i + b] & 0xFF) << 8 * b;
      t.upper[i] |= static_cast<uint32_t>(levels[4 * i + b] >> 8) << 8 * b;
    }
  }
  return t;
}
/// Codes of nibbles 0..3 of `w` (bit 3 of each clear) as two registers of BF16.
__device__ __forceinline__ void expand_levels(const LevelTable& t, uint32_t w, uint32_t& first,
                                              uint32_t& second) {
  const uint32_t lower = __byte_perm(t.lower[0], t.lower[1], w);
  const uint32_t upper = __byte_perm(t.upper[0], t.upper[1], w);
  first = __byte_perm(lower, upper, 0x5140);
  second = __byte_perm(lower, upper, 0x7362);
}

/// A lane's scale bytes of its low and its high row, as a tile has them.
template <FormatId format>
__device__ __forceinline__ uint32_t two_scales(const uint8_t* scale_bytes, int warp, int lane) {
  const auto* scales = reinterpret_cast<const uint16_t*>(scale_bytes);
  return scales[format == FormatId::kNvfp4 ? warp * 32 + lane : warp * 16 + lane / 2];
}

/// Registers 0 and 2 of a step are of the low row, 1 and 3 of the high row. `pair`: the rows'
/// scales.
__device__ __forceinline__ void scale_rows(uint32_t (&a)[4], uint32_t pair) {
  a[0] = mul_bf16x2_half<0>(a[0], pair);
  a[1] = mul_bf16x2_half<1>(a[1], pair);
  a[2] = mul_bf16x2_half<0>(a[2], pair);
  a[3] = mul_bf16x2_half<1>(a[3], pair);
}

/// What a lane holds of one tile: its words and its two scales. Step j's registers come from
/// expand<j>() and then scale(), which alone needs the scales. load() takes the tile's codes and
/// its plain scales, or the whole tile if its scales are plain.
template <FormatId format>
struct TileParts;

/// The two scales of formats that multiply every weight with one.
struct RowPairScales {
  uint32_t scales;  // BF16 of the low and the high row

  __device__ __forceinline__ void set_scales(uint32_t pair) { scales = pair; }
  __device__ __forceinline__ void scale(uint32_t (&a)[4]) const { scale_rows(a, scales); }
};

/// E2M1 codes.
struct E2m1Words {
  uint4 words;

  __device__ __forceinline__ void load_codes(const uint8_t* codes, int warp, int lane) {
    words = reinterpret_cast<const uint4*>(codes)[warp * 32 + lane];
  }
  template <int j, typename Shift>
  __device__ __forceinline__ void expand(uint32_t (&a)[4], Shift shift) const {
    expand_e2m1(j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w, a, shift);
  }
};
template <FormatId format>
struct E2m1Fragment : E2m1Words, RowPairScales {
  static __device__ __forceinline__ uint32_t expand_scales(uint32_t two_bytes) {
    return format == FormatId::kNvfp4 ? expand_e4m3_scales(two_bytes)
                                      : expand_e8m0_scales<kE8m0UnitMxfp4>(two_bytes);
  }
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scale_bytes, int warp,
                                       int lane) {
    load_codes(codes, warp, lane);
    set_scales(expand_scales(two_scales<format>(scale_bytes, warp, lane)));
  }
  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    load(tile, tile + tile_code_bytes(format), warp, lane);
  }
};
template <>
struct TileParts<FormatId::kNvfp4> : E2m1Fragment<FormatId::kNvfp4> {};
template <>
struct TileParts<FormatId::kMxfp4> : E2m1Fragment<FormatId::kMxfp4> {};

/// E4M3 codes: a word holds registers 2i (upper bytes of its halves) and 2i + 1 (lower bytes).
struct E4m3Words {
  uint4 words[2];

  __device__ __forceinline__ void load_codes(const uint8_t* codes, int warp, int lane) {
    words[0] = reinterpret_cast<const uint4*>(codes)[warp * 64 + lane];
    words[1] = reinterpret_cast<const uint4*>(codes)[warp * 64 + 32 + lane];
  }
  template <int j, typename Shift>
  __device__ __forceinline__ void expand(uint32_t (&a)[4], Shift shift) const {
    const uint4 w = words[j / 2];
    const uint32_t w0 = j % 2 == 0 ? w.x : w.z, w1 = j % 2 == 0 ? w.y : w.w;
    a[0] = e4m3_upper(w0);
    a[1] = e4m3_lower(w0, shift);
    a[2] = e4m3_upper(w1);
    a[3] = e4m3_lower(w1, shift);
  }
};
template <>
struct TileParts<FormatId::kMxfp8> : E4m3Words, RowPairScales {
  static __device__ __forceinline__ uint32_t expand_scales(uint32_t two_bytes) {
    return expand_e8m0_scales<kE8m0UnitMxfp8>(two_bytes);
  }
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scale_bytes, int warp,
                                       int lane) {
    load_codes(codes, warp, lane);
    set_scales(expand_scales(two_scales<FormatId::kMxfp8>(scale_bytes, warp, lane)));
  }
  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    load(tile, tile + tile_code_bytes(FormatId::kMxfp8), warp, lane);
  }
};

/// Block FP8: codes exact in the registers; the FP32 scales multiply the sum over the chunk.
template <>
struct TileParts<FormatId::kFp8Block> : E4m3Words {
  float2 scales;  // of low and high rows

  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* two_scales, int warp,
                                       int lane) {
    load_codes(codes, warp, lane);
    scales = *reinterpret_cast<const float2*>(two_scales);
  }
  __device__ __forceinline__ void scale(uint32_t (&a)[4]) const { scale_rows(a, kTwoTo120); }
};

/// NF3: word j holds the eight codes of step j < 3 in the lower three bits of its nibbles (register
/// order); step 3 has bit 3 of all nibbles, word i holding bit i of each code. Level times scale is
/// rounded to BF16 once.
struct Nf3Words {
  uint32_t words[3];

  /// `third`: the plane of the third words; in a tile, 1024 bytes behind the first.
  __device__ __forceinline__ void load_codes(const uint8_t* first_two, const uint8_t* third,
                                             int warp, int lane) {
    const uint2 two = reinterpret_cast<const uint2*>(first_two)[warp * 32 + lane];
    words[0] = two.x;
    words[1] = two.y;
    words[2] = reinterpret_cast<const uint32_t*>(third)[warp * 32 + lane];
  }
};
template <>
struct TileParts<FormatId::kNf3> : Nf3Words, RowPairScales {
  LevelTable table;  // set by the caller

  static __device__ __forceinline__ uint32_t expand_scales(uint32_t two_bytes) {
    return mul_bf16x2(e4m3_lower(__byte_perm(two_bytes, 0, 0x4140)), kTwoTo120);
  }
  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scale_bytes, int warp,
                                       int lane) {
    load_codes(codes, codes + 1024, warp, lane);
    set_scales(expand_scales(two_scales<FormatId::kNf3>(scale_bytes, warp, lane)));
  }
  template <int j, typename Shift>
  __device__ __forceinline__ void expand(uint32_t (&a)[4], Shift) const {
    uint32_t w;
    if constexpr (j < 3) {
      w = words[j] & 0x77777777u;
    } else {
      w = (words[0] >> 3 & 0x11111111u) | (words[1] >> 2 & 0x22222222u) |
          (words[2] >> 1 & 0x44444444u);
    }
    expand_levels(table, w, a[0], a[1]);
    expand_levels(table, w >> 16, a[2], a[3]);
  }
};

template <>
struct TileParts<FormatId::kBf16> {
  uint4 words[4];

  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t*, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = reinterpret_cast<const uint4*>(codes)[(warp * 4 + j) * 32 + lane];
    }
  }
  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    load(tile, tile + tile_code_bytes(FormatId::kBf16), warp, lane);
  }
  template <int j, typename Shift>
  __device__ __forceinline__ void expand(uint32_t (&a)[4], Shift) const {
    a[0] = words[j].x;
    a[1] = words[j].y;
    a[2] = words[j].z;
    a[3] = words[j].w;
  }
  __device__ __forceinline__ void scale(uint32_t (&)[4]) const {}
};

template <FormatId format>
struct TileFragment : TileParts<format> {
  template <int j>
  __device__ __forceinline__ void step(uint32_t (&a)[4]) const {
    this->template expand<j>(a, AnyShift{});
    this->scale(a);
  }
};

}  // namespace nibble::kernels::cuda
