// The arithmetic that both attention kernels share, on one warp's 16 query rows: scores of tiles of
// 8 positions, weights, values of pairs of 8-dim tiles, and the fold of softmax states. Whatever
// decides a row's bits is here.
//
// FP8 keys and values become BF16 exactly in registers. A register of four bytes splits cheaply
// into its even and its odd bytes, so with FP8 the dims of a step are dealt in another order
// (load_queries, value_dim): a sum over dims is still the same for every path.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/attention_pages.h"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {

constexpr int kAttentionThreads = 256;
constexpr int kGroupBlocks = 8;  // blocks of 64 positions that are folded before groups are

template <int kHeadDim, KvFormat kFormat>
struct KvTile {
  static constexpr bool kFp8 = kFormat == KvFormat::kFp8E4m3;
  static constexpr int kRow = kHeadDim * kv_format_bytes(kFormat);  // bytes of one position
  static constexpr int kUnits = kRow / 16;
  static constexpr int kPlane = kKvPageTokens * kRow;
  static constexpr int kSteps = kHeadDim / 16;  // 16 dims: a step of scores, a pair of value tiles
  static constexpr int kStages = 4 * kPlane <= 65536 ? 2 : 1;  // K and V of one block each
  static constexpr int kSmem = kStages * 2 * kPlane;
  static_assert(kHeadDim % 16 == 0);
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int kMatrices, bool kTranspose>
__device__ __forceinline__ void load_shared_matrices(uint32_t (&r)[4], uint32_t address) {
  if constexpr (kMatrices == 4 && kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  } else if constexpr (kMatrices == 4) {
    load_matrices(r, address);
  } else if constexpr (kMatrices == 2 && kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address));
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(address));
  }
}

/// Waits for all of the thread's asynchronous copies.
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// K and V of one block, by all threads of the CTA. Positions after `last` (0..63) become zeros: a
/// page holds anything there, and 0 times a NaN is a NaN.
template <typename Tile>
__device__ __forceinline__ void copy_block(uint32_t dst, const std::byte* src, int last) {
  static_assert(Tile::kPlane % (16 * 64) == 0);
  for (int plane = 0; plane < 2; ++plane) {
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kPlane / 16; i += kAttentionThreads) {
      const int at = plane * Tile::kPlane + i * 16;
      copy_unit_async(dst + static_cast<uint32_t>(at), src + at, i / Tile::kUnits <= last ? 16 : 0);
    }
  }
  commit_copies();
}

/// Two bytes of E4M3 at bits 15..8 and 31..24, as BF16.
__device__ __forceinline__ uint32_t expand_e4m3(uint32_t v) {
  constexpr uint32_t kSign = 0x80008000u, kRest = 0x07F007F0u;
  return mul_bf16x2(pick(v, kSign, v >> 4, kRest), 0x7B807B80u);  // 2^120
}

/// One row's two registers of the A operand of step `step`.
template <typename Tile>
__device__ __forceinline__ void load_query_step(const uint16_t* row, int step, int lane,
                                                uint32_t& low, uint32_t& high) {
  const int t = lane % 4;
  if constexpr (Tile::kFp8) {
    const uint2 v = *reinterpret_cast<const uint2*>(row + 16 * step + 4 * t);
    low = __byte_perm(v.x, v.y, 0x5410);
    high = __byte_perm(v.x, v.y, 0x7632);
  } else {
    low = *reinterpret_cast<const uint32_t*>(row + 16 * step + 2 * t);
    high = *reinterpret_cast<const uint32_t*>(row + 16 * step + 8 + 2 * t);
  }
}
/// A operands of all steps: rows g and g + 8 of q [.., kHeadDim] BF16; null gives zeros.
template <typename Tile>
__device__ __forceinline__ void load_queries(const uint16_t* low, const uint16_t* high, int lane,
                                             uint32_t (&q)[Tile::kSteps][4]) {
#pragma unroll
  for (int s = 0; s < Tile::kSteps; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint16_t* row = h == 0 ? low : high;
      q[s][h] = q[s][2 + h] = 0;
      if (row != nullptr) load_query_step<Tile>(row, s, lane, q[s][h], q[s][2 + h]);
    }
  }
}

/// Offset of 16-byte unit `unit` of row `row` (0..7, plus any multiple of 8) of a plane.
template <typename Tile>
__device__ __forceinline__ uint32_t unit_offset(int row, int unit) {
  return static_cast<uint32_t>(row * Tile::kRow + 16 * kv_unit(Tile::kUnits, row % 8, unit));
}

/// s[i] = q . K over dims, for kTiles tiles of 8 positions from tile `first` on.
template <typename Tile, int kTiles>
__device__ __forceinline__ void block_scores(const uint32_t (&q)[Tile::kSteps][4], uint32_t k,
                                             int first, int lane, float (&s)[kTiles][4]) {
  constexpr int kPer = kTiles == 1 ? 1 : 2;  // tiles of one load
  const int matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < kTiles; i += kPer) {
      uint32_t r[4];
      if constexpr (Tile::kFp8) {
        const int tile = first + i + matrix % kPer;
        load_shared_matrices<kPer, false>(r, k + unit_offset<Tile>(8 * tile + row, step));
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          mma_m16n8k16(s[i + j], q[step], expand_e4m3(r[j] << 8), expand_e4m3(r[j]));
        }
      } else {
        const int tile = first + i + matrix / 2 % kPer;
        load_shared_matrices<2 * kPer, false>(
            r, k + unit_offset<Tile>(8 * tile + row, 2 * step + matrix % 2));
#pragma unroll
        for (int j = 0; j < kPer; ++j) mma_m16n8k16(s[i + j], q[step], r[2 * j], r[2 * j + 1]);
      }
    }
  }
}

