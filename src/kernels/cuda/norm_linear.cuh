// Residual addition, RMSNorm and the dense product of very few rows in one kernel, where the whole
// matrix fits the GPU's shared memory at once: every CTA norms the rows itself and multiplies them
// with the 16 weight rows that it holds. Same order of sums as the norm kernel and linear_held.cuh.
//
// A thread holds two float4 of a row. Where the norm kernel's threads hold one, a CTA has half as
// many: thread t is there t and t + threads, a warp two warps. Otherwise it has as many.
#pragma once

#include "kernels/cuda/linear_held.cuh"
#include "kernels/cuda/norm_row.cuh"

namespace nibble::kernels::cuda {

constexpr int kNormLinearQuads = 2;  // float4 of a row that a thread holds
constexpr int kMaxNormWarps = kMaxNormThreads / 32;
static_assert(kMaxNormLinearCols <= 4 * kMaxNormThreads * kNormLinearQuads);

/// Warps of a CTA; no fewer than segments.
NIBBLE_HD constexpr int norm_linear_warps(int cols) {
  const int norm_warps = norm_threads(cols / 4) / 32;
  return cols / 4 > kMaxNormThreads ? norm_warps : (norm_warps + 1) / 2;
}
static_assert(norm_linear_warps(kMaxNormLinearCols) <= kHeldMaxWarps);
static_assert(64 * 4 == kLinearSegmentChunks * kTileCols);  // 2 x 32 float4: a segment

/// One normed row in shared memory: whole chunks, and 16 bytes so that two rows' units of 32 bytes
/// meet no bank twice.
NIBBLE_HD constexpr int norm_linear_row_bytes(int chunk_count) {
  return chunk_count * kTileCols * 2 + 16;
}
NIBBLE_HD inline HeldLayout norm_linear_layout(const LinearKernelArgs& args, int rows) {
  return HeldLayout(args, rows, rows * norm_linear_row_bytes(args.chunk_count));
}

#if defined(NIBBLE_HAS_BULK_COPY)
/// The thread's float4 of every row; zeros behind the last column.
template <int kRows>
__device__ __forceinline__ void load_rows(const float* from, int quads,
                                          float4 (&x)[kRows][kNormLinearQuads]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kNormLinearQuads; ++i) {
      const int at = static_cast<int>(threadIdx.x + i * blockDim.x);
      x[r][i] = at < quads ? reinterpret_cast<const float4*>(from)[r * quads + at]
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}
/// The same of residual + delta, all on their way at once.
template <int kRows>
__device__ __forceinline__ void load_sums(const NormRowsArgs& norm, int quads,
                                          float4 (&x)[kRows][kNormLinearQuads]) {
  load_rows<kRows>(norm.residual, quads, x);
  if (norm.delta == nullptr) return;
  float4 delta[kRows][kNormLinearQuads];
  load_rows<kRows>(norm.delta, quads, delta);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kNormLinearQuads; ++i) x[r][i] = add4(x[r][i], delta[r][i]);
  }
}

/// 1 / norm of every row; `sums`: kMaxNormWarps floats a row. The norm kernel has `norm_warps`.
template <int kRows>
__device__ __forceinline__ void inverse_norms(const float4 (&x)[kRows][kNormLinearQuads], int cols,
                                              float eps, float* sums, float (&inverse)[kRows]) {
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int norm_warps = norm_threads(cols / 4) / 32;
  const bool two = norm_warps > warps;  // the thread's second float4 is another thread's there
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float first = add_squares(0.0f, x[r][0]);
    const float second = add_squares(two ? 0.0f : first, x[r][1]);
    const float low = lane_sum(two ? first : second), high = lane_sum(second);
    if (threadIdx.x % 32 != 0) continue;
    sums[r * kMaxNormWarps + warp] = low;
    if (two) sums[r * kMaxNormWarps + warps + warp] = high;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    inverse[r] = inverse_norm(warp_sum(sums + r * kMaxNormWarps, norm_warps), cols, eps);
  }
}

/// A warp's segment of x from the normed rows, as WarpTokens has it.
template <int kRows>
__device__ __forceinline__ void load_normed(const uint8_t* rows, int chunk, int chunk_count,
                                            int lane, uint4 (&x)[kLinearSegmentChunks][2]) {
  const int g = lane / 4, t = lane % 4;
  const uint8_t* from = rows + g * norm_linear_row_bytes(chunk_count) + 32 * t;
#pragma unroll
  for (int i = 0; i < kLinearSegmentChunks; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[i][h] = make_uint4(0, 0, 0, 0);
      if (g >= kRows || chunk + i >= chunk_count) continue;
      x[i][h] = *reinterpret_cast<const uint4*>(from + (chunk + i) * kTileCols * 2 + 16 * h);
    }
  }
}
#endif

