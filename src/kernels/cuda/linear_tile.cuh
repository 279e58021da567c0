// Pieces shared by the dense kernels for few and for many rows: what a warp holds of one tile, and
// how a finished sum becomes y. Both kernels must round alike, so the arithmetic is here, once.
#pragma once

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/linear_kernels.h"
#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {

/// TileFragment, and the same for E4M3 codes whose scale is applied to the sum.
template <FormatId format>
struct LinearFragment : TileFragment<format> {};
struct PlainFp8Fragment : TileFragment<FormatId::kMxfp8> {
  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    load_codes(tile, warp, lane);
    set_scales(kTwoTo120);  // the codes in BF16's fields mean v * 2^-120
  }
};
template <>
struct LinearFragment<FormatId::kFp8Block> : PlainFp8Fragment {};
template <>
struct LinearFragment<FormatId::kFp8Channel> : PlainFp8Fragment {};

/// Weights: read once in a long while.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint16_t load_streaming(const uint16_t* p) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

/// A warp's 16 rows of one tile as they lie in memory: loaded long before they are used, so nothing
/// is computed at load time.
template <FormatId format>
struct RawTile {
  static constexpr int kWords = format == FormatId::kBf16                                  ? 4
                                : format == FormatId::kNvfp4 || format == FormatId::kMxfp4 ? 1
                                                                                           : 2;
  static constexpr bool kScaled = tile_scale_bytes(format) != 0;
  uint4 words[kWords];
  uint16_t scale;

  __device__ __forceinline__ void load(const uint8_t* tile, int warp, int lane) {
    const uint4* codes = reinterpret_cast<const uint4*>(tile) + warp * 32 * kWords + lane;
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = load_streaming(codes + 32 * i);
    if constexpr (kScaled) {
      const auto* scales = reinterpret_cast<const uint16_t*>(tile + tile_code_bytes(format));
      scale = load_streaming(
          scales + (format == FormatId::kNvfp4 ? warp * 32 + lane : warp * 16 + lane / 2));
    }
  }
  __device__ __forceinline__ LinearFragment<format> expand() const {
    LinearFragment<format> f;
    if constexpr (kWords == 1) {
      f.words = words[0];
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) f.words[i] = words[i];
    }
    if constexpr (kScaled) {
      const uint32_t both = format == FormatId::kNvfp4   ? expand_e4m3_scales(scale)
                            : format == FormatId::kMxfp4 ? expand_e8m0_scales<126>(scale)
                                                         : expand_e8m0_scales<120>(scale);
      f.set_scales(both);
    } else if constexpr (kWords == 2) {
      f.set_scales(kTwoTo120);
    }
    return f;
  }
};

/// y = (before +) sum * factor + bias, each operation rounded.
__device__ __forceinline__ float finish_sum(float sum, bool has_factor, float factor, bool has_bias,
                                            float bias, bool accumulate, float before) {
  float v = sum;
  if (has_factor) v = __fmul_rn(v, factor);
  if (has_bias) v = __fadd_rn(v, bias);
  return accumulate ? __fadd_rn(before, v) : v;
}

}  // namespace nibble::kernels::cuda
