// Clusters of CTAs: rank, barrier, and stores into another CTA's shared memory. Source: PTX ISA.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {

#if defined(NIBBLE_HAS_BULK_COPY)
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}
/// This cluster's place among the grid's.
__device__ __forceinline__ int cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return static_cast<int>(index);
}
/// The barrier of all threads of the cluster; exited threads count as arrived.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
/// The same without a fence for what was written before, which would wait for all of it: enough to
/// say that a CTA has started, and after mbarrier_init_fence() that its mbarriers are there.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// The place in CTA `rank` of what lies at `address` in this CTA's shared memory.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ __forceinline__ int cluster_load(uint32_t remote) {
  int v;
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(remote) : "memory");
  return v;
}
__device__ __forceinline__ void cluster_store(uint32_t remote, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(v) : "memory");
}
/// Stores and counts the bytes on the mbarrier `bar`, both in the same CTA of the cluster.
__device__ __forceinline__ void cluster_store_async(uint32_t remote, float v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote),
      "f"(v), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void cluster_store_async(uint32_t remote, float2 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          remote),
      "f"(v.x), "f"(v.y), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void cluster_store_async(uint32_t remote, const float4& v,
                                                    uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
      : "memory");
}
#endif

}  // namespace nibble::kernels::cuda
