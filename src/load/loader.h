// Runs one plan once: all weights, or one error naming tensor, file and offset. One layer at a
// time, its tensors in parallel; source bytes are read into bounded staging and released before the
// next.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "base/thread_pool.h"
#include "load/scale_compression.h"
#include "load/weight_store.h"
#include "plan/plan.h"

namespace nibble::load {

struct LoadProgress {
  int64_t source_bytes_done = 0, source_bytes_total = 0;
  double seconds = 0;
};
/// When a load began, and who is told how far it is: at most some ten times a second.
class ProgressMeter {
 public:
  explicit ProgressMeter(const std::function<void(const LoadProgress&)>& progress)
      : progress_(progress) {}
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  /// Tells it; `last`: however soon after the time before.
  void report(int64_t done, int64_t total, bool last) {
    if (!progress_) return;
    const auto now = std::chrono::steady_clock::now();
    if (!last && now - reported_ < std::chrono::milliseconds(100)) return;
    reported_ = now;
    progress_({done, total, seconds()});
  }

 private:
  const std::function<void(const LoadProgress&)>& progress_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point reported_ = start_;
};
struct LoadReport {
  int64_t source_bytes = 0, resident_bytes = 0;
  std::vector<ScaleReport> scales;  // one per layer and projection that could be compressed
  int64_t staging_peak_bytes = 0;   // measured, of the staging buffers
  double seconds = 0;
  double reading_seconds = 0;  // GPU only: part of `seconds` in which files were read
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
