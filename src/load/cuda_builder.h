// What the parts of the CUDA loader share: the ring, device memory that stays, and small constants
// on their way there. Matrices are loaded in two steps: declaring one hands its reads to the ring
// and keeps what is left to do; place() does that, in the order of declaring. So reading runs ahead
// of allocating and queueing.
#pragma once

#include <deque>
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
  cudaStream_t stream() const { return ring_->stream(); }
  bool compress() const { return plan_.options.scales == plan::Scales::kCsf; }

  /// Device memory that the weights keep.
  Result<std::byte*> keep(int64_t bytes);
  /// Constants in memory that the weights keep; they are there after upload_constants().
  template <typename T>
  Result<const T*> constant(const std::vector<T>& values) {
    NIBBLE_TRY(std::byte * p,
               small(values.data(), static_cast<int64_t>(values.size() * sizeof(T))));
    return reinterpret_cast<const T*>(p);
  }
  /// A vector weight widened to FP32, or null if the checkpoint does not hold it.
  Result<const float*> vector(const recipe::WeightKey& key);
  Result<std::vector<float>> read_vector(const recipe::Weight& weight);

  /// Declare; what `out` points to is filled by place().
  /// A matrix as stored, row-major.
  void rows(const recipe::WeightKey& key, const recipe::Weight& weight, const void** out);
  /// Matrices stacked by rows into one packed linear layer; all of one format.
  Result<void> linear(std::vector<std::pair<recipe::WeightKey, const recipe::Weight*>> stack,
                      const std::vector<recipe::WeightKey>& biases,
                      kernels::cuda::LinearWeight* out);
  /// One group of experts (or a dense MLP: experts {-1}).
  Result<void> experts(int32_t layer, recipe::Role gate, recipe::Role up, recipe::Role down,
                       const std::vector<int32_t>& experts, kernels::cuda::MoeWeights* out);
  /// Things declared so far.
  int64_t declared() const { return declared_; }
  /// Places the first `count` declared things, those not yet placed.
  Result<void> place(int64_t count);

  /// A device int that a packing kernel sets; settle() checks it, under this name.
  int* flags(const std::string& name);
  /// At the end: places what is left; everything queued is done, constants are in place. Errors:
  /// what flags say.
  Result<void> settle();
  void count(int64_t source_bytes);
  void report(bool last) { progress_.report(done_, total_, last); }
  LoadReport finish(int64_t resident);

  std::shared_ptr<CudaWeights> weights = std::make_shared<CudaWeights>();

 private:
  struct Matrix;
  Result<Matrix> enqueue(const recipe::WeightKey& key, const recipe::Weight& weight);
  Result<std::byte*> stage_scales(const Matrix& matrix);
  Result<void> pack_rows(const Matrix& matrix, const kernels::cuda::LinearWeight& whole,
                         int64_t first_row, std::byte* packed, int* bad);
  Result<void> append_factors(const recipe::WeightKey& key, const recipe::Weight& weight,
                              std::vector<float>& factors);

  struct Projection;
  Result<std::byte*> small(const void* data, int64_t bytes);
  Result<void> upload_constants();
  Result<void> enqueue(Projection& p);
  Result<void> stage_scales(Projection& p);
  Result<void> encode(Projection& p, int source);
  Result<void> decide(Projection& p);
  Result<void> pack(Projection& p);
  Result<void> index(Projection& p);
  Result<void> declare(int32_t layer, kernels::cuda::Product product, recipe::Role first,
                       recipe::Role second, const std::vector<int32_t>& experts,
                       kernels::cuda::ExpertMatrices* out);
  Result<kernels::cuda::ExpertMatrices> place(Projection& p);
  void defer(std::function<Result<void>()> step);
  /// Takes the next slot and queues its copy to `to`.
  Result<void> take_to(std::byte* to, int64_t bytes);
  /// Scratch buffers; those of an expert's second source (up) follow those of the first.
  enum Scratch {
    kLinearScales,
    kScales,
    kFixed = kScales + 2,
    kExceptions = kFixed + 2,
    kRowBegin = kExceptions + 2,
    kEncode = kRowBegin + 2,
    kScratchBuffers
  };
  /// One of at least this many bytes, kept between calls; its earlier content may be lost.
  Result<std::byte*> scratch(int which, int64_t bytes);

  const recipe::Recipe& recipe_;
  const plan::CudaPlan& plan_;
  ThreadPool& pool_;
  ProgressMeter progress_;
  std::deque<std::function<Result<void>()>> steps_;  // declared, not yet placed
  int64_t declared_ = 0;
  device::Memory scratch_[kScratchBuffers];
  std::unique_ptr<CudaRing> ring_;  // goes first: then nothing queued uses the memory above
  // Constants collect on the host and travel together: a small copy would wait behind the slots.
  struct Block {
    std::byte* device = nullptr;
    std::vector<std::byte> host;
    int64_t used = 0;
  };
  std::vector<Block> constants_;
  int* flag_block_ = nullptr;  // zeroed ints
  std::vector<std::string> flag_names_;
  std::vector<ScaleReport> scales_;
  int64_t done_ = 0, total_ = 0;
};

}  // namespace nibble::load
