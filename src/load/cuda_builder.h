// What the parts of the CUDA loader share: the ring, device memory that stays, and small constants
// on their way there.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "load/cuda_ring.h"
#include "load/cuda_weights.h"
#include "load/loader.h"
#include "plan/cuda_plan.h"

namespace nibble::load {

class CudaBuilder {
 public:
  CudaBuilder(const recipe::Recipe& recipe, const plan::CudaPlan& plan, ThreadPool& pool,
              const std::function<void(const LoadProgress&)>& progress)
      : recipe_(recipe), plan_(plan), pool_(pool), progress_(progress) {}

  Result<void> open();
  const recipe::Recipe& recipe() const { return recipe_; }
  CudaRing& ring() { return *ring_; }
  cudaStream_t stream() const { return ring_->stream(); }
  bool compress() const { return plan_.options.scales == plan::Scales::kCsf; }

  /// Device memory that the weights keep.
  Result<std::byte*> keep(int64_t bytes);
  /// Constants, copied at once into memory that the weights keep.
  template <typename T>
  Result<const T*> constant(const std::vector<T>& values) {
    NIBBLE_TRY(std::byte * p,
               small(values.data(), static_cast<int64_t>(values.size() * sizeof(T))));
    return reinterpret_cast<const T*>(p);
  }
  /// A vector weight widened to FP32, or null if the checkpoint does not hold it.
  Result<const float*> vector(const recipe::WeightKey& key);
  Result<std::vector<float>> read_vector(const recipe::Weight& weight);

  /// A matrix as stored, row-major.
  Result<const std::byte*> rows(const recipe::WeightKey& key, const recipe::Weight& weight);
  /// Matrices stacked by rows into one packed linear layer; all of one format.
  Result<kernels::cuda::LinearWeight> linear(
      const std::vector<std::pair<recipe::WeightKey, const recipe::Weight*>>& stack,
      const std::vector<recipe::WeightKey>& biases);
  /// One group of experts (or a dense MLP: experts {-1}).
  Result<kernels::cuda::MoeWeights> experts(int32_t layer, recipe::Role gate, recipe::Role up,
                                            recipe::Role down, const std::vector<int32_t>& experts);

  /// A device int that a packing kernel sets; checked at the end, under this name.
  Result<int*> flags(const std::string& name);
  Result<void> check_flags();
  void count(int64_t source_bytes);
  void report(bool last);
  LoadReport finish(int64_t resident);

  std::shared_ptr<CudaWeights> weights = std::make_shared<CudaWeights>();

 private:
  struct Projection;
  Result<std::byte*> small(const void* data, int64_t bytes);
  Result<void> stage_scales(Projection& p);
  Result<void> encode(Projection& p, int source);
  Result<void> decide(Projection& p);
  Result<void> pack(Projection& p);
  Result<void> index(Projection& p);
  Result<kernels::cuda::ExpertMatrices> projection(int32_t layer, kernels::cuda::Product product,
                                                   recipe::Role first, recipe::Role second,
                                                   const std::vector<int32_t>& experts);
  /// Scratch of at least this many bytes, kept between calls; its earlier content may be lost.
  Result<std::byte*> scratch(int which, int64_t bytes);

  const recipe::Recipe& recipe_;
  const plan::CudaPlan& plan_;
  ThreadPool& pool_;
  const std::function<void(const LoadProgress&)>& progress_;
  std::unique_ptr<CudaRing> ring_;
  device::Memory scratch_[12];
  std::byte* block_ = nullptr;  // of constants
  int64_t block_left_ = 0;
  std::vector<std::pair<std::string, int*>> flags_;
  std::vector<ScaleReport> scales_;
  int64_t done_ = 0, total_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(),
                                        reported_ = start_;
};

}  // namespace nibble::load
