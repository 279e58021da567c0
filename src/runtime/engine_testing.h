// For tests of the engine: what a request's callbacks said, and what they must say.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "runtime/engine.h"
#include "runtime/fake_model.h"

namespace nibble::runtime {

/// Everything a request's callbacks said. Read it after wait().
struct Outcome {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int64_t> positions;  // of on_prompt_logits
  std::vector<float> logits, hidden;
  int finishes = 0;
  FinishReason reason = FinishReason::kError;
  std::string error;
};

inline Request recorded(Request request, Outcome* outcome, bool prompt_logits = false) {
  request.callbacks.on_token = [outcome](const TokenEvent& event) {
    EXPECT_EQ(outcome->finishes, 0);
    outcome->tokens.push_back(event.token);
    outcome->logprobs.push_back(event.logprob);
  };
  request.callbacks.on_finish = [outcome](FinishReason reason, const std::string& error) {
    ++outcome->finishes;
    outcome->reason = reason;
    outcome->error = error;
  };
  if (prompt_logits) {
    request.callbacks.on_prompt_logits = [outcome](int64_t position, std::span<const float> logits,
                                                   std::span<const float> hidden) {
      EXPECT_TRUE(outcome->tokens.empty());
      EXPECT_EQ(logits.size(), static_cast<size_t>(kFakeVocab));
      EXPECT_EQ(hidden.size(), static_cast<size_t>(kFakeHidden));
      outcome->positions.push_back(position);
      outcome->logits.insert(outcome->logits.end(), logits.begin(), logits.end());
      outcome->hidden.insert(outcome->hidden.end(), hidden.begin(), hidden.end());
    };
  }
  return request;
}

/// What the request must give, computed without engine, scheduler or pages.
inline Outcome expected(const Request& request, bool prompt_logits) {
  Outcome out;
  out.finishes = 1;
  uint64_t hash = 0;
  std::vector<float> logits(kFakeVocab), hidden(kFakeHidden);
  std::vector<std::pair<float, int32_t>> scratch;
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    hash = hash_history(hash, request.prompt[i]);
    fake_outputs(hash, request.prompt[i], logits.data(), hidden.data());
    if (!prompt_logits) continue;
    out.positions.push_back(static_cast<int64_t>(i));
    out.logits.insert(out.logits.end(), logits.begin(), logits.end());
    out.hidden.insert(out.hidden.end(), hidden.begin(), hidden.end());
  }
  while (static_cast<int64_t>(out.tokens.size()) < request.max_tokens) {
    const Sampled s =
        sample(logits, request.prompt, out.tokens, request.sampling, out.tokens.size(), scratch);
    if (std::count(request.stop_tokens.begin(), request.stop_tokens.end(), s.token) > 0) {
      out.reason = FinishReason::kStop;
      return out;
    }
    out.tokens.push_back(s.token);
    out.logprobs.push_back(s.logprob);
    hash = hash_history(hash, s.token);
    fake_outputs(hash, s.token, logits.data(), hidden.data());
  }
  out.reason = FinishReason::kLength;
  return out;
}

inline void expect_same(const Outcome& got, const Outcome& want) {
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.logprobs, want.logprobs);
  EXPECT_EQ(got.positions, want.positions);
  EXPECT_EQ(got.logits, want.logits);
  EXPECT_EQ(got.hidden, want.hidden);
  EXPECT_EQ(got.finishes, want.finishes);
  EXPECT_EQ(got.reason, want.reason);
  EXPECT_EQ(got.error, want.error);
}

}  // namespace nibble::runtime
