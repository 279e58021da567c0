// Models that draw tokens themselves, and models whose device is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "runtime/engine_testing.h"

namespace nibble::runtime {
namespace {

/// What a DrawingModel was asked.
struct DrawingCounts {
  int drawn = 0, forwards = 0;
  size_t most_under_way = 0;
};

/// A FakeModel that draws, with the sampler. It gives a step's draws away at finish() alone, so
/// that a step behind it must name them.
class DrawingModel : public FakeModel {
 public:
  explicit DrawingModel(DrawingCounts* counts) : counts_(*counts) {}
  bool samples() const override { return true; }
  Result<void> forward(const kernels::Exec& exec, const model::StepInput& input,
                       const kernels::KvPages& pages, const model::StepOutput& output) override {
    EXPECT_TRUE(steps_.empty());
    ++counts_.forwards;
    return FakeModel::forward(exec, input, pages, output);
  }
  Result<void> start(const kernels::Exec& exec, const model::StepInput& input,
                     std::span<const model::RowSampling> sampling,
                     const kernels::KvPages& pages) override {
    EXPECT_EQ(sampling.size(), input.logit_rows.size());
    EXPECT_LT(steps_.size(), 2u);
    std::vector<int32_t> tokens(input.tokens.begin(), input.tokens.end());
    for (int32_t& token : tokens) {
      if (token < 0) token = last_.tokens.at(static_cast<size_t>(-1 - token));
    }
    model::StepInput known = input;
    known.tokens = tokens;
    std::vector<float> logits(input.logit_rows.size() * kFakeVocab);
    model::StepOutput own;
    own.logits = logits.data();
    NIBBLE_TRY(FakeModel::forward(exec, known, pages, own));
    last_ = {};
    for (size_t i = 0; i < sampling.size(); ++i) {
      const model::RowSampling& r = sampling[i];
      SamplingParams params;
      params.temperature = r.temperature;
      params.top_k = r.top_k;
      params.top_p = r.top_p;
      params.min_p = r.min_p;
      params.seed = r.seed;
      const Sampled s =
          sample({logits.data() + i * kFakeVocab, kFakeVocab}, {}, {}, params, r.draw, scratch_);
      last_.tokens.push_back(s.token);
      last_.logprobs.push_back(s.logprob);
      ++counts_.drawn;
    }
    steps_.push_back(last_);
    counts_.most_under_way = std::max(counts_.most_under_way, steps_.size());
    return {};
  }
  Result<model::Draws> finish() override {
    EXPECT_FALSE(steps_.empty());
    finished_ = steps_.front();
    steps_.pop_front();
    return model::Draws{finished_.tokens, finished_.logprobs};
  }

 private:
  struct Step {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
  };
  DrawingCounts& counts_;
  Step last_, finished_;
  std::deque<Step> steps_;  // under way
  std::vector<std::pair<float, int32_t>> scratch_;
};

std::vector<Request> some_requests(bool penalties) {
  std::vector<Request> requests;
  for (int32_t i = 0; i < 9; ++i) {
    Request request;
    for (int32_t t = 0; t <= 4 * i; ++t) request.prompt.push_back((t * 5 + i) % 90);
    request.max_tokens = 3 + i;
    request.sampling.temperature = i % 2 == 0 ? 0.0f : 1.1f;
    request.sampling.top_k = i % 3 == 0 ? 0 : 20;
    request.sampling.top_p = i % 4 == 0 ? 1.0f : 0.9f;
    request.sampling.min_p = i == 7 ? 0.05f : 0.0f;
    request.sampling.seed = static_cast<uint64_t>(i) * 77;
    if (penalties && i == 5) request.sampling.presence_penalty = 0.5f;
    requests.push_back(request);
  }
  return requests;
}

void expect_all_as_alone(const std::vector<Request>& requests, DrawingCounts* counts) {
  EngineOptions options;
  options.threads = 2;
  options.max_batch_tokens = 16;
  options.kv_tokens = 4096;
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<DrawingModel>(counts), options));
  std::vector<Outcome> outcomes(requests.size());
  std::vector<RequestId> ids;
  for (size_t i = 0; i < requests.size(); ++i) {
    ids.push_back(*engine->submit(recorded(requests[i], &outcomes[i])));
  }
  for (const RequestId id : ids) engine->wait(id);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(outcomes[i], expected(requests[i], false));
  }
}

TEST(EngineDraw, TokensDrawnByTheModelAreReported) {
  DrawingCounts counts;
  int tokens = 0;
  expect_all_as_alone(some_requests(false), &counts);
  for (const Request& r : some_requests(false)) tokens += static_cast<int>(r.max_tokens);
  EXPECT_EQ(counts.drawn, tokens);  // none too many: the last is known beforehand
  EXPECT_EQ(counts.forwards, 0);
  EXPECT_EQ(counts.most_under_way, 2u);
}

// A stop shows only when the next step is queued, whose row for that sequence goes unread.
TEST(EngineDraw, SequencesThatStopLeaveTheOthersAlone) {
  std::vector<Request> requests = some_requests(false);
  for (size_t i = 0; i < requests.size(); i += 2) {
    requests[i].max_tokens = 40;
    const Outcome free = expected(requests[i], false);
    requests[i].stop_tokens = {free.tokens[3 + i]};
  }
  DrawingCounts counts;
  expect_all_as_alone(requests, &counts);
  EXPECT_EQ(counts.most_under_way, 2u);
}

