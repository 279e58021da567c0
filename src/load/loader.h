// Runs one plan once: all weights, or one error naming tensor, file and offset. One layer at a
// time, its tensors in parallel; source bytes are read into bounded staging and released before the
// next.
#pragma once

#include <functional>
#include <memory>

#include "base/thread_pool.h"
#include "load/weight_store.h"
#include "plan/plan.h"

namespace nibble::load {

struct LoadProgress {
  int64_t source_bytes_done = 0, source_bytes_total = 0;
  double seconds = 0;
};
/// What became of the scales of one projection of one layer under plan::Scales::kCsf.
struct ScaleReport {
  int32_t layer = 0;
  recipe::Role role = recipe::Role::kExpertGate;
  int64_t planes = 0, plain_bytes = 0, csf_bytes = 0, exceptions = 0;
  bool compressed() const { return csf_bytes < plain_bytes; }
};
/// Bytes that scales take as tiles: streams, exceptions and their index.
int64_t csf_resident_bytes(const codec::CsfTiles& tiles);

struct LoadReport {
  int64_t source_bytes = 0, resident_bytes = 0;
  std::vector<ScaleReport> scales;  // one per layer and projection that could be compressed
  int64_t staging_peak_bytes = 0;   // measured, of the staging buffers
  double seconds = 0;
};
struct LoadedWeights {
  std::shared_ptr<const WeightStore> store;
  LoadReport report;
};

/// `progress` may be empty; it is called from the calling thread, at most some ten times a second.
Result<LoadedWeights> load_weights(const recipe::Recipe& recipe, const plan::PrecisionPlan& plan,
                                   ThreadPool& pool,
                                   const std::function<void(const LoadProgress&)>& progress);

}  // namespace nibble::load
