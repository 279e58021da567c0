// The dense product for few rows when the whole matrix fits the GPU's shared memory at once: every
// CTA holds its 16 weight rows there, copied while the kernel before still runs. What is left after
// that kernel's end is x, the products and one sum. Few registers and one wave of CTAs, so that the
// copies may begin beside the kernel before. Same order of sums as linear_few.cuh.
#pragma once

#include "kernels/cuda/linear_few.cuh"

namespace nibble::kernels::cuda {

constexpr int kHeldTokens = 8;  // rows that are multiplied at a time
constexpr int kHeldMaxWarps = 16;
constexpr int kHeldMaxRegisters = 64;  // a thread

/// Shared memory of `tokens` rows at a time: barriers, weights, sums, and what a kernel adds.
struct HeldLayout {
  int weights, parts, bytes;
  NIBBLE_HD HeldLayout(const LinearKernelArgs& args, int tokens, int added_bytes = 0)
      : weights((args.segments * 8 + 127) / 128 * 128),
        parts(weights + args.chunk_count * linear_tile_bytes(FormatId::kBf16) / kSlicesPerBlock),
        bytes(parts + args.segments * kSliceRows * tokens * 4 + added_bytes) {}
};

extern __shared__ __align__(128) uint8_t held_smem[];

#if defined(NIBBLE_HAS_BULK_COPY)
/// One thread of a warp queues the copies of the warp's segments: a barrier each, at `smem`; no
/// barrier of the CTA.
__device__ __forceinline__ void copy_held_weights(const LinearKernelArgs& args, int slice,
                                                  uint32_t smem, int weights, int warp, int warps) {
  constexpr int kTile = linear_tile_bytes(FormatId::kBf16), kPiece = kTile / kSlicesPerBlock;
  constexpr int kChunks = kLinearSegmentChunks;
  for (int s = warp; s < args.segments; s += warps) mbarrier_init(smem + 8 * s, 1);
  mbarrier_init_fence();
  const uint64_t policy = evict_first_policy();
  const uint8_t* from = args.packed +
                        static_cast<int64_t>(slice / kSlicesPerBlock) * args.chunk_count * kTile +
                        slice % kSlicesPerBlock * kPiece;
  for (int s = warp; s < args.segments; s += warps) {
    const int count = min(kChunks, args.chunk_count - s * kChunks);
    mbarrier_arrive_expect(smem + 8 * s, static_cast<uint32_t>(count * kPiece));
    for (int c = s * kChunks; c < s * kChunks + count; ++c) {
      bulk_load_streaming(smem + static_cast<uint32_t>(weights + c * kPiece),
                          from + static_cast<int64_t>(c) * kTile, kPiece, smem + 8 * s, policy);
    }
  }
}

/// acc += the chunk's 16 rows, held at `weights`, times the lane's x.
__device__ __forceinline__ void multiply_held(const uint8_t* weights, int chunk,
                                              const uint4 (&x)[2], int lane, float (&acc)[4]) {
  constexpr int kPiece = linear_tile_bytes(FormatId::kBf16) / kSlicesPerBlock;
  const auto* words = reinterpret_cast<const uint4*>(weights + chunk * kPiece) + lane;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint4 w = words[32 * j], v = x[j / 2];
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    mma_m16n8k16(acc, a, j % 2 == 0 ? v.x : v.z, j % 2 == 0 ? v.y : v.w);
  }
}

/// The sum of output o's segments, of `tokens` rows each.
__device__ __forceinline__ float sum_segments(const float* parts, int segments, int tokens, int o) {
  float sum = 0.0f;
#pragma unroll 8
  for (int s = 0; s < segments; ++s) sum = __fadd_rn(sum, parts[s * kSliceRows * tokens + o]);
  return sum;
}
#endif

