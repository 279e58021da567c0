// Logits of one row to one token: penalties, temperature, top-k, top-p, min-p, then a draw. A pure
// function of logits, history, parameters and the draw's number, so a seed gives the same text
// whatever runs beside it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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

struct Sampled {
  int32_t token = 0;
  float logprob = 0;  // log softmax of the raw logits
};

/// draw: 0 for the request's first token, 1 for the next, ... prompt and output are the history.
/// scratch is reused between calls. A NaN among the logits gives token -1.
Sampled sample(std::span<const float> logits, std::span<const int32_t> prompt,
               std::span<const int32_t> output, const SamplingParams& params, uint64_t draw,
               std::vector<std::pair<float, int32_t>>& scratch);

}  // namespace nibble::runtime
