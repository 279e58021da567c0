// The dense product for few rows: a stream of weights through registers, on any architecture.
//
// A CTA takes a slice of 16 weight rows over all of K; its warps take the segments of K in turn,
// add each by mma.sync from zero and leave the sums in shared memory, where threads add them in
// ascending order. No CTA waits for another. Every warp has a whole segment of 16 rows in flight,
// loaded before the previous kernel's end is waited for, since weights never change.
#pragma once

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_tile.cuh"
#include "kernels/cuda/mma.cuh"

namespace nibble::kernels::cuda {

constexpr int kSliceRows = 16;
constexpr int kSlicesPerBlock = kTileRows / kSliceRows;

__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

extern __shared__ __align__(16) float few_parts[];

/// A warp's x of kCount chunks as B fragments: lane (g, t) holds columns 16 t .. 16 t + 15 of every
/// chunk of token 8 n + g; zeros for tokens and columns that are not there.
template <int kTokens>
struct WarpTokens {
  static constexpr int kCount = kTokens == 8 ? kLinearSegmentChunks : kLinearSegmentChunks / 2;
  uint4 v[kCount][kTokens / 8][2];
  int key = -1;  // what is held: chunk and first token

  __device__ __forceinline__ void load(const LinearKernelArgs& args, int first, int chunk,
                                       int lane) {
    const int wanted = first * args.segments * kLinearSegmentChunks + chunk;
    if (key == wanted) return;
    key = wanted;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      const int row = first + 8 * n + g;
      const uint8_t* x = args.x + row * args.x_stride * 2;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = (chunk + i) * kTileCols + 16 * t + 8 * h;
          v[i][n][h] = row < args.rows && column < args.cols
                           ? *reinterpret_cast<const uint4*>(x + column * 2)
                           : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
};

template <FormatId format, int kTokens>
struct FewRows {
  static constexpr int kChunks = kLinearSegmentChunks;
  static constexpr bool kBlockScaled = format == FormatId::kFp8Block;
  RawTile<format> raw[kChunks];
  float scales[kChunks / 2];  // block FP8: of the segment's 128-column groups

  __device__ __forceinline__ void load_chunk(const LinearKernelArgs& args, int slice, int segment,
                                             int i, int lane) {
    const int chunk = segment * kChunks + i;
    if (chunk >= args.chunk_count) return;
    const int block = slice / kSlicesPerBlock;
    raw[i].load(args.packed + (static_cast<int64_t>(block) * args.chunk_count + chunk) *
                                  linear_tile_bytes(format),
                slice % kSlicesPerBlock, lane);
    if (kBlockScaled && i % 2 == 0) {
      scales[i / 2] = __ldg(args.block_scales +
                            static_cast<int64_t>(block) * ((args.chunk_count + 1) / 2) + chunk / 2);
    }
  }
  template <int j>
  static __device__ __forceinline__ void step(const LinearFragment<format>& f,
                                              const uint4 (&x)[kTokens / 8][2],
                                              float (&acc)[kTokens / 2]) {
    uint32_t a[4];
    f.template step<j>(a);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      const uint4 v = x[n][j / 2];
      mma_m16n8k16(&acc[4 * n], a, j % 2 == 0 ? v.x : v.z, j % 2 == 0 ? v.y : v.w);
    }
  }
};

template <FormatId format, int kTokens>
__global__ void __maxnreg__(format == FormatId::kBf16 || kTokens > 8 ? 128 : 80)
    linear_few_kernel(const __grid_constant__ LinearKernelArgs args) {
  constexpr int kChunks = kLinearSegmentChunks;
  using Few = FewRows<format, kTokens>;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = uniform(thread / 32), warps = static_cast<int>(blockDim.x) / 32;
  const int slices = (args.out + kSliceRows - 1) / kSliceRows;
  const int token_groups = (args.rows + kTokens - 1) / kTokens;
  const int items = slices * token_groups, stride = static_cast<int>(gridDim.x);
  int item = static_cast<int>(blockIdx.x), segment = warp;
  allow_next_kernel();
  Few w;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) w.load_chunk(args, item / token_groups, segment, i, lane);
  {  // constants of the first outputs, on their way to the L2
    const int row = min(item / token_groups * kSliceRows + thread % kSliceRows, args.out - 1);
    if (thread < kSliceRows && args.factor != nullptr) prefetch_line(args.factor + row);
    if (thread < kSliceRows && args.bias != nullptr) prefetch_line(args.bias + row);
  }
  wait_for_previous_kernel();

