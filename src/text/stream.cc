// StreamDecoder and StopFilter: what a server does with ids as they come, one token at a time.
#include <algorithm>

#include "text/tokenizer.h"
#include "text/unicode.h"

namespace nibble::text {

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  if (id < 0 || id >= tokenizer_->vocab_size()) return {};
  if (first_) {
    pending_ += tokenizer_->first_token_bytes(id);
    first_ = false;
  } else {
    pending_ += tokenizer_->token_bytes(id);
  }
  const size_t certain = pending_.size() - unfinished_tail(pending_);
  std::string text = to_valid_utf8(std::string_view(pending_).substr(0, certain));
  pending_.erase(0, certain);
  if (strip_budget_ > 0) tokenizer_->strip_start(text, strip_budget_);
  return text;
}

std::string StreamDecoder::finish() {
  std::string text = to_valid_utf8(pending_);
  pending_.clear();
  if (strip_budget_ > 0) tokenizer_->strip_start(text, strip_budget_);
  return text;
}

// The stop string that is complete first ends the text, however the text was cut into pieces; of
// two that end together the longer one counts.
std::string StopFilter::push(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  size_t begin = held_.size();
  size_t end = std::string::npos;
  size_t most_held = 0;
  for (const std::string& stop : stops_) {
    if (stop.empty()) continue;
    const size_t at = held_.find(stop);
    if (at != std::string::npos &&
        (at + stop.size() < end || (at + stop.size() == end && at < begin))) {
      begin = at;
      end = at + stop.size();
    }
    // The longest end of the text that may be the start of this stop string.
    size_t length = std::min(stop.size() - 1, held_.size());
    while (length > most_held && !held_.ends_with(std::string_view(stop).substr(0, length))) {
      --length;
    }
    most_held = std::max(most_held, length);
  }
  stopped_ = end != std::string::npos;
  std::string shown = held_.substr(0, stopped_ ? begin : held_.size() - most_held);
  held_.erase(0, stopped_ ? held_.size() : shown.size());
  return shown;
}

std::string StopFilter::finish() {
  std::string shown;
  if (!stopped_) shown.swap(held_);
  held_.clear();
  return shown;
}

}  // namespace nibble::text
