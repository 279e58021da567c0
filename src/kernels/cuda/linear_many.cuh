// The dense product for many rows on Hopper: wgmma with weights expanded into registers (64 rows a
// warpgroup) and tokens from shared memory. The sums have the order of linear_few.cuh, and
// on Hopper mma.sync and wgmma round alike (linear_cuda_check proves it), so the bits are equal.
//
// One CTA: kGroups row blocks by kTokens tokens. One warp streams weights, which need not wait for
// the previous kernel; one streams x, which a small kernel before has put into swizzled chunks.
#pragma once

#include "kernels/cuda/deal_columns.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_tile.cuh"
#include "kernels/cuda/stage_ring.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nibble::kernels::cuda {

extern __shared__ __align__(1024) uint8_t many_smem[];

template <FormatId format, int groups, int tokens, int ctas_per_sm>
struct ManyGeometry {
  static constexpr FormatId kFormat = format;
  static constexpr int kGroups = groups, kTokens = tokens, kCtasPerSm = ctas_per_sm;
  static constexpr int kThreads = groups * 128 + (ctas_per_sm == 1 ? 128 : 64);
  static constexpr int kTileBytes = linear_tile_bytes(format);
  static constexpr int kXBytes = tokens * kRowBytes, kWBytes = groups * kTileBytes;
  static constexpr int kBudget = 227 * 1024 / ctas_per_sm - 1024 - 256;
  static constexpr int kFit = kBudget / (kXBytes + kWBytes);
  static constexpr int kStages = kFit < 12 ? kFit : 12;
  static constexpr int kW = kStages * kXBytes;
  static constexpr int kFull = kW + kStages * kWBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kSmemBytes = kEmpty + 8 * kStages;
  static_assert(kXBytes % 1024 == 0 && kFull % 8 == 0 && kStages >= 3);
  static __device__ const uint8_t* smem() { return many_smem; }
};

/// Places x into chunks: one thread a 16-byte unit, rows past the end are zeros.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    linear_stage_kernel(const __grid_constant__ LinearKernelArgs args) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto units = static_cast<uint32_t>(args.chunk_count) * 8;
  const uint32_t row = i / units, at = i - row * units;
  if (row >= args.capacity) return;
  const uint8_t* from = args.x + row * args.x_stride * 2;
  const int cols = row < static_cast<uint32_t>(args.rows) ? args.cols : 0;
  const int64_t offset = (at / 8 * args.capacity + row) * kRowBytes + 16 * (at % 8 ^ row % 8);
  *reinterpret_cast<uint4*>(args.staged_x + offset) = dealt_unit(from, cols, at);
}

#if defined(NIBBLE_HAS_WGMMA)
template <FormatId format>
__device__ __forceinline__ void expand_chunk(uint32_t (&a)[4][4], const uint8_t* tile, int warp,
                                             int lane) {
  LinearFragment<format> fragment;
  fragment.load(tile, warp, lane);
  fragment.template step<0>(a[0]);
  fragment.template step<1>(a[1]);
  fragment.template step<2>(a[2]);
  fragment.template step<3>(a[3]);
}

