// Launching kernels with programmatic dependent launch: a kernel may start while the one before it
// drains, and waits inside (wait_for_previous_kernel) before it touches memory.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace nibble::kernels::cuda {

template <typename... Params, typename... Args>
cudaError_t launch_overlapped(void (*kernel)(Params...), int grid, int threads, size_t smem,
                              cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
}

/// The same in clusters of `cluster` CTAs; grid is a multiple of it. From Hopper on.
template <typename... Params, typename... Args>
cudaError_t launch_overlapped_clusters(void (*kernel)(Params...), int grid, int cluster,
                                       int threads, size_t smem, cudaStream_t stream,
                                       Args&&... args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...);
}

}  // namespace nibble::kernels::cuda
