#include "runtime/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "runtime/random.h"
#include "runtime/softmax.h"

namespace nibble::runtime {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMaxVocab = int64_t{1} << 21;  // kMaxVocab * kOne fits 64 bits
constexpr float kOne = 0x1p42f;                  // weight of the most probable token
constexpr float kLowest = -30.0f;                // e^-30 * kOne < 1: such a token has weight 0
constexpr int kBucketsPerNat = 64;
constexpr int kBuckets = 30 * kBucketsPerNat + 1;

using Entry = std::pair<float, int32_t>;  // logit (from step 3 on: scaled, largest 0), token
using Entries = std::vector<Entry>;

bool before(const Entry& a, const Entry& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

uint64_t weight(float scaled) { return static_cast<uint64_t>(exp_nonpositive(scaled) * kOne); }

/// The largest logit, or NaN if the logits have no distribution.
float largest(std::span<const float> logits) {
  constexpr size_t kLanes = 8;
  std::array<float, kLanes> top;
  top.fill(-kInfinity);
  std::array<int32_t, kLanes> bad{};
  auto look = [&](size_t lane, float x) {
    bad[lane] |= !(x < kInfinity);
    top[lane] = x > top[lane] ? x : top[lane];
  };
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) look(lane, logits[i + lane]);
  }
  for (; i < logits.size(); ++i) look(0, logits[i]);
  const float max = *std::max_element(top.begin(), top.end());
  const bool broken = std::any_of(bad.begin(), bad.end(), [](int32_t b) { return b != 0; });
  return broken || max == -kInfinity ? std::numeric_limits<float>::quiet_NaN() : max;
}

/// log of the sum of e^(logit - max).
double log_sum(std::span<const float> logits, float max) {
  constexpr size_t kLanes = 8;
  std::array<double, kLanes> sum{};
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      sum[lane] += static_cast<double>(exp_nonpositive(logits[i + lane] - max));
    }
  }
  for (; i < logits.size(); ++i) sum[0] += static_cast<double>(exp_nonpositive(logits[i] - max));
  double total = 0;
  for (double s : sum) total += s;
  return std::log(total);
}

bool has_penalty(const SamplingParams& p) {
  return p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
}

/// Step 1. entries [vocab] by id; the second half of `entries` is used to count occurrences.
void apply_penalties(Entries& entries, std::span<const int32_t> prompt,
                     std::span<const int32_t> output, const SamplingParams& params) {
  const size_t vocab = entries.size();
  entries.resize(2 * vocab);
  const std::span<Entry> counts = std::span(entries).subspan(vocab);
  for (Entry& c : counts) c = {0.0f, 0};  // {1 if it occurred at all, occurrences in the output}
  for (int32_t token : prompt) counts[static_cast<size_t>(token)].first = 1.0f;
  for (int32_t token : output) {
    Entry& c = counts[static_cast<size_t>(token)];
    c.first = 1.0f;
    ++c.second;
  }
  for (size_t i = 0; i < vocab; ++i) {
    if (counts[i].first == 0.0f) continue;
    float& logit = entries[i].first;
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    if (counts[i].second == 0) continue;
    logit -= params.frequency_penalty * static_cast<float>(counts[i].second);
    logit -= params.presence_penalty;
  }
  entries.resize(vocab);
}

/// Drops what comes after `last` in order; the rest stays in order of id.
void keep_through(Entries& entries, const Entry& last) {
  std::erase_if(entries, [&](const Entry& e) { return before(last, e); });
}

/// Steps 3 and 4. `first` is the first entry in order.
void scale_and_keep_min_p(Entries& entries, const Entry& first, const SamplingParams& params) {
  const float cutoff =
      params.min_p > 0 ? std::max(std::log(params.min_p), kLowest) : kLowest;  // log(1) is 0
  const float max = first.first;
  size_t kept = 0;
  for (const Entry& e : entries) {
    const float scaled = (e.first - max) / params.temperature;
    if (scaled >= cutoff) entries[kept++] = {scaled, e.second};
  }
  entries.resize(kept);
}

/// Step 5. The copy that is partitioned stands behind the entries for a moment.
void keep_top_k(Entries& entries, size_t k) {
  const size_t n = entries.size();
  if (k >= n) return;
  entries.resize(2 * n);
  const auto copy = entries.begin() + static_cast<std::ptrdiff_t>(n);
  std::copy(entries.begin(), copy, copy);
  const auto kth = copy + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(copy, kth, entries.end(), before);
  const Entry last = *kth;
  entries.resize(n);
  keep_through(entries, last);
}

