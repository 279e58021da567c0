// A checkpoint on an NVIDIA GPU. In a build without CUDA the function says so (cuda_model_none.cc).
#pragma once

#include <iosfwd>
#include <memory>

#include "base/thread_pool.h"
#include "device/cuda.h"
#include "load/loader.h"
#include "model/model.h"
#include "plan/plan.h"
#include "recipe/recipe.h"

namespace nibble::cli {

struct CudaModel {
  std::unique_ptr<model::Model> model;
  load::LoadReport report;
  int64_t planned_bytes = 0;         // device memory of the weights
  int64_t host_staging_bytes = 0;    // page-locked, while loading
  int64_t device_staging_bytes = 0;  // beside the weights, while loading
  int64_t max_context = 0;           // as planned
};

/// Plans, loads and makes the graph. Errors: those of the plan (kUnsupported: a weight without a
/// CUDA kernel) and of loading.
Result<CudaModel> load_cuda_model(const recipe::Recipe& recipe, const plan::PlanOptions& options,
                                  kernels::KvType kv, const device::CudaDevice& device,
                                  ThreadPool& pool,
                                  const std::function<void(const load::LoadProgress&)>& progress);

}  // namespace nibble::cli