__global__ void __launch_bounds__(kHeldMaxWarps * 32, 2)
    linear_held_kernel(const __grid_constant__ LinearKernelArgs args) {
#if defined(NIBBLE_HAS_BULK_COPY)
  constexpr int kChunks = kLinearSegmentChunks;
  const HeldLayout at(args, kHeldTokens);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = uniform(thread / 32), warps = threads / 32;
  const int slice = static_cast<int>(blockIdx.x);
  const uint32_t smem = smem_address(held_smem);
  allow_next_kernel();
  if (lane == 0) copy_held_weights(args, slice, smem, at.weights, warp, warps);
  __syncwarp();
  const int row = slice * kSliceRows + thread % kSliceRows;
  const bool has_row = row < args.out;
  const float factor = has_row && args.factor != nullptr ? __ldg(args.factor + row) : 1.0f;
  const float bias = has_row && args.bias != nullptr ? __ldg(args.bias + row) : 0.0f;
  wait_for_previous_kernel();

  float* parts = reinterpret_cast<float*>(held_smem + at.parts);
  WarpTokens<kHeldTokens> x;
  for (int first = 0; first < args.rows; first += kHeldTokens) {
    const int outputs = kSliceRows * min(kHeldTokens, args.rows - first);
    float* y = args.y + (first + thread / kSliceRows) * args.y_stride + row;
    const float before = args.accumulate && has_row && thread < outputs ? *y : 0.0f;
    for (int s = warp; s < args.segments; s += warps) {
      x.load(args, first, s * kChunks, lane);
      mbarrier_wait(smem + 8 * s, 0);
      float acc[4] = {};
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (s * kChunks + i >= args.chunk_count) break;
        multiply_held(held_smem + at.weights, s * kChunks + i, x.v[i][0], lane, acc);
      }
      float* out = parts + s * kSliceRows * kHeldTokens + lane / 4 * 2;
      const int column = lane % 4 * 2;
      *reinterpret_cast<float2*>(out + column * kSliceRows) = make_float2(acc[0], acc[2]);
      *reinterpret_cast<float2*>(out + (column + 1) * kSliceRows) = make_float2(acc[1], acc[3]);
    }
    __syncthreads();
    for (int o = thread; o < outputs; o += threads) {
      const float sum = sum_segments(parts, args.segments, kHeldTokens, o);
      if (!has_row) continue;
      float* to = args.y + (first + o / kSliceRows) * args.y_stride + row;
      const float old = o == thread || !args.accumulate ? before : *to;
      *to = finish_sum(sum, args.factor != nullptr, factor, args.bias != nullptr, bias,
                       args.accumulate, old);
    }
    if (first + kHeldTokens < args.rows) __syncthreads();  // the sums' place is free again
  }
#endif
}

/// Whether all CTAs of a product can be on the GPU at once.
inline bool held_fits(int64_t out, int bytes, int threads, int processors) {
  constexpr int kProcessorBytes = 228 * 1024, kMaxBytes = 227 * 1024, kReserved = 1024;
  if (bytes > kMaxBytes) return false;
  const int ctas = std::min({kProcessorBytes / (bytes + kReserved),
                             65536 / (threads * kHeldMaxRegisters), 2048 / threads});
  return (out + kSliceRows - 1) / kSliceRows <= processors * ctas;
}

inline int held_warps(const LinearKernelArgs& args) {
  return std::min(kHeldMaxWarps, args.segments);
}

inline bool linear_is_held(const LinearKernelArgs& args, int processors) {
  return held_fits(args.out, HeldLayout(args, kHeldTokens).bytes, held_warps(args) * 32,
                   processors);
}

inline cudaError_t launch_linear_held(const LinearKernelArgs& args, int, cudaStream_t stream) {
  const HeldLayout layout(args, kHeldTokens);
  const cudaError_t e = cudaFuncSetAttribute(
      linear_held_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.bytes);
  if (e != cudaSuccess) return e;
  return launch_overlapped(linear_held_kernel, (args.out + kSliceRows - 1) / kSliceRows,
                           held_warps(args) * 32, static_cast<size_t>(layout.bytes), stream, args);
}

}  // namespace nibble::kernels::cuda
