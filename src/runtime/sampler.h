// Logits of one row to one token. A pure function of logits, history, parameters and the draw's
// number, so a seed gives the same text whatever runs beside it.
//
// The order of steps (as vLLM has it); "order" below means higher logit first, then lower id:
//   1. penalties: repetition (over prompt and output), then frequency, then presence (over output);
//   2. temperature 0: the first token in order is the answer, no filter and no draw;
//   3. temperature: logits are divided by it, after subtracting the largest;
//   4. min-p: keeps tokens at least min_p times as probable as the most probable one;
//   5. top-k: keeps the first k in order;
//   6. top-p: keeps the shortest prefix in order whose share of what is left reaches top_p, at
//      least one token;
//   7. a draw from what is left, renormalised, walking in order of id.
// Probabilities are integers (2^42 for the most probable token), so every sum is exact and no
// result depends on the order of summation. A token less probable than 2^-42 times the first is
// never drawn.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"

namespace nibble::runtime {

struct SamplingParams {
  float temperature = 0.0f;         // 0: greedy (lowest id among equals)
  int32_t top_k = 0;                // 0: off
  float top_p = 1.0f;               // 1: off
  float min_p = 0.0f;               // 0: off; relative to the most probable token
  float repetition_penalty = 1.0f;  // over prompt and output: positive logits / p, negative * p
  float presence_penalty = 0.0f;    // over output: logit - p if the token occurred
  float frequency_penalty = 0.0f;   // over output: logit - p * count
  uint64_t seed = 0;
};

/// Errors: kInvalidArgument naming the parameter, its range and the value: temperature finite and
/// >= 0, top_k >= 0, top_p in (0, 1], min_p in [0, 1], repetition_penalty finite and > 0, the other
/// penalties finite.
Result<void> check_sampling(const SamplingParams& params);

struct Sampled {
  int32_t token = 0;
  float logprob = 0;  // log softmax of the raw logits
};

/// logits [vocab], vocab in [1, 2^21]; -inf is allowed. draw: 0 for the request's first token, 1
/// for the next, ... prompt and output are the history, every token in [0, vocab). params have
/// passed check_sampling. scratch is reused between calls. Logits without a distribution (a NaN, a
/// +inf, nothing but -inf) give token -1.
Sampled sample(std::span<const float> logits, std::span<const int32_t> prompt,
               std::span<const int32_t> output, const SamplingParams& params, uint64_t draw,
               std::vector<std::pair<float, int32_t>>& scratch);

}  // namespace nibble::runtime
