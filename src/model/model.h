// A model graph for one rank: queues one step's ops and leaves logits in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/result.h"
#include "kernels/attention/kv_pages.h"
#include "kernels/exec.h"
#include "load/weight_store.h"
#include "recipe/recipe.h"

namespace nibble::model {

/// One ragged batch: rows of prefill chunks and decode rows mixed.
struct StepInput {
  std::span<const int32_t> tokens;                   // [rows], each in [0, vocab)
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

class Model {
 public:
  virtual ~Model() = default;
  virtual const recipe::ModelConfig& config() const = 0;
  /// Pages of this shape are what forward() wants.
  virtual kernels::KvGeometry kv_geometry(kernels::Activations activations) const = 0;
  virtual int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows, int threads) const = 0;
  /// No allocation, lock or global. A row's logits do not depend on the other rows, on how its
  /// sequence was cut into steps, or on threads.
  virtual void forward(const kernels::Exec& exec, const StepInput& input,
                       const kernels::KvPages& pages, const StepOutput& output) const = 0;
};

/// Scratch that forward() takes at most for steps of these extents. From the config alone, so that
/// a plan can print it before anything is loaded.
int64_t workspace_bytes(const recipe::ModelConfig& config, int64_t max_rows, int64_t max_logit_rows,
                        int threads);

/// Errors: kUnsupported for a family without a graph (with the list of those that have one).
Result<std::unique_ptr<Model>> make_model(const recipe::ModelConfig& config,
                                          std::shared_ptr<const load::WeightStore> weights);

}  // namespace nibble::model
