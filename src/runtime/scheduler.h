// What the next step computes: pure and deterministic, events in, one batch out. It knows lengths
// and pages, never tokens or a device, and no decision depends on time, so it takes no clock.
//
// Policy: requests are admitted first come, first served, and only when all pages they can ever
// need are free (prompt + max_tokens), so no step runs out and nothing is ever evicted. A step
// first gives every sequence that decodes its one row, then fills up with prompt chunks, oldest
// sequence first. At most min(max_sequences, max_batch_tokens, max_logit_rows) sequences run, so a
// step with prompts left always has a row, and a logit row, for the oldest of them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/result.h"
#include "runtime/page_allocator.h"

namespace nibble::runtime {

/// All >= 1; in the terms of EngineOptions.
struct SchedulerLimits {
  int64_t pages = 0, page_tokens = 0;
  int64_t max_sequences = 0, max_batch_tokens = 0, max_logit_rows = 0;
};

struct SequenceNeeds {
  int64_t prompt_tokens = 0;  // >= 1
  int64_t max_tokens = 0;     // >= 0; 0: the sequence ends with its prompt
  bool prompt_logits = false;
};

/// Rows of one sequence in a step: positions [position_begin, position_begin + rows).
struct BatchItem {
  uint64_t id = 0;
  int64_t position_begin = 0, rows = 0;
  int64_t logit_rows = 0;          // the last so many rows want logits: 0, 1, or all
  bool ends_prompt = false;        // the last row is the prompt's last position
  bool samples = false;            // the last row's logits give the sequence's next token
  const int32_t* pages = nullptr;  // as kernels::SequenceRows; valid until the sequence ends
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits);

  /// Errors: kInvalidArgument with both numbers if the pages could never hold it. Reads nothing
  /// that changes, so any thread may ask.
  Result<void> check_fits(const SequenceNeeds& needs) const;
  /// Appends to the waiting; ids are unique. Errors as check_fits.
  Result<void> submit(uint64_t id, const SequenceNeeds& needs);
  /// The sequence has ended (length, stop, cancel, error): its pages are free at once. False if it
  /// neither waits nor runs.
  bool end(uint64_t id);
  /// Admits, builds the next step and counts its rows as computed. After an item that `samples`
  /// the caller either has a token for the next row, or will have it when the step is computed, or
  /// has called end(). A sequence all of whose rows were in a batch is in none, and keeps its
  /// pages, until end(). Empty if there is nothing to compute. Decode rows come first, then prompt
  /// chunks, each oldest first.
  const std::vector<BatchItem>& next();

  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  bool idle() const { return waiting_.empty() && running_.empty(); }
  const PageAllocator& pages() const { return pages_; }

 private:
  struct Sequence {
    uint64_t id = 0;
    SequenceNeeds needs;
    int64_t computed = 0;  // positions whose rows were in a batch
    std::vector<int32_t> pages;
  };
  int64_t pages_for(const SequenceNeeds& needs) const;
  void admit();
  void append(Sequence& sequence, int64_t rows, int64_t logit_rows);

  const SchedulerLimits limits_;
  const int64_t max_running_;
  PageAllocator pages_;
  std::deque<Sequence> waiting_;
  std::vector<Sequence> running_;  // oldest first
  std::vector<BatchItem> batch_;
};

}  // namespace nibble::runtime
