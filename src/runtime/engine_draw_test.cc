// Models that draw tokens themselves, and models whose device is lost.
#include <gtest/gtest.h>

#include "runtime/engine_testing.h"

namespace nibble::runtime {
namespace {

/// A FakeModel that draws where it is asked to, with the sampler; counts how often.
class DrawingModel final : public FakeModel {
 public:
  explicit DrawingModel(int* drawn) : drawn_(drawn) {}
  bool samples() const override { return true; }
  Result<void> forward(const kernels::Exec& exec, const model::StepInput& input,
                       const kernels::KvPages& pages, const model::StepOutput& output) override {
    if (input.sampling.empty()) return FakeModel::forward(exec, input, pages, output);
    EXPECT_EQ(output.logits, nullptr);
    EXPECT_EQ(input.sampling.size(), input.logit_rows.size());
    std::vector<float> logits(input.logit_rows.size() * kFakeVocab);
    model::StepOutput own = output;
    own.logits = logits.data();
    NIBBLE_TRY(FakeModel::forward(exec, input, pages, own));
    for (size_t i = 0; i < input.sampling.size(); ++i) {
      const model::RowSampling& r = input.sampling[i];
      SamplingParams params;
      params.temperature = r.temperature;
      params.top_k = r.top_k;
      params.top_p = r.top_p;
      params.min_p = r.min_p;
      params.seed = r.seed;
      const Sampled s =
          sample({logits.data() + i * kFakeVocab, kFakeVocab}, {}, {}, params, r.draw, scratch_);
      output.tokens[i] = s.token;
      output.logprobs[i] = s.logprob;
      ++*drawn_;
    }
    return {};
  }

 private:
  int* drawn_;
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

void expect_all_as_alone(bool penalties, int* drawn) {
  EngineOptions options;
  options.threads = 2;
  options.max_batch_tokens = 16;
  options.kv_tokens = 4096;
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<DrawingModel>(drawn), options));
  const std::vector<Request> requests = some_requests(penalties);
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
  int drawn = 0, tokens = 0;
  expect_all_as_alone(false, &drawn);
  for (const Request& r : some_requests(false)) tokens += static_cast<int>(r.max_tokens);
  EXPECT_EQ(drawn, tokens);
}

TEST(EngineDraw, StepsWithPenaltiesAreDrawnOnTheHost) {
  int drawn = 0;
  expect_all_as_alone(true, &drawn);
}

TEST(EngineDraw, PromptLogitsComeFromTheModelUndrawn) {
  int drawn = 0;
  std::unique_ptr<Engine> engine =
      std::move(*Engine::create(std::make_unique<DrawingModel>(&drawn), {}));
  Request request;
  request.prompt = {5, 6, 7, 8};
  Outcome outcome;
  engine->wait(*engine->submit(recorded(request, &outcome, true)));
  expect_same(outcome, expected(request, true));
  EXPECT_EQ(drawn, 0);
}

/// A model whose third step fails.
class LostModel final : public FakeModel {
 public:
  Result<void> forward(const kernels::Exec& exec, const model::StepInput& input,
                       const kernels::KvPages& pages, const model::StepOutput& output) override {
    if (++steps_ >= 3) return Error(Code::kDeviceLost, "step: the GPU fell off the bus");
    return FakeModel::forward(exec, input, pages, output);
  }

 private:
  int steps_ = 0;
};

TEST(EngineDraw, ALostDeviceEndsEveryRequestWithItsError) {
  std::unique_ptr<Engine> engine = std::move(*Engine::create(std::make_unique<LostModel>(), {}));
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

}  // namespace
}  // namespace nibble::runtime
