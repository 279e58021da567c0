// Exclusive prefix sums of a short array of counters by one CTA.
#pragma once

#include <cstdint>

namespace nibble::kernels::cuda {

constexpr int kScanThreads = 1024;

/// values[0..n) in place; the total goes to values[n]. Launch one CTA of kScanThreads.
static __global__ void __launch_bounds__(kScanThreads)
    csf_scan_kernel(uint32_t* values, int64_t n) {
  __shared__ uint32_t warp_sums[kScanThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t carry = 0;
  for (int64_t first = 0; first < n; first += 4 * kScanThreads) {
    const int64_t at = first + 4 * threadIdx.x;
    uint32_t v[4], mine = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = at + i < n ? values[at + i] : 0;
      mine += v[i];
    }
    uint32_t sum = mine;
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    uint32_t own = warp_sums[lane];
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, own, d);
      if (lane >= d) own += other;
    }
    const uint32_t total = __shfl_sync(~0u, own, 31);
    uint32_t before = carry + sum - mine;
    if (warp > 0) before += __shfl_sync(~0u, own, warp - 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < n) values[at + i] = before;
      before += v[i];
    }
    carry += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) values[n] = carry;
}

}  // namespace nibble::kernels::cuda
