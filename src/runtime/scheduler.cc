#include "runtime/scheduler.h"

#include <algorithm>

#include "base/check.h"

namespace nibble::runtime {

Scheduler::Scheduler(const SchedulerLimits& limits)
    : limits_(limits),
      max_running_(
          std::min({limits.max_sequences, limits.max_batch_tokens, limits.max_logit_rows})),
      pages_(limits.pages) {
  NIBBLE_CHECK(limits.pages >= 1 && limits.page_tokens >= 1 && max_running_ >= 1, limits.pages, " ",
               limits.page_tokens, " ", max_running_);
}

int64_t Scheduler::pages_for(const SequenceNeeds& needs) const {
  return (needs.prompt_tokens + needs.max_tokens + limits_.page_tokens - 1) / limits_.page_tokens;
}

Result<void> Scheduler::check_fits(const SequenceNeeds& needs) const {
  const int64_t capacity = limits_.pages * limits_.page_tokens;
  if (needs.prompt_tokens > capacity || needs.max_tokens > capacity - needs.prompt_tokens) {
    return Error(Code::kInvalidArgument,
                 cat("prompt of ", needs.prompt_tokens, " tokens and max_tokens ", needs.max_tokens,
                     " need more than the ", capacity, " positions of all KV pages"));
  }
  return {};
}

Result<void> Scheduler::submit(uint64_t id, const SequenceNeeds& needs) {
  NIBBLE_CHECK(needs.prompt_tokens >= 1 && needs.max_tokens >= 0, needs.prompt_tokens, " ",
               needs.max_tokens);
  NIBBLE_TRY(check_fits(needs));
  waiting_.push_back({.id = id, .needs = needs, .computed = 0, .pages = {}});
  return {};
}

bool Scheduler::end(uint64_t id) {
  auto same = [id](const Sequence& s) { return s.id == id; };
  if (auto it = std::find_if(running_.begin(), running_.end(), same); it != running_.end()) {
    pages_.give_back(it->pages);
    running_.erase(it);
    return true;
  }
  if (auto it = std::find_if(waiting_.begin(), waiting_.end(), same); it != waiting_.end()) {
    waiting_.erase(it);
    return true;
  }
  return false;
}

void Scheduler::admit() {
  while (!waiting_.empty() && running() < max_running_) {
    Sequence& oldest = waiting_.front();
    const int64_t need = pages_for(oldest.needs);
    if (need > pages_.free()) return;  // nobody overtakes
    oldest.pages = pages_.take(need);
    running_.push_back(std::move(oldest));
    waiting_.pop_front();
  }
}

void Scheduler::append(Sequence& sequence, int64_t rows, int64_t logit_rows) {
  const int64_t end = sequence.computed + rows;
  const SequenceNeeds& needs = sequence.needs;
  NIBBLE_CHECK(end <= needs.prompt_tokens || end < needs.prompt_tokens + needs.max_tokens,
               "sequence ", sequence.id, " goes on after its last token");
  batch_.push_back({.id = sequence.id,
                    .position_begin = sequence.computed,
                    .rows = rows,
                    .logit_rows = logit_rows,
                    .ends_prompt = end == needs.prompt_tokens,
                    .samples = end >= needs.prompt_tokens && needs.max_tokens > 0,
                    .pages = sequence.pages.data()});
  sequence.computed = end;
}

const std::vector<BatchItem>& Scheduler::next() {
  admit();
  batch_.clear();
  int64_t rows_left = limits_.max_batch_tokens, logits_left = limits_.max_logit_rows;
  std::vector<Sequence*> prompts;
  for (Sequence& s : running_) {
    if (s.computed < s.needs.prompt_tokens) {
      prompts.push_back(&s);
    } else if (s.computed + 1 < s.needs.prompt_tokens + s.needs.max_tokens) {
      append(s, 1, 1);
      --rows_left;
      --logits_left;
    }
  }
  for (Sequence* s : prompts) {
    if (rows_left == 0) break;
    const int64_t prompt_left = s->needs.prompt_tokens - s->computed;
    int64_t rows = std::min(prompt_left, rows_left);
    int64_t logits = 0;
    if (s->needs.prompt_logits) {
      rows = std::min(rows, logits_left);
      logits = rows;
    } else if (rows == prompt_left && s->needs.max_tokens > 0) {
      // Without a logit row for it, the prompt's last row waits for the next step.
      logits = std::min<int64_t>(logits_left, 1);
      rows -= 1 - logits;
    }
    if (rows == 0) continue;
    append(*s, rows, logits);
    rows_left -= rows;
    logits_left -= logits;
  }
  return batch_;
}

}  // namespace nibble::runtime
