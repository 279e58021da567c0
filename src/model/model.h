// A model graph for one rank: queues one step's ops and leaves logits in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/result.h"
#include "device/memory.h"
#include "kernels/attention/kv_pages.h"
#include "kernels/exec.h"
#include "load/weight_store.h"
#include "recipe/recipe.h"

namespace nibble::model {

/// How one token is drawn from one row of logits; the meaning is runtime/sampler.h's, without
/// penalties.
struct RowSampling {
  float temperature = 0.0f;  // 0: greedy, lowest id among equals
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  int32_t top_k = 0;         // 0: off
  uint64_t seed = 0;
  uint64_t draw = 0;  // number of the draw under this seed
};

/// One ragged batch: rows of prefill chunks and decode rows mixed.
struct StepInput {
  /// [rows], each in [0, vocab), or for start() -1 - i: what the step before draws for its
  /// logit_rows[i].
  std::span<const int32_t> tokens;
  std::span<const kernels::SequenceRows> sequences;  // cover the rows in order, without gaps
  std::span<const int32_t> logit_rows;               // rows whose logits are wanted, ascending
};
/// What an inspection of the inside wants beside the logits, for every row of the step; any may be
/// null. Copies only: the computation does not change.
struct StepTaps {
  float* hidden = nullptr;        // [layers + 1, rows, hidden]: embedding, then each layer's output
  int32_t* topk_ids = nullptr;    // [layers, rows, top_k]; layers without a router are left alone
  float* topk_weights = nullptr;  // beside topk_ids
};
struct StepOutput {
  float* logits = nullptr;        // [logit_rows.size(), vocab]
  float* final_hidden = nullptr;  // [logit_rows.size(), hidden] after the final norm, or null
  StepTaps taps;
};
/// What a step drew, for each of its logit rows.
struct Draws {
  std::span<const int32_t> tokens;  // -1: no distribution
  std::span<const float> logprobs;  // of the unfiltered distribution
};

/// What forward() must be ready for.
struct StepLimits {
  int64_t max_rows = 0, max_logit_rows = 0, max_sequences = 0, max_context = 0;
};
/// Where a model computes; its pages lie there, its inputs and outputs always on the host.
enum class Place : uint8_t { kHost, kCuda };

class Model {
 public:
  virtual ~Model() = default;
  virtual const recipe::ModelConfig& config() const = 0;
  virtual Place place() const { return Place::kHost; }
  /// Pages of this shape are what forward() wants.
  virtual kernels::KvGeometry kv_geometry(kernels::Activations activations) const = 0;
  /// Memory for them. Errors: kResourceExhausted.
  virtual Result<device::Memory> allocate_pages(int64_t bytes) {
    return device::Memory::host(bytes);
  }
  /// Host scratch that forward() takes from exec.workspace.
  virtual int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows, int threads) const = 0;
  /// Called once before the first forward(): takes whatever else steps of these extents need.
  virtual Result<void> prepare(const StepLimits&) { return {}; }
  /// One step; the outputs are on the host when it returns. No lock, no global; one step at a time.
  /// A row's logits do not depend on the other rows, on how its sequence was cut into steps, or on
  /// threads. Errors: kDeviceLost (a GPU failed: no further step can run).
  virtual Result<void> forward(const kernels::Exec& exec, const StepInput& input,
                               const kernels::KvPages& pages, const StepOutput& output) = 0;

  /// Whether the model draws tokens itself: then steps whose logits nobody wants go by start() and
  /// finish(), and the next may be queued before the last one's tokens are known here.
  virtual bool samples() const { return false; }
  /// Queues a step behind the one under way, if there is one (at most one; none under way when
  /// forward() is called). `sampling`: how the token after each of logit_rows is drawn. Nothing of
  /// the input is read after it returns. Errors as forward().
  virtual Result<void> start(const kernels::Exec&, const StepInput&,
                             std::span<const RowSampling> /*sampling*/, const kernels::KvPages&) {
    return Error(Code::kUnsupported, "this model draws no tokens");
  }
  /// Waits for the oldest step under way; its draws, which stay there until the next start().
  /// Errors as forward().
  virtual Result<Draws> finish() { return Error(Code::kUnsupported, "this model draws no tokens"); }
};

/// Scratch that forward() takes at most for steps of these extents. From the config alone, so that
/// a plan can print it before anything is loaded.
int64_t workspace_bytes(const recipe::ModelConfig& config, int64_t max_rows, int64_t max_logit_rows,
                        int threads);

/// Errors: kUnsupported for a family without a graph (with the list of those that have one).
Result<std::unique_ptr<Model>> make_model(const recipe::ModelConfig& config,
                                          std::shared_ptr<const load::WeightStore> weights);

}  // namespace nibble::model
