// Loads a checkpoint to one NVIDIA GPU: one projection of one layer after the other through a
// bounded ring (cuda_ring.h), repacked on the device into the kernels' layout, with scales
// compressed there if the plan says so. Reads are listed one layer ahead; host memory never holds
// more than the ring.
#pragma once

#include <functional>
#include <memory>

#include "base/thread_pool.h"
#include "load/cuda_weights.h"
#include "load/loader.h"
#include "plan/cuda_plan.h"

namespace nibble::load {

struct LoadedCudaWeights {
  std::shared_ptr<const CudaWeights> weights;
  LoadReport report;
};

/// To the GPU `device`. Errors: those of reading and scale checks, kResourceExhausted (device
/// memory), kUnsupported (scales that the kernels cannot take), kDeviceLost.
Result<LoadedCudaWeights> load_cuda_weights(
    const recipe::Recipe& recipe, const plan::CudaPlan& plan, int device, ThreadPool& pool,
    const std::function<void(const LoadProgress&)>& progress);

}  // namespace nibble::load