/// Scores after each row's own position (block-relative, row g and g + 8) become -inf.
template <int kTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kTiles][4], int first, int lane, int own_low,
                                            int own_high) {
  const int column = 8 * first + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (column + 8 * i + c > own_low) s[i][c] = -INFINITY;
      if (column + 8 * i + c > own_high) s[i][2 + c] = -INFINITY;
    }
  }
}

/// Maximum of the lane's row over a lane's tiles and its quad. high: row g + 8.
template <int kTiles>
__device__ __forceinline__ float quad_maximum(const float (&s)[kTiles][4], int high) {
  float m = -INFINITY;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) m = fmaxf(m, fmaxf(s[i][2 * high], s[i][2 * high + 1]));
  m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
  return fmaxf(m, __shfl_xor_sync(~0u, m, 2));
}

/// Two weights as BF16. factor: scale * log2(e); peak: factor * maximum.
__device__ __forceinline__ uint32_t weight_pair(float a, float b, float factor, float peak) {
  const float shift = peak == -INFINITY ? 0.0f : -peak;
  const __nv_bfloat162 v = __floats2bfloat162_rn(exp2_approx(__fmaf_rn(a, factor, shift)),
                                                 exp2_approx(__fmaf_rn(b, factor, shift)));
  return *reinterpret_cast<const uint32_t*>(&v);
}

/// sum[0] (row g) and sum[2] (row g + 8) of the weights of a block.
__device__ __forceinline__ void block_sums(const uint32_t (&p)[4][4], float (&sum)[4]) {
  constexpr uint32_t kOnes = 0x3F803F80u;
  sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) mma_m16n8k16(sum, p[i], kOnes, kOnes);
}

/// Values of 16 dims (pair): o[tile][register]; value_dim says which dims they are.
template <typename Tile>
__device__ __forceinline__ void block_values(const uint32_t (&p)[4][4], uint32_t v, int pair,
                                             int lane, float (&o)[2][4]) {
  const int matrix = lane / 8, row = lane % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t r[4];
    const int position = 16 * i + 8 * (matrix % 2) + row;
    if constexpr (Tile::kFp8) {
      load_shared_matrices<2, true>(r, v + unit_offset<Tile>(position, pair));
      mma_m16n8k16(o[0], p[i], expand_e4m3((r[0] & 0x00FF00FFu) << 8),
                   expand_e4m3((r[1] & 0x00FF00FFu) << 8));
      mma_m16n8k16(o[1], p[i], expand_e4m3(r[0]), expand_e4m3(r[1]));
    } else {
      load_shared_matrices<4, true>(r, v + unit_offset<Tile>(position, 2 * pair + matrix / 2));
      mma_m16n8k16(o[0], p[i], r[0], r[1]);
      mma_m16n8k16(o[1], p[i], r[2], r[3]);
    }
  }
}

/// What a state is multiplied with when a later one is added; changes maximum and sum.
struct FoldWeights {
  float own, later;
};
__device__ __forceinline__ FoldWeights fold_sums(float& m, float& sum, float later_m,
                                                 float later_sum) {
  const float top = fmaxf(m, later_m);
  const float base = top == -INFINITY ? 0.0f : top;  // neither has seen a position: weights 0
  const FoldWeights w = {exp2_approx(__fadd_rn(m, -base)), exp2_approx(__fadd_rn(later_m, -base))};
  sum = __fmaf_rn(later_sum, w.later, __fmul_rn(sum, w.own));
  m = top;
  return w;
}
__device__ __forceinline__ float fold_value(float own, float later, const FoldWeights& w) {
  return __fmaf_rn(later, w.later, __fmul_rn(own, w.own));
}
/// The result; + 0 because paths may differ in the sign of a zero.
__device__ __forceinline__ float finish_value(float value, float inverse_sum) {
  return __fadd_rn(__fmul_rn(value, inverse_sum), 0.0f);
}

/// First of the two dims that value pair `second` (0, 1) of quad `quad` = 4 * pair + lane % 4 has.
template <typename Tile>
__device__ __forceinline__ int value_dim(int quad, int second) {
  return Tile::kFp8 ? 4 * quad + 2 * second : 16 * (quad / 4) + 8 * second + 2 * (quad % 4);
}
/// Calls store(dim, first, second) for a lane's two pairs of values of row g (high: g + 8) of a
/// pair of tiles.
template <typename Tile, typename Store>
__device__ __forceinline__ void for_values(const float (&o)[2][4], int pair, int lane, int high,
                                           const Store& store) {
  const int c = 2 * high, quad = 4 * pair + lane % 4;
  const int first = value_dim<Tile>(quad, 0), second = value_dim<Tile>(quad, 1);
  if constexpr (Tile::kFp8) {
    store(first, o[0][c], o[1][c]);
    store(second, o[0][c + 1], o[1][c + 1]);
  } else {
    store(first, o[0][c], o[0][c + 1]);
    store(second, o[1][c], o[1][c + 1]);
  }
}

__device__ __forceinline__ void store_bf16_pair(uint16_t* out, float a, float b) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  *reinterpret_cast<__nv_bfloat162*>(out) = v;
}

}  // namespace nibble::kernels::cuda