/// One row block by kTokens tokens over all of K. The next chunk is expanded while a chunk's
/// products run.
template <typename G>
__device__ __forceinline__ void multiply_many(const LinearKernelArgs& args,
                                              float (&total)[G::kTokens / 2], int group, int block,
                                              int warp, int lane) {
  constexpr int kN = G::kTokens / 2, kChunks = kLinearSegmentChunks;
  constexpr bool kBlockScaled = G::kFormat == FormatId::kFp8Block;
  StageRing<G> ring, ahead;
  uint32_t a[2][4][4];
  float acc[kN];
  float part[kBlockScaled ? kN : 1];
#pragma unroll
  for (int i = 0; i < kN; ++i) total[i] = 0.0f;
  auto expand = [&](uint32_t(&to)[4][4]) {
    mbarrier_wait(ahead.full(), ahead.phase);
    expand_chunk<G::kFormat>(
        to, many_smem + G::kW + ahead.stage * G::kWBytes + group * G::kTileBytes, warp, lane);
    ahead.advance();
  };
  expand(a[0]);
#pragma unroll 1
  for (int first = 0; first < args.chunk_count; first += kChunks) {
#pragma unroll
    for (int i = 0; i < kN; ++i) acc[i] = 0.0f;
    if constexpr (kBlockScaled) {
#pragma unroll
      for (int i = 0; i < kN; ++i) part[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = first + i;
      if (chunk < args.chunk_count) {
        const uint64_t b = chunk_descriptor(ring.x());
        pin_registers(a[i % 2]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; ++j) Wgmma<G::kTokens>::run(acc, a[i % 2][j], b + 2 * j);
        wgmma_commit();
        if (chunk + 1 < args.chunk_count) expand(a[(i + 1) % 2]);
        wgmma_wait<0>();
        warp_arrive(ring.empty(), lane);
        ring.advance();
        if constexpr (kBlockScaled) {
          if (i % 2 == 1 || chunk + 1 == args.chunk_count) {
            const float scale =
                __ldg(args.block_scales +
                      static_cast<int64_t>(block) * ((args.chunk_count + 1) / 2) + chunk / 2);
#pragma unroll
            for (int n = 0; n < kN; ++n) {
              part[n] = __fmaf_rn(scale, acc[n], part[n]);
              acc[n] = 0.0f;
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) total[i] = __fadd_rn(total[i], kBlockScaled ? part[i] : acc[i]);
  }
}

template <typename G>
__device__ __forceinline__ void store_many(const LinearKernelArgs& args,
                                           const float (&total)[G::kTokens / 2], int block,
                                           int first, int warp, int lane) {
  const int row = block * kTileRows + warp * 16 + lane / 4 * 2;
  const bool has_factor = args.factor != nullptr, has_bias = args.bias != nullptr;
  float factor[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + h >= args.out) continue;
    if (has_factor) factor[h] = __ldg(args.factor + row + h);
    if (has_bias) bias[h] = __ldg(args.bias + row + h);
  }
#pragma unroll
  for (int i = 0; i < G::kTokens / 8; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int token = first + 8 * i + lane % 4 * 2 + n;
      if (token >= args.rows) continue;
      float* y = args.y + token * args.y_stride + row;
      if (args.vector_y && row + 1 < args.out) {
        float2 before = make_float2(0.0f, 0.0f);
        if (args.accumulate) before = *reinterpret_cast<float2*>(y);
        *reinterpret_cast<float2*>(y) =
            make_float2(finish_sum(total[4 * i + n], has_factor, factor[0], has_bias, bias[0],
                                   args.accumulate, before.x),
                        finish_sum(total[4 * i + 2 + n], has_factor, factor[1], has_bias, bias[1],
                                   args.accumulate, before.y));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (row + h >= args.out) continue;
          y[h] = finish_sum(total[4 * i + 2 * h + n], has_factor, factor[h], has_bias, bias[h],
                            args.accumulate, args.accumulate ? y[h] : 0.0f);
        }
      }
    }
  }
}
#endif

template <typename G>
__global__ void __launch_bounds__(G::kThreads, G::kCtasPerSm)
    linear_many_kernel(const __grid_constant__ LinearKernelArgs args) {
#if defined(NIBBLE_HAS_WGMMA)
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token_tiles = (args.rows + G::kTokens - 1) / G::kTokens;
  const int first_block = static_cast<int>(blockIdx.x) / token_tiles * G::kGroups;
  const int first = static_cast<int>(blockIdx.x) % token_tiles * G::kTokens;
  const int blocks = min(G::kGroups, (args.out + kTileRows - 1) / kTileRows - first_block);
  const uint32_t smem = smem_address(many_smem);
  if (smem % 1024 != 0) __trap();  // the swizzle needs it
  if (threadIdx.x == 0) {
    for (int i = 0; i < G::kStages; ++i) {
      mbarrier_init(smem + G::kFull + 8 * i, 2);
      mbarrier_init(smem + G::kEmpty + 8 * i, static_cast<uint32_t>(blocks) * 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  allow_next_kernel();
  if (warp < G::kGroups * 4) {
    if constexpr (G::kCtasPerSm == 1) grow_registers<208>();
    const int group = warp / 4;
    if (group >= blocks) return;
    float total[G::kTokens / 2];
    multiply_many<G>(args, total, group, first_block + group, warp % 4, lane);
    wait_for_previous_kernel();  // over long ago, as x has been read; y of before is visible now
    store_many<G>(args, total, first_block + group, first, warp % 4, lane);
    return;
  }
  if constexpr (G::kCtasPerSm == 1) shrink_registers<40>();
  if (warp == G::kGroups * 4) {
    StageRing<G> ring;
    const uint8_t* source =
        args.packed + static_cast<int64_t>(first_block + lane) * args.chunk_count * G::kTileBytes;
    for (int chunk = 0; chunk < args.chunk_count; ++chunk) {
      mbarrier_wait(ring.empty(), ring.phase ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect(ring.full(), static_cast<uint32_t>(blocks * G::kTileBytes));
      }
      if (lane < blocks) {
        bulk_load(ring.w() + static_cast<uint32_t>(lane * G::kTileBytes), source, G::kTileBytes,
                  ring.full());
      }
      source += G::kTileBytes;
      ring.advance();
    }
  } else if (warp == G::kGroups * 4 + 1 && lane == 0) {
    StageRing<G> ring;
    wait_for_previous_kernel();
    proxy_fence();
    const uint32_t bytes =
        static_cast<uint32_t>(min(static_cast<int64_t>(G::kTokens), args.capacity - first)) *
        kRowBytes;
    const uint8_t* source = args.staged_x + static_cast<int64_t>(first) * kRowBytes;
    for (int chunk = 0; chunk < args.chunk_count; ++chunk) {
      mbarrier_wait(ring.empty(), ring.phase ^ 1);
      mbarrier_arrive_expect(ring.full(), bytes);
      bulk_load(ring.x(), source, bytes, ring.full());
      source += args.capacity * kRowBytes;
      ring.advance();
    }
  }
#endif
}

template <typename G>
cudaError_t launch_linear_many(const LinearKernelArgs& args, cudaStream_t stream) {
  constexpr int kStageThreads = 256;
  const int64_t units = args.capacity * args.chunk_count * 8;
  const cudaError_t e =
      launch_overlapped(linear_stage_kernel<kStageThreads>,
                        static_cast<int>((units + kStageThreads - 1) / kStageThreads),
                        kStageThreads, 0, stream, args);
  if (e != cudaSuccess) return e;
  const int blocks = static_cast<int>(chunks(args.out));
  const int grid =
      (blocks + G::kGroups - 1) / G::kGroups * ((args.rows + G::kTokens - 1) / G::kTokens);
  return launch_overlapped(linear_many_kernel<G>, grid, G::kThreads, G::kSmemBytes, stream, args);
}

/// The large tile where it fills most of the GPU; else, and for block FP8 (a third set of sums),
/// one row block and 64 tokens a CTA, two CTAs an SM.
template <FormatId format>
cudaError_t launch_linear_many(const LinearKernelArgs& args, int processors, cudaStream_t stream) {
  if constexpr (format != FormatId::kFp8Block) {
    const int64_t large = (chunks(args.out) + 1) / 2 * ((args.rows + 127) / 128);
    if (args.rows > 64 && large * 5 >= processors * 3) {
      return launch_linear_many<ManyGeometry<format, 2, 128, 1>>(args, stream);
    }
  }
  return launch_linear_many<ManyGeometry<format, 1, 64, 2>>(args, stream);
}

}  // namespace nibble::kernels::cuda
