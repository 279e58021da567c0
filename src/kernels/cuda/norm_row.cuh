// RMSNorm of one row by one CTA: the arithmetic and the order of summation, which depend on the
// hidden size alone. Shared by the norm kernel and by the router that norms its own row.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

constexpr int kMaxNormThreads = 512;

/// Threads that a row is dealt to, one float4 each in turn.
NIBBLE_HD constexpr int norm_threads(int quads) {
  const int threads = (quads + 31) / 32 * 32;
  return threads < kMaxNormThreads ? threads : kMaxNormThreads;
}

/// Sum over the CTA's first `warps` warps in one order: lanes by halving, then warps by halving.
__device__ __forceinline__ float block_sum(float v, int warps, float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  v = lane < warps ? shared[lane] : 0.0f;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

__device__ __forceinline__ float4 add4(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                     __fadd_rn(a.w, b.w));
}
__device__ __forceinline__ float add_squares(float sum, const float4& v) {
  sum = __fmaf_rn(v.x, v.x, sum);
  sum = __fmaf_rn(v.y, v.y, sum);
  sum = __fmaf_rn(v.z, v.z, sum);
  return __fmaf_rn(v.w, v.w, sum);
}
__device__ __forceinline__ float inverse_norm(float sum, int64_t hidden, float eps) {
  const float mean = __fdiv_rn(sum, static_cast<float>(hidden));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}
__device__ __forceinline__ float4 scale4(const float4& x, float inverse, const float4& weight) {
  return make_float4(
      __fmul_rn(__fmul_rn(x.x, inverse), weight.x), __fmul_rn(__fmul_rn(x.y, inverse), weight.y),
      __fmul_rn(__fmul_rn(x.z, inverse), weight.z), __fmul_rn(__fmul_rn(x.w, inverse), weight.w));
}
__device__ __forceinline__ uint2 bf16_quad(const float4& v) {
  const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  return *reinterpret_cast<const uint2*>(pair);
}

}  // namespace nibble::kernels::cuda
