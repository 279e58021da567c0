// The last CTA to arrive at a counter finishes what the others prepared: no second kernel.
#pragma once

namespace nibble::kernels::cuda {

/// True, for all threads of a CTA, in the CTA that is the last of `arrivals`; what the others wrote
/// before is then visible (read it with __ldcg: L1 may hold older bytes). Leaves the counter 0.
/// `flag` is shared memory.
__device__ __forceinline__ bool arrive_last(int* counter, int arrivals, int* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *flag = atomicAdd(counter, 1) == arrivals - 1;
    __threadfence();
    if (*flag) *counter = 0;
  }
  __syncthreads();
  return *flag != 0;
}

}  // namespace nibble::kernels::cuda
