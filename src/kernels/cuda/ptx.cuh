// The few PTX instructions the kernels use, one function each: mbarriers, the bulk copy engine,
// programmatic launch, acquire and release. Source: PTX ISA 8.x/9.0.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NIBBLE_HAS_BULK_COPY 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NIBBLE_HAS_WGMMA 1
#endif

namespace nibble::kernels::cuda {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/// Arrivals that a barrier expects of a warp.
#if defined(NIBBLE_RACECHECK)
constexpr bool kRacecheck = true;
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr bool kRacecheck = false;
constexpr uint32_t kWarpArrivals = 1;
#endif
/// All lanes of the warp have come here. With NIBBLE_RACECHECK (a build for compute-sanitizer's
/// racecheck, which does not see that one lane arrives for what others did before __syncwarp) every
/// lane arrives.
__device__ __forceinline__ void warp_arrive(uint32_t bar, int lane) {
  __syncwarp();
  if (kRacecheck || lane == 0) mbarrier_arrive(bar);
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// Copies `bytes` (a multiple of 16; both addresses 16-byte aligned) to shared memory and counts
/// them on `bar`.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes,
                                          uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
/// The same for bytes that are read once: they should not push reused data out of the L2.
__device__ __forceinline__ void bulk_load_streaming(uint32_t dst, const void* src, uint32_t bytes,
                                                    uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
/// 16 bytes from global to shared memory.
__device__ __forceinline__ void copy_unit_async(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
/// 8 or 16 bytes from global to shared memory, through the L1.
template <int bytes>
__device__ __forceinline__ void copy_small_async(uint32_t dst, const void* src) {
  static_assert(bytes == 8 || bytes == 16);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(bytes)
               : "memory");
}
/// The same as copy_unit_async; with bytes = 0 the target becomes zero.
__device__ __forceinline__ void copy_unit_async(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
/// The same for bytes that are read once: they should not push reused data out of the L2.
__device__ __forceinline__ void copy_unit_async(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void copy_unit_async(uint32_t dst, const void* src, int bytes,
                                                uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(bytes), "l"(policy)
               : "memory");
}
/// The thread's copies since the last call are one group; waiting leaves `pending` groups running.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
/// The thread arrives at `bar` when its copies so far are there.
__device__ __forceinline__ void arrive_with_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release(int* p, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// Waits until the kernels this one follows have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(NIBBLE_HAS_BULK_COPY)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets the next kernel of the stream start its prologue.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(NIBBLE_HAS_BULK_COPY)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Moves registers between warpgroups. Every warp of the warpgroup must come here.
template <int registers>
__device__ __forceinline__ void grow_registers() {
#if defined(NIBBLE_HAS_WGMMA)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}
template <int registers>
__device__ __forceinline__ void shrink_registers() {
#if defined(NIBBLE_HAS_WGMMA)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
#endif
}

/// Keeps a value in its register: the compiler will not work it out again where it is used.
__device__ __forceinline__ void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }
/// A value that is equal in all lanes, told to the compiler: it may then live in uniform registers.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }

/// Comes to barrier `id` of `threads` threads without waiting there.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Barrier `id` among `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace nibble::kernels::cuda