  WarpTokens<kTokens> x;
  float* parts = few_parts;
  for (; item < items; item += stride) {
    const int slice = item / token_groups, first = item % token_groups * kTokens;
    const int tokens = min(kTokens, args.rows - first);
    // What the first output of this thread needs, fetched before the latency would show.
    const int row = slice * kSliceRows + thread % kSliceRows, token = thread / kSliceRows;
    const bool has_output = token < tokens && row < args.out;
    const float factor = has_output && args.factor != nullptr ? __ldg(args.factor + row) : 1.0f;
    const float bias = has_output && args.bias != nullptr ? __ldg(args.bias + row) : 0.0f;
    float* y = args.y + (first + token) * args.y_stride + row;
    const float before = has_output && args.accumulate ? *y : 0.0f;

    for (; segment < args.segments; segment += warps) {
      int next_segment = segment + warps, next_item = item;
      if (next_segment >= args.segments) {
        next_segment = warp;
        next_item += stride;
      }
      const int next_slice = next_item < items ? next_item / token_groups : -1;
      float acc[kTokens / 2], part[kTokens / 2];
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) acc[i] = part[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        constexpr int kCount = WarpTokens<kTokens>::kCount;
        if (i % kCount == 0) x.load(args, first, segment * kChunks + i, lane);
        if (segment * kChunks + i < args.chunk_count) {
          const auto fragment = w.raw[i].expand();
          Few::template step<0>(fragment, x.v[i % kCount], acc);
          Few::template step<1>(fragment, x.v[i % kCount], acc);
          Few::template step<2>(fragment, x.v[i % kCount], acc);
          Few::template step<3>(fragment, x.v[i % kCount], acc);
        }
        if constexpr (Few::kBlockScaled) {
          if (i % 2 == 1 && segment * kChunks + i - 1 < args.chunk_count) {
#pragma unroll
            for (int n = 0; n < kTokens / 2; ++n) {
              part[n] = __fmaf_rn(w.scales[i / 2], acc[n], part[n]);
              acc[n] = 0.0f;
            }
          }
          if (i % 2 == 1 && next_slice >= 0) {
            w.load_chunk(args, next_slice, next_segment, i - 1, lane);
            w.load_chunk(args, next_slice, next_segment, i, lane);
          }
        } else {
          if (next_slice >= 0) w.load_chunk(args, next_slice, next_segment, i, lane);
        }
      }
      const float* sum = Few::kBlockScaled ? part : acc;
      float* out = parts + segment * kSliceRows * kTokens + lane / 4 * 2;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        const int column = 8 * n + lane % 4 * 2;
        *reinterpret_cast<float2*>(out + column * kSliceRows) =
            make_float2(sum[4 * n], sum[4 * n + 2]);
        *reinterpret_cast<float2*>(out + (column + 1) * kSliceRows) =
            make_float2(sum[4 * n + 1], sum[4 * n + 3]);
      }
    }
    segment = warp;
    __syncthreads();
    for (int o = thread; o < kSliceRows * tokens; o += static_cast<int>(blockDim.x)) {
      float sum = 0.0f;
#pragma unroll 4
      for (int s = 0; s < args.segments; ++s) {
        sum = __fadd_rn(sum, parts[s * kSliceRows * kTokens + o]);
      }
      const int r = slice * kSliceRows + o % kSliceRows;
      if (r >= args.out) continue;
      if (o == thread) {
        *y = finish_sum(sum, args.factor != nullptr, factor, args.bias != nullptr, bias,
                        args.accumulate, before);
      } else {
        float* late = args.y + (first + o / kSliceRows) * args.y_stride + r;
        *late = finish_sum(sum, args.factor != nullptr,
                           args.factor != nullptr ? __ldg(args.factor + r) : 1.0f,
                           args.bias != nullptr, args.bias != nullptr ? __ldg(args.bias + r) : 0.0f,
                           args.accumulate, args.accumulate ? *late : 0.0f);
      }
    }
    // The other half of shared memory next time: one barrier a slice is enough.
    parts = few_parts + (parts == few_parts ? args.segments * kSliceRows * kTokens : 0);
  }
}

/// A warp a segment where there are no more than 16: the whole slice is then in flight at once.
template <FormatId format, int kTokens>
cudaError_t launch_linear_few(const LinearKernelArgs& args, int processors, cudaStream_t stream) {
  constexpr int kWarpsPerSm = format == FormatId::kBf16 || kTokens > 8 ? 16 : 24;  // by registers
  const int64_t groups = (args.rows + kTokens - 1) / kTokens;
  const int64_t items = (args.out + kSliceRows - 1) / kSliceRows * groups;
  int warps = 16;
  while (warps > 4 && warps > args.segments) warps /= 2;
  const int grid = static_cast<int>(
      std::min<int64_t>(items, static_cast<int64_t>(processors) * (kWarpsPerSm / warps)));
  const size_t smem = size_t{2} * static_cast<size_t>(args.segments) * kSliceRows * kTokens * 4;
  return launch_overlapped(linear_few_kernel<format, kTokens>, grid, warps * 32, smem, stream,
                           args);
}

template <FormatId format>
cudaError_t launch_linear_few(const LinearKernelArgs& args, int processors, cudaStream_t stream) {
  constexpr int kWideSegments = 48;  // above it the sums of 16 tokens do not fit in 99 KiB
  return args.rows <= 8 || args.segments > kWideSegments
             ? launch_linear_few<format, 8>(args, processors, stream)
             : launch_linear_few<format, 16>(args, processors, stream);
}

}  // namespace nibble::kernels::cuda