TEST(EngineDraw, PagesOfASequenceThatStoppedServeTheNext) {
  DrawingCounts counts;
  EngineOptions options;
  options.threads = 1;
  options.max_batch_tokens = options.max_context = options.kv_tokens = 48;  // room for one alone
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<DrawingModel>(&counts), options));
  std::vector<Request> requests;
  for (int32_t i = 0; i < 6; ++i) {
    Request request;
    for (int32_t t = 0; t < 4 + i; ++t) request.prompt.push_back((t * 11 + i * 3) % 90);
    request.max_tokens = 30;
    request.sampling.temperature = 1.0f;
    request.sampling.seed = static_cast<uint64_t>(i);
    request.stop_tokens = {expected(request, false).tokens[static_cast<size_t>(3 * i)]};
    requests.push_back(request);
  }
  std::vector<Outcome> outcomes(requests.size());
  std::vector<RequestId> ids;
  for (size_t i = 0; i < requests.size(); ++i) {
    ids.push_back(*engine->submit(recorded(requests[i], &outcomes[i])));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    engine->wait(ids[i]);
    SCOPED_TRACE(i);
    expect_same(outcomes[i], expected(requests[i], false));
    EXPECT_EQ(outcomes[i].reason, FinishReason::kStop);
  }
  EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages_total);
}

TEST(EngineDraw, CancelledBetweenTwoSteps) {
  DrawingCounts counts;
  EngineOptions options;
  options.threads = 1;
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<DrawingModel>(&counts), options));
  std::vector<Request> requests = some_requests(false);
  for (Request& request : requests) request.max_tokens = 60;
  std::vector<Outcome> outcomes(requests.size());
  std::vector<RequestId> ids(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    Request request = recorded(requests[i], &outcomes[i]);
    if (i % 2 == 1) {  // after its fifth token, which comes while its sixth is under way
      request.callbacks.on_token = [&, i, record = request.callbacks.on_token](const auto& event) {
        record(event);
        if (outcomes[i].tokens.size() == 5) engine->cancel(ids[i]);
      };
    }
    ids[i] = *engine->submit(std::move(request));
  }
  for (const RequestId id : ids) engine->wait(id);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    const Outcome want = expected(requests[i], false);
    EXPECT_EQ(outcomes[i].finishes, 1);
    EXPECT_EQ(outcomes[i].reason, i % 2 == 1 ? FinishReason::kCancelled : FinishReason::kLength);
    ASSERT_EQ(outcomes[i].tokens.size(), i % 2 == 1 ? 5u : 60u);
    EXPECT_TRUE(
        std::equal(outcomes[i].tokens.begin(), outcomes[i].tokens.end(), want.tokens.begin()));
  }
  EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages_total);
}

TEST(EngineDraw, StepsWithPenaltiesAreDrawnOnTheHost) {
  DrawingCounts counts;
  expect_all_as_alone(some_requests(true), &counts);
  EXPECT_GT(counts.forwards, 0);
  EXPECT_GT(counts.drawn, 0);
}

TEST(EngineDraw, PromptLogitsComeFromTheModelUndrawn) {
  DrawingCounts counts;
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<DrawingModel>(&counts), {}));
  Request request;
  request.prompt = {5, 6, 7, 8};
  Outcome outcome;
  engine->wait(*engine->submit(recorded(request, &outcome, true)));
  expect_same(outcome, expected(request, true));
  EXPECT_EQ(counts.drawn, 0);
}

/// A model whose third step fails, as it starts or as it ends.
class LostModel final : public DrawingModel {
 public:
  enum class When { kForward, kStart, kFinish };
  LostModel(DrawingCounts* counts, When when) : DrawingModel(counts), when_(when) {}
  bool samples() const override { return when_ != When::kForward; }
  Result<void> forward(const kernels::Exec& exec, const model::StepInput& input,
                       const kernels::KvPages& pages, const model::StepOutput& output) override {
    if (lost(When::kForward)) return error();
    return DrawingModel::forward(exec, input, pages, output);
  }
  Result<void> start(const kernels::Exec& exec, const model::StepInput& input,
                     std::span<const model::RowSampling> sampling,
                     const kernels::KvPages& pages) override {
    if (lost(When::kStart)) return error();
    return DrawingModel::start(exec, input, sampling, pages);
  }
  Result<model::Draws> finish() override {
    Result<model::Draws> draws = DrawingModel::finish();
    if (lost(When::kFinish)) return error();
    return draws;
  }

 private:
  bool lost(When when) { return when == when_ && ++steps_ >= 3; }
  static Error error() { return Error(Code::kDeviceLost, "step: the GPU fell off the bus"); }
  const When when_;
  int steps_ = 0;
};

class EngineDrawLost : public ::testing::TestWithParam<LostModel::When> {};

TEST_P(EngineDrawLost, EndsEveryRequestWithItsError) {
  DrawingCounts counts;
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<LostModel>(&counts, GetParam()), {}));
  for (int round = 0; round < 2; ++round) {  // later requests meet the same error
    std::vector<Outcome> outcomes(3);
    std::vector<RequestId> ids;
    for (Outcome& outcome : outcomes) {
      Request request;
      request.prompt = {1, 2, 3};
      request.max_tokens = 50;
      ids.push_back(*engine->submit(recorded(request, &outcome)));
    }
    for (const RequestId id : ids) engine->wait(id);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.finishes, 1);
      EXPECT_EQ(outcome.reason, FinishReason::kError);
      EXPECT_EQ(outcome.error, "step: the GPU fell off the bus");
      EXPECT_LT(outcome.tokens.size(), 50u);
    }
    EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages_total);
  }
}

INSTANTIATE_TEST_SUITE_P(When, EngineDrawLost,
                         ::testing::Values(LostModel::When::kForward, LostModel::When::kStart,
                                           LostModel::When::kFinish));

}  // namespace
}  // namespace nibble::runtime