template <int kRows>
__global__ void __launch_bounds__(kHeldMaxWarps * 32, 2)
    norm_linear_kernel(const __grid_constant__ LinearKernelArgs args,
                       const __grid_constant__ NormRowsArgs norm) {
#if defined(NIBBLE_HAS_BULK_COPY)
  static_assert(kRows <= 2);  // lanes with t = 0 have the products of two rows
  constexpr int kChunks = kLinearSegmentChunks;
  const HeldLayout at = norm_linear_layout(args, kRows);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = uniform(thread / 32);
  const int slice = static_cast<int>(blockIdx.x), quads = args.cols / 4;
  const uint32_t smem = smem_address(held_smem);
  float* parts = reinterpret_cast<float*>(held_smem + at.parts);  // first the norm's sums
  uint8_t* rows = held_smem + at.parts + args.segments * kSliceRows * kRows * 4;
  const int row_bytes = norm_linear_row_bytes(args.chunk_count);
  allow_next_kernel();
  if (lane == 0) copy_held_weights(args, slice, smem, at.weights, warp, threads / 32);
  __syncwarp();
  float4 weight[kNormLinearQuads];
#pragma unroll
  for (int i = 0; i < kNormLinearQuads; ++i) {
    const int quad = thread + i * threads;
    if (quad < quads) weight[i] = reinterpret_cast<const float4*>(norm.weight)[quad];
  }
  const int row = slice * kSliceRows + thread % kSliceRows, token = thread / kSliceRows;
  const bool has_output = row < args.out && token < kRows;
  const float factor = has_output && args.factor != nullptr ? __ldg(args.factor + row) : 1.0f;
  const float bias = has_output && args.bias != nullptr ? __ldg(args.bias + row) : 0.0f;
  if (token < kRows && args.cols / 8 + thread % kSliceRows < args.chunk_count * kTileCols / 8) {
    reinterpret_cast<uint4*>(rows + token * row_bytes)[args.cols / 8 + thread % kSliceRows] =
        make_uint4(0, 0, 0, 0);
  }
  wait_for_previous_kernel();

  float4 x[kRows][kNormLinearQuads];
  load_sums<kRows>(norm, quads, x);
  float* y = args.y + token * args.y_stride + row;
  const float before = args.accumulate && has_output ? *y : 0.0f;
  float inverse[kRows];
  inverse_norms<kRows>(x, args.cols, norm.eps, parts, inverse);
  const bool stores_sum = norm.residual_out != nullptr && blockIdx.x == gridDim.x - 1;  // one CTA
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kNormLinearQuads; ++i) {
      const int quad = thread + i * threads;
      if (quad >= quads) continue;
      reinterpret_cast<uint2*>(rows + r * row_bytes)[quad] =
          bf16_quad(scale4(x[r][i], inverse[r], weight[i]));
      if (stores_sum) reinterpret_cast<float4*>(norm.residual_out)[r * quads + quad] = x[r][i];
    }
  }
  __syncthreads();

  if (warp < args.segments) {
    uint4 v[kChunks][2];
    load_normed<kRows>(rows, warp * kChunks, args.chunk_count, lane, v);
    mbarrier_wait(smem + 8 * warp, 0);
    float acc[4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (warp * kChunks + i >= args.chunk_count) break;
      multiply_held(held_smem + at.weights, warp * kChunks + i, v[i], lane, acc);
    }
    if (lane % 4 == 0) {
      float* out = parts + warp * kSliceRows * kRows + lane / 4 * 2;
      *reinterpret_cast<float2*>(out) = make_float2(acc[0], acc[2]);
      if (kRows > 1) *reinterpret_cast<float2*>(out + kSliceRows) = make_float2(acc[1], acc[3]);
    }
  }
  __syncthreads();
  if (!has_output) return;
  *y = finish_sum(sum_segments(parts, args.segments, kRows, thread), args.factor != nullptr, factor,
                  args.bias != nullptr, bias, args.accumulate, before);
#endif
}

inline bool norm_linear_is_held(const LinearKernelArgs& args, int processors) {
  return args.rows <= kNormLinearRows && args.cols <= kMaxNormLinearCols &&
         held_fits(args.out, norm_linear_layout(args, args.rows).bytes,
                   norm_linear_warps(args.cols) * 32, processors);
}

inline cudaError_t launch_norm_linear(const LinearKernelArgs& args, const NormRowsArgs& norm,
                                      cudaStream_t stream) {
  static_assert(kNormLinearRows == 2);
  const auto kernel = args.rows == 1 ? norm_linear_kernel<1> : norm_linear_kernel<2>;
  const int bytes = norm_linear_layout(args, args.rows).bytes;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  return launch_overlapped(kernel, (args.out + kSliceRows - 1) / kSliceRows,
                           norm_linear_warps(args.cols) * 32, static_cast<size_t>(bytes), stream,
                           args, norm);
}

}  // namespace nibble::kernels::cuda
