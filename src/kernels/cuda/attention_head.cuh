// One head of q, k or v by one warp: RMSNorm, RoPE, conversion to the page format. Shared by the
// prepare kernel and the decode kernel that prepares its own row, so that both give the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/attention.h"

namespace nibble::kernels::cuda {

/// 1 / RMS of a head of n dims. sum: the lane's squares of dims lane, lane + 32, .. in this order.
__device__ __forceinline__ float head_inverse(float sum, int n, float eps) {
  for (int d = 16; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  const float mean = __fdiv_rn(sum, static_cast<float>(n));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}
__device__ __forceinline__ float norm_value(float x, float inverse, float weight) {
  return __fmul_rn(__fmul_rn(x, inverse), weight);
}

/// x [n] in shared memory, changed in place; one order of summation.
__device__ __forceinline__ void norm_head(float* x, const float* weight, int n, float eps,
                                          int lane) {
  float sum = 0.0f;
  for (int d = lane; d < n; d += 32) sum = __fmaf_rn(x[d], x[d], sum);
  const float inverse = head_inverse(sum, n, eps);
  for (int d = lane; d < n; d += 32) x[d] = norm_value(x[d], inverse, weight[d]);
  __syncwarp();
}

/// Cosine and sine of a pair at `position`.
__device__ __forceinline__ float2 rope_angle(const AttentionPrepareArgs& args, int position,
                                             float inv_freq) {
  float sine, cosine;
  sincosf(__fmul_rn(static_cast<float>(position), inv_freq), &sine, &cosine);
  return make_float2(__fmul_rn(cosine, args.rope_scale), __fmul_rn(sine, args.rope_scale));
}

__device__ __forceinline__ void rotate_pair(const AttentionPrepareArgs& args, float* x, int i,
                                            float2 angle) {
  const int half = static_cast<int>(args.rotary_dim / 2);
  const int first = args.interleaved ? 2 * i : i;
  const int second = args.interleaved ? 2 * i + 1 : half + i;
  const float a = x[first], b = x[second];
  x[first] = __fsub_rn(__fmul_rn(a, angle.x), __fmul_rn(b, angle.y));
  x[second] = __fadd_rn(__fmul_rn(b, angle.x), __fmul_rn(a, angle.y));
}

/// Two values in the page format, at their place in row `position` (0..63) of `plane`.
__device__ __forceinline__ void write_page_pair(const KvCache& cache, std::byte* plane,
                                                int position, int dim, float a, float b) {
  std::byte* to = plane + cache.element_offset(position, dim);
  if (cache.format == KvFormat::kBf16) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
  } else {
    *reinterpret_cast<__nv_fp8x2_storage_t*>(to) =
        __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  }
}

}  // namespace nibble::kernels::cuda
