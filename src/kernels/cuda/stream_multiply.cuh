// The inner loops of moe_stream_sm90.cuh: one row block times one token tile over all of K, once
// with wgmma for many tokens, once with mma.sync for few. Both add the products in the same order.
#pragma once

#include <utility>

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/stream_scales.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nibble::kernels::cuda {

/// Adds a chunk's sum to the row's, times the chunk's FP32 scales (block FP8).
template <int kRegisters>
__device__ __forceinline__ void add_scaled(float (&acc)[kRegisters], const float (&sum)[kRegisters],
                                           float2 scales) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    acc[i] = __fmaf_rn(sum[i], i % 4 < 2 ? scales.x : scales.y, acc[i]);
  }
}

#if defined(NIBBLE_HAS_WGMMA)
/// One row block times one token tile over all of K by wgmma, chunk after chunk, step after step:
/// the fixed order of every sum. A warpgroup expands a chunk, starts its four wgmmas and waits for
/// them; the other three warpgroups fill the gap. (Expanding the next chunk meanwhile needs a
/// second set of A registers and so half the warpgroups: measured slower, see docs/results.)
template <typename G, int kTokens>
__device__ __forceinline__ void multiply(float (&acc)[kTokens / 2], const StreamArgs& args,
                                         Ring<G>& ring, RowScales<G>& rows, const LevelTable& table,
                                         int group, int chunk_count, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;
  int sub = 0;  // chunk inside the stage
  auto run_chunk = [&](int chunk, int in_group, bool regular) __attribute__((always_inline)) {
    if (sub == 0) ring.wait_full();
    TileWeights<G> weights;
    const uint8_t* tile = ring.tile(group, sub);
    if (G::kCsf && in_group == 0) rows.load_group(tile, warp, lane);
    weights.load(tile, rows, in_group, table, warp, lane);
    const TileFragment<G::kFormat>& fragment = weights.fragment;
    const uint64_t b =
        chunk_descriptor(ring.x() + static_cast<uint32_t>(sub * G::kTileTokens * kRowBytes));
    uint32_t a[4][4];
    const MultiplyShift shift{args.shift_factors};
    fragment.template expand<0>(a[0], shift);
    fragment.template expand<1>(a[1], shift);
    fragment.template expand<2>(a[2], shift);
    fragment.template expand<3>(a[3], shift);
    if (!regular) weights.finish(rows, chunk, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) fragment.scale(a[j]);
    if constexpr (G::kRescale) {
      float sum[kTokens / 2];
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
      pin_registers(a);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) Wgmma<kTokens>::run(sum, a[j], b + 2 * j);
      wgmma_commit();
      wgmma_wait<0>();
      add_scaled(acc, sum, fragment.scales);
    } else {
      pin_registers(a);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) Wgmma<kTokens>::run(acc, a[j], b + 2 * j);
      wgmma_commit();
      wgmma_wait<0>();
    }
    if (++sub == G::kStageChunks || chunk + 1 == chunk_count) {
      warp_arrive(ring.empty(), lane);
      ring.advance();
      sub = 0;
    }
  };
  if (G::kCsf && !rows.regular) {  // rare, so as little code as possible
#pragma unroll 1
    for (int chunk = 0; chunk < chunk_count; ++chunk) run_chunk(chunk, chunk % kCsfChunks, false);
    return;
  }
  // Compressed scales lie elsewhere in each chunk of a group.
  constexpr int kAtOnce = G::kCsf ? kCsfChunks : 1;
#pragma unroll 1
  for (int first = 0; first < chunk_count; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i == 0 || first + i < chunk_count) run_chunk(first + i, i, true);
    }
  }
}
#endif

/// What a warp needs of one chunk, in registers: its 16 rows of weights and all tokens.
template <typename G, int kTokens>
struct ChunkOperands {
  TileWeights<G> weights;
  uint32_t tokens[kTokens / 8][2][4];

