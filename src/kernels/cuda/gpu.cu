#include <cuda_runtime_api.h>

#include "kernels/cuda/gpu.h"

namespace nibble::kernels::cuda {

Result<Gpu> current_gpu() {
  int shared = 0;
  Gpu gpu;
  cudaError_t e = cudaGetDevice(&gpu.index);
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrComputeCapabilityMajor, &gpu.major},
                {cudaDevAttrMultiProcessorCount, &gpu.processors},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared}};
  for (const auto& w : wanted) {
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(w.value, w.attribute, gpu.index);
  }
  if (e != cudaSuccess) return Error(Code::kInternal, cat("device: ", cudaGetErrorString(e)));
  gpu.shared_bytes = shared;
  return gpu;
}

}  // namespace nibble::kernels::cuda
