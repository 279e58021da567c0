// Launching kernels with programmatic dependent launch: a kernel may start while the one before it
// drains, and waits inside (wait_for_previous_kernel) before it touches memory.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace nibble::kernels::cuda {

/// For __launch_bounds__(this, 2): 48 registers a thread, so that 512 threads find room beside the
/// experts' kernel (moe_few_stream.cuh).
constexpr int kThreadsFor48Registers = 640;

/// Lets a kernel have `smem` bytes of dynamic shared memory a CTA, and clusters of `cluster` CTAs.
/// Launching asks for it.
template <typename... Params>
cudaError_t permit(void (*kernel)(Params...), int cluster, size_t smem) {
  constexpr int kPortableCluster = 8;
  cudaError_t e = cudaSuccess;
  if (smem > 0) {
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(smem));
  }
  if (e == cudaSuccess && cluster > kPortableCluster) {
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return e;
}

/// In clusters of `cluster` CTAs (from Hopper on; grid is a multiple of it), or 0: without.
template <typename... Params, typename... Args>
cudaError_t launch_overlapped_clusters(void (*kernel)(Params...), int grid, int cluster,
                                       int threads, size_t smem, cudaStream_t stream,
                                       Args&&... args) {
  if (const cudaError_t e = permit(kernel, cluster, smem); e != cudaSuccess) return e;
  cudaLaunchAttribute attributes[3];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  // A processor cuts its memory into cache and shared memory anew only when it is idle: with as
  // little shared memory as this kernel needs, the next could not start beside it.
  attributes[1].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attributes[1].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  attributes[2].id = cudaLaunchAttributeClusterDimension;
  attributes[2].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[2].val.clusterDim.y = attributes[2].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 0 ? 3 : 2;
  return cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
}

/// Clusters of `cluster` CTAs with `smem` bytes each that run at once on the GPU; 0: none can.
template <typename... Params>
int active_clusters(void (*kernel)(Params...), int cluster, int threads, size_t smem) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int active = 0;
  const bool answered = permit(kernel, cluster, smem) == cudaSuccess &&
                        cudaOccupancyMaxActiveClusters(&active, kernel, &config) == cudaSuccess;
  if (answered) return active;
  cudaGetLastError();  // an answer: the next call that asks for errors should not see it
  return 0;
}

template <typename... Params, typename... Args>
cudaError_t launch_overlapped(void (*kernel)(Params...), int grid, int threads, size_t smem,
                              cudaStream_t stream, Args&&... args) {
  return launch_overlapped_clusters(kernel, grid, 0, threads, smem, stream,
                                    std::forward<Args>(args)...);
}

}  // namespace nibble::kernels::cuda