/// Step 6. A histogram of mass over the scaled logit finds the bucket where the share is reached;
/// only that bucket is sorted.
void keep_top_p(Entries& entries, float top_p) {
  auto bucket = [](float scaled) { return static_cast<size_t>(-scaled * kBucketsPerNat); };
  std::array<uint64_t, kBuckets> mass{};
  uint64_t total = 0;
  for (const Entry& e : entries) {
    const uint64_t w = weight(e.first);
    mass[bucket(e.first)] += w;
    total += w;
  }
  const double want = std::ceil(static_cast<double>(top_p) * static_cast<double>(total));
  uint64_t need = std::clamp<uint64_t>(static_cast<uint64_t>(want), 1, total);
  size_t edge = 0;
  while (mass[edge] < need) need -= mass[edge++];

  const size_t n = entries.size();
  entries.reserve(2 * n);
  for (size_t i = 0; i < n; ++i) {
    const Entry e = entries[i];
    if (bucket(e.first) == edge) entries.push_back(e);
  }
  auto at = entries.begin() + static_cast<std::ptrdiff_t>(n);
  std::sort(at, entries.end(), before);
  while (weight(at->first) < need) need -= weight((at++)->first);
  const Entry last = *at;
  entries.resize(n);
  keep_through(entries, last);
}

/// Step 7.
int32_t draw_token(const Entries& entries, uint64_t bits) {
  __extension__ using Wide = unsigned __int128;
  uint64_t total = 0;
  for (const Entry& e : entries) total += weight(e.first);
  uint64_t rest = static_cast<uint64_t>(static_cast<Wide>(bits) * total >> 64);  // [0, total)
  for (const Entry& e : entries) {
    const uint64_t w = weight(e.first);
    if (rest < w) return e.second;
    rest -= w;
  }
  NIBBLE_CHECK(false, "a draw beyond the total of ", total);
  return -1;
}

/// Steps 1 to 7 over a copy of the logits; -1 if the penalties leave no distribution.
int32_t choose(std::span<const float> logits, std::span<const int32_t> prompt,
               std::span<const int32_t> output, const SamplingParams& params, uint64_t draw,
               Entries& entries) {
  entries.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) entries[i] = {logits[i], static_cast<int32_t>(i)};
  if (has_penalty(params)) apply_penalties(entries, prompt, output, params);
  const Entry first = *std::min_element(entries.begin(), entries.end(), before);
  if (!std::isfinite(first.first)) return -1;
  if (params.temperature == 0.0f) return first.second;
  scale_and_keep_min_p(entries, first, params);
  if (params.top_k > 0) keep_top_k(entries, static_cast<size_t>(params.top_k));
  if (params.top_p < 1.0f) keep_top_p(entries, params.top_p);
  return draw_token(entries, random_bits(params.seed, draw));
}

}  // namespace

Result<void> check_sampling(const SamplingParams& params) {
  const struct {
    const char* name;
    const char* range;
    double value;
    bool good;
  } checks[] = {
      {"temperature", "finite and >= 0", params.temperature,
       std::isfinite(params.temperature) && params.temperature >= 0},
      {"top_k", ">= 0", static_cast<double>(params.top_k), params.top_k >= 0},
      {"top_p", "in (0, 1]", params.top_p, params.top_p > 0 && params.top_p <= 1},
      {"min_p", "in [0, 1]", params.min_p, params.min_p >= 0 && params.min_p <= 1},
      {"repetition_penalty", "finite and > 0", params.repetition_penalty,
       std::isfinite(params.repetition_penalty) && params.repetition_penalty > 0},
      {"presence_penalty", "finite", params.presence_penalty,
       std::isfinite(params.presence_penalty)},
      {"frequency_penalty", "finite", params.frequency_penalty,
       std::isfinite(params.frequency_penalty)},
  };
  for (const auto& c : checks) {
    if (!c.good) {
      return Error(Code::kInvalidArgument, cat(c.name, " must be ", c.range, ", not ", c.value));
    }
  }
  return {};
}

Sampled sample(std::span<const float> logits, std::span<const int32_t> prompt,
               std::span<const int32_t> output, const SamplingParams& params, uint64_t draw,
               std::vector<std::pair<float, int32_t>>& scratch) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  NIBBLE_CHECK(vocab >= 1 && vocab <= kMaxVocab, "vocab ", vocab);
  const float max = largest(logits);
  if (std::isnan(max)) return {.token = -1, .logprob = 0};
  int32_t token;
  if (params.temperature == 0.0f && !has_penalty(params)) {
    token = static_cast<int32_t>(std::find(logits.begin(), logits.end(), max) - logits.begin());
  } else {
    token = choose(logits, prompt, output, params, draw, scratch);
    if (token < 0) return {.token = -1, .logprob = 0};
  }
  const double above = static_cast<double>(logits[static_cast<size_t>(token)] - max);
  return {.token = token, .logprob = static_cast<float>(above - log_sum(logits, max))};
}

}  // namespace nibble::runtime
