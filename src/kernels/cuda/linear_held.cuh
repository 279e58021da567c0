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

/// Shared memory: barriers, weights, sums.
struct HeldLayout {
  int weights, parts, bytes;
  NIBBLE_HD explicit HeldLayout(const LinearKernelArgs& args)
      : weights((args.segments * 8 + 127) / 128 * 128),
        parts(weights + args.chunk_count * linear_tile_bytes(FormatId::kBf16) / kSlicesPerBlock),
        bytes(parts + args.segments * kSliceRows * kHeldTokens * 4) {}
};

extern __shared__ __align__(128) uint8_t held_smem[];

__global__ void __launch_bounds__(kHeldMaxWarps * 32, 2)
    linear_held_kernel(const __grid_constant__ LinearKernelArgs args) {
#if defined(NIBBLE_HAS_BULK_COPY)
  constexpr int kTile = linear_tile_bytes(FormatId::kBf16), kPiece = kTile / kSlicesPerBlock;
  constexpr int kChunks = kLinearSegmentChunks;
  const HeldLayout at(args);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = uniform(thread / 32), warps = threads / 32;
  const int slice = static_cast<int>(blockIdx.x);
  const uint32_t smem = smem_address(held_smem);
  allow_next_kernel();
  if (lane == 0) {  // a warp waits for its own segments alone: no barrier of the CTA
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
        bulk_load_streaming(smem + static_cast<uint32_t>(at.weights + c * kPiece),
                            from + static_cast<int64_t>(c) * kTile, kPiece, smem + 8 * s, policy);
      }
    }
  }
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
        const auto* words =
            reinterpret_cast<const uint4*>(held_smem + at.weights + (s * kChunks + i) * kPiece) +
            lane;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint4 w = words[32 * j], v = x.v[i][0][j / 2];
          const uint32_t a[4] = {w.x, w.y, w.z, w.w};
          mma_m16n8k16(acc, a, j % 2 == 0 ? v.x : v.z, j % 2 == 0 ? v.y : v.w);
        }
      }
      float* out = parts + s * kSliceRows * kHeldTokens + lane / 4 * 2;
      const int column = lane % 4 * 2;
      *reinterpret_cast<float2*>(out + column * kSliceRows) = make_float2(acc[0], acc[2]);
      *reinterpret_cast<float2*>(out + (column + 1) * kSliceRows) = make_float2(acc[1], acc[3]);
    }
    __syncthreads();
    for (int o = thread; o < outputs; o += threads) {
      float sum = 0.0f;
#pragma unroll 8
      for (int s = 0; s < args.segments; ++s) {
        sum = __fadd_rn(sum, parts[s * kSliceRows * kHeldTokens + o]);
      }
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

inline int held_warps(const LinearKernelArgs& args) {
  return std::min(kHeldMaxWarps, args.segments);
}

/// Whether all CTAs of the product can be on the GPU at once.
inline bool linear_is_held(const LinearKernelArgs& args, int processors) {
  constexpr int kProcessorBytes = 228 * 1024, kMaxBytes = 227 * 1024, kReserved = 1024;
  const int bytes = HeldLayout(args).bytes, threads = held_warps(args) * 32;
  if (bytes > kMaxBytes) return false;
  const int ctas = std::min({kProcessorBytes / (bytes + kReserved),
                             65536 / (threads * kHeldMaxRegisters), 2048 / threads});
  return (args.out + kSliceRows - 1) / kSliceRows <= processors * ctas;
}

inline cudaError_t launch_linear_held(const LinearKernelArgs& args, int, cudaStream_t stream) {
  const HeldLayout layout(args);
  return launch_overlapped(linear_held_kernel, (args.out + kSliceRows - 1) / kSliceRows,
                           held_warps(args) * 32, static_cast<size_t>(layout.bytes), stream, args);
}

}  // namespace nibble::kernels::cuda