  /// `x`, `other_x`: the lane's ldmatrix addresses (see multiply_by_warps).
  __device__ __forceinline__ void load(const uint8_t* tile, uint32_t x, uint32_t other_x,
                                       const RowScales<G>& rows, int in_group,
                                       const LevelTable& table, int warp, int lane) {
    weights.load(tile, rows, in_group, table, warp, lane);
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      load_matrices(tokens[i][0], x + static_cast<uint32_t>(1024 * i));
      load_matrices(tokens[i][1], other_x + static_cast<uint32_t>(1024 * i));
    }
  }
  template <int j>
  __device__ __forceinline__ void multiply_step(float (&acc)[kTokens / 2]) const {
    uint32_t a[4];
    weights.fragment.template step<j>(a);
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      mma_m16n8k16(&acc[4 * i], a, tokens[i][j / 2][j % 2 * 2], tokens[i][j / 2][j % 2 * 2 + 1]);
    }
  }
  __device__ __forceinline__ void multiply_steps(float (&acc)[kTokens / 2]) const {
    multiply_step<0>(acc);
    multiply_step<1>(acc);
    multiply_step<2>(acc);
    multiply_step<3>(acc);
  }
  __device__ __forceinline__ void multiply(float (&acc)[kTokens / 2]) const {
    if constexpr (G::kRescale) {
      float sum[kTokens / 2];
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0.0f;
      multiply_steps(sum);
      add_scaled(acc, sum, weights.fragment.scales);
    } else {
      multiply_steps(acc);
    }
  }
};

/// multiply() for few tokens by mma.sync: the same products and the same order of sums, and on
/// Hopper the same bits as wgmma (moe_cuda_check proves it), for two thirds of the instructions: no
/// descriptors, fences or waits. The next chunk's operands are loaded before this chunk is
/// multiplied, also across stages: with one token a warp is bound by the latency of this chain.
template <typename G, int kTokens>
__device__ __forceinline__ void multiply_by_warps(float (&acc)[kTokens / 2], Ring<G>& ring,
                                                  RowScales<G>& rows, const LevelTable& table,
                                                  int group, int chunk_count, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;
  constexpr int kChunks = G::kStageChunks;
  static_assert(kChunks % 2 == 0);  // the chunks take turns with two sets of registers
  // Lanes 8 m .. 8 m + 7 point at the eight tokens of 16-byte unit m (and 4 + m: address ^ 64).
  const uint32_t x_lane = static_cast<uint32_t>(lane % 8 * kRowBytes + (lane / 8 ^ lane % 8) * 16);
  uint32_t x = 0, other_x = 0;  // in the stage at hand
  auto begin_stage = [&] {
    ring.wait_full();
    x = ring.x() + x_lane;
    keep(x);
    other_x = x ^ 64;
    keep(other_x);
  };
  // Chunk `sub` of stage `stage`, which is at hand.
  auto load = [&](ChunkOperands<G, kTokens> & operands, int stage, int sub)
      __attribute__((always_inline)) {
    const int chunk = stage * kChunks + sub;
    const int in_group = kChunks == kCsfChunks ? sub : chunk % kCsfChunks;
    const uint8_t* tile = ring.tile(group, sub);
    if (G::kCsf && in_group == 0) rows.load_group(tile, warp, lane);
    const auto at = static_cast<uint32_t>(sub * G::kTileTokens * kRowBytes);
    operands.load(tile, x + at, other_x + at, rows, in_group, table, warp, lane);
  };
  // Compressed scales with exceptions are rare: such rows go the slow way of the last chunks.
  const int full_stages = G::kCsf && !rows.regular ? 0 : chunk_count / kChunks;
  ChunkOperands<G, kTokens> operands[2];  // more than 16 tokens would spill
  if (full_stages > 0) {
    begin_stage();
    load(operands[0], 0, 0);
  }
#pragma unroll 1
  for (int stage = 0; stage < full_stages; ++stage) {
    const uint32_t empty = ring.empty();
    auto load_next = [&](ChunkOperands<G, kTokens>& next, int sub) {
      if (sub + 1 < kChunks) {
        load(next, stage, sub + 1);
      } else {
        ring.advance();
        if (stage + 1 < full_stages) {
          begin_stage();
          load(next, stage + 1, 0);
        }
      }
    };
    auto run_chunk = [&]<int sub>() __attribute__((always_inline)) {
      load_next(operands[(sub + 1) % 2], sub);
      operands[sub % 2].multiply(acc);
    };
    // Without a branch between chunks, so that their instructions mix.
    [&]<int... sub>(std::integer_sequence<int, sub...>) __attribute__((always_inline)) {
      (run_chunk.template operator()<sub>(), ...);
    }
    (std::make_integer_sequence<int, kChunks>{});
    warp_arrive(empty, lane);
  }
#pragma unroll 1
  for (int chunk = full_stages * kChunks; chunk < chunk_count; ++chunk) {
    const int sub = chunk % kChunks;
    if (sub == 0) begin_stage();
    load(operands[0], chunk / kChunks, sub);
    if (G::kCsf && !rows.regular) operands[0].weights.finish(rows, chunk, lane);
    operands[0].multiply(acc);
    if (sub + 1 == kChunks || chunk + 1 == chunk_count) {
      warp_arrive(ring.empty(), lane);
      ring.advance();
    }
  }
}

}  // namespace nibble::kernels::cuda
