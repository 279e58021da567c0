#include "runtime/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "runtime/engine_testing.h"

namespace nibble::runtime {
namespace {

std::unique_ptr<Engine> make_engine(const EngineOptions& options,
                                    std::function<void(const model::StepInput&)> hook = nullptr) {
  auto engine = Engine::create(std::make_unique<FakeModel>(std::move(hook)), options);
  EXPECT_TRUE(engine) << (engine ? "" : engine.error().message());
  return std::move(engine).value();
}

struct Job {
  Request request;
  bool prompt_logits = false;
};

/// A mix of everything: lengths, sampling, stop tokens, prompt logits, no tokens at all.
std::vector<Job> mixed_jobs(uint32_t seed, int count) {
  std::mt19937 random(seed);
  auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
  std::vector<Job> jobs;
  for (int i = 0; i < count; ++i) {
    Job job;
    const int32_t length = 1 + below(i % 5 == 0 ? 90 : 20);
    for (int32_t t = 0; t < length; ++t) job.request.prompt.push_back(below(kPoisonToken));
    job.request.max_tokens = i % 7 == 3 ? 0 : 1 + below(25);
    job.prompt_logits = i % 4 == 3;
    if (i % 2 == 0) {
      job.request.sampling = {.temperature = 0.9f,
                              .top_k = 20,
                              .top_p = 0.95f,
                              .repetition_penalty = 1.1f,
                              .frequency_penalty = 0.1f,
                              .seed = random()};
    }
    if (i % 3 == 0) {
      for (int k = 0; k < 5; ++k) job.request.stop_tokens.push_back(below(kPoisonToken));
    }
    jobs.push_back(std::move(job));
  }
  return jobs;
}

void expect_all_free(const Engine& engine) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.kv_pages_free, stats.kv_pages_total);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
}

// A gate that holds the engine inside forward(), so a test can act in the middle of a step.
class Gate {
 public:
  std::function<void(const model::StepInput&)> hook() {
    return [this](const model::StepInput&) {
      std::unique_lock lock(mutex_);
      ++arrived_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return open_ || allowed_ >= arrived_; });
    };
  }
  /// Blocks until step `n` (from 1) has begun.
  void await_step(int n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= n; });
  }
  void allow_through(int n) {
    set([&] { allowed_ = n; });
  }
  void open() {
    set([&] { open_ = true; });
  }

 private:
  template <typename F>
  void set(F f) {
    std::lock_guard lock(mutex_);
    f();
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0, allowed_ = 0;
  bool open_ = false;
};

class EngineMix : public testing::TestWithParam<EngineOptions> {};

TEST_P(EngineMix, TokensDoNotDependOnScheduling) {
  const std::vector<Job> jobs = mixed_jobs(5, 40);
  std::vector<Outcome> outcomes(jobs.size());
  auto engine = make_engine(GetParam());
  std::vector<RequestId> ids;
  for (size_t i = 0; i < jobs.size(); ++i) {
    ids.push_back(
        engine->submit(recorded(jobs[i].request, &outcomes[i], jobs[i].prompt_logits)).value());
  }
  for (RequestId id : ids) engine->wait(id);
  int64_t prompt_tokens = 0, generated = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(outcomes[i], expected(jobs[i].request, jobs[i].prompt_logits));
    prompt_tokens += static_cast<int64_t>(jobs[i].request.prompt.size());
    generated += static_cast<int64_t>(outcomes[i].tokens.size());
  }
  expect_all_free(*engine);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.prompt_tokens, prompt_tokens);
  EXPECT_EQ(stats.generated_tokens, generated);
  EXPECT_GE(stats.steps * GetParam().max_batch_tokens, prompt_tokens);
}

EngineOptions options(int64_t sequences, int64_t batch, int64_t logits, int64_t kv, int threads) {
  EngineOptions o;
  o.threads = threads;
  o.max_context = 128;
  o.kv_tokens = kv;
  o.max_sequences = sequences;
  o.max_batch_tokens = batch;
  o.max_logit_rows = logits;
  return o;
}

INSTANTIATE_TEST_SUITE_P(Limits, EngineMix,
                         testing::Values(options(1, 512, 64, 128, 1),  // one at a time
                                         options(64, 1, 64, 1024, 1),  // one row a step
                                         options(64, 2, 64, 1024, 2),  //
                                         options(64, 7, 3, 1024, 2),   // odd chunks, few logit rows
                                         options(64, 64, 1, 1024, 2),  //
                                         options(3, 16, 64, 1024, 3),  //
                                         options(64, 33, 64, 128, 2),  // pages are short
                                         options(64, 512, 64, 4096, 2)));  // all at once

TEST(Engine, CancelFreesPagesWithinOneStep) {
  Gate gate;
  auto engine = make_engine(options(4, 64, 64, 256, 2), gate.hook());
  Outcome running, waiting, last;
  const Request request = {.prompt = {1, 2, 3}, .max_tokens = 100};
  // 103 positions are 7 of the 16 pages.
  const RequestId a = engine->submit(recorded(request, &running)).value();
  gate.await_step(1);
  gate.allow_through(1);
  gate.await_step(2);  // a has its first token
  EXPECT_EQ(engine->stats().kv_pages_free, 9);
  EXPECT_EQ(engine->stats().running, 1);
  EXPECT_EQ(engine->stats().generated_tokens, 1);
  const RequestId b = engine->submit(recorded(request, &waiting)).value();
  EXPECT_EQ(engine->stats().waiting, 1);
  engine->cancel(b);
  engine->cancel(a);
  engine->cancel(a);
  engine->cancel(12345);
  gate.allow_through(2);
  engine->wait(a);
  engine->wait(b);
  expect_all_free(*engine);
  EXPECT_EQ(running.reason, FinishReason::kCancelled);
  EXPECT_EQ(running.tokens.size(), 2u);  // the step in progress still reported
  EXPECT_EQ(running.finishes, 1);
  EXPECT_EQ(waiting.reason, FinishReason::kCancelled);
  EXPECT_TRUE(waiting.tokens.empty());
  EXPECT_EQ(engine->stats().steps, 2);
  engine->cancel(a);  // finished: ignored
  gate.open();
  engine->wait(engine->submit(recorded(request, &last)).value());
  expect_same(last, expected(request, false));
}

TEST(Engine, CancelFromACallback) {
  auto engine = make_engine(options(4, 64, 64, 256, 1));
  Outcome outcome;
  std::atomic<RequestId> id{0};
  Request request = recorded({.prompt = {1}, .max_tokens = 100}, &outcome);
  auto record = request.callbacks.on_token;
  std::mutex submitted;
  std::unique_lock lock(submitted);
  request.callbacks.on_token = [&](const TokenEvent& event) {
    record(event);
    std::lock_guard wait_for_id(submitted);
    if (outcome.tokens.size() == 3) engine->cancel(id);
  };
  id = engine->submit(std::move(request)).value();
  lock.unlock();
  engine->wait(id);
  EXPECT_EQ(outcome.reason, FinishReason::kCancelled);
  EXPECT_EQ(outcome.tokens.size(), 3u);
}

TEST(Engine, FirstComeFirstServed) {
  Gate gate;
  EngineOptions o = options(1, 64, 64, 128, 1);
  auto engine = make_engine(o, gate.hook());
  std::vector<int> order;
  std::vector<RequestId> ids;
  for (int i = 0; i < 10; ++i) {
    Request request = {.prompt = {i}, .max_tokens = 10 - i};
    request.callbacks.on_finish = [&order, i](FinishReason, const std::string&) {
      order.push_back(i);
    };
    ids.push_back(engine->submit(std::move(request)).value());
  }
  gate.open();
  for (RequestId id : ids) engine->wait(id);
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(Engine, ShortRequestsEndBesideALongPrompt) {
  // One row a step goes to the decoding sequence, the rest to the long prompt: neither starves.
  auto engine = make_engine(options(4, 4, 4, 4096, 1));
  std::vector<std::string> order;
  std::mutex mutex;
  auto named = [&](Request request, std::string name) {
    request.callbacks.on_finish = [&, name](FinishReason, const std::string&) {
      std::lock_guard lock(mutex);
      order.push_back(name);
    };
    return request;
  };
  const RequestId a = engine->submit(named({.prompt = {1}, .max_tokens = 12}, "short")).value();
  const RequestId b =
      engine->submit(named({.prompt = std::vector<int32_t>(100, 7), .max_tokens = 1}, "long"))
          .value();
  engine->wait(a);
  engine->wait(b);
  EXPECT_THAT(order, testing::ElementsAre("short", "long"));
  EXPECT_LE(engine->stats().steps, 12 + 34);
}

TEST(Engine, StopTokens) {
  auto engine = make_engine(options(4, 64, 64, 256, 1));
  const Request free_run = {.prompt = {4, 5}, .max_tokens = 30};
  const Outcome want = expected(free_run, false);
  ASSERT_EQ(want.tokens.size(), 30u);
  Request request = free_run;
  request.stop_tokens = {96, want.tokens[6]};
  size_t first = 0;
  while (want.tokens[first] != want.tokens[6]) ++first;
  Outcome got;
  engine->wait(engine->submit(recorded(request, &got)).value());
  EXPECT_EQ(got.reason, FinishReason::kStop);
  EXPECT_EQ(got.tokens, std::vector<int32_t>(want.tokens.begin(),
                                             want.tokens.begin() + static_cast<int64_t>(first)));
  EXPECT_EQ(engine->stats().generated_tokens, static_cast<int64_t>(first));
}

TEST(Engine, NanEndsOnlyItsRequest) {
  auto engine = make_engine(options(8, 64, 64, 1024, 2));
  const Request good = {.prompt = {1, 2, 3}, .max_tokens = 20};
  const Request bad = {.prompt = {9, 8, kPoisonToken}, .max_tokens = 20};
  Outcome good_outcome, bad_outcome;
  const RequestId a = engine->submit(recorded(good, &good_outcome)).value();
  const RequestId b = engine->submit(recorded(bad, &bad_outcome)).value();
  engine->wait(a);
  engine->wait(b);
  expect_same(good_outcome, expected(good, false));
  EXPECT_EQ(bad_outcome.reason, FinishReason::kError);
  EXPECT_THAT(bad_outcome.error, testing::HasSubstr("position 2"));
  EXPECT_TRUE(bad_outcome.tokens.empty());
  expect_all_free(*engine);
}

TEST(Engine, WithoutCallbacks) {
  auto engine = make_engine(options(4, 64, 64, 256, 1));
  engine->wait(engine->submit({.prompt = {1, 2}, .max_tokens = 3}).value());
  engine->wait(engine->submit({.prompt = {1, 2}, .max_tokens = 0}).value());
  EXPECT_EQ(engine->stats().generated_tokens, 3);
  EXPECT_EQ(engine->stats().prompt_tokens, 4);
  EXPECT_EQ(engine->stats().steps, 4);
}

TEST(Engine, SixtyFourSubmitsFromSeveralThreads) {
  const std::vector<Job> jobs = mixed_jobs(77, 64);
  std::vector<Outcome> outcomes(jobs.size());
  auto engine = make_engine(options(16, 24, 16, 512, 2));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::vector<RequestId> ids;
      for (size_t i = t; i < jobs.size(); i += 8) {
        Request request = recorded(jobs[i].request, &outcomes[i], jobs[i].prompt_logits);
        ids.push_back(engine->submit(std::move(request)).value());
        engine->stats();
      }
      Outcome cancelled;  // and one that ends early, or not
      const RequestId id =
          engine->submit(recorded({.prompt = {3}, .max_tokens = 90}, &cancelled)).value();
      engine->cancel(id);
      engine->wait(id);
      EXPECT_EQ(cancelled.finishes, 1);
      for (RequestId each : ids) engine->wait(each);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(outcomes[i], expected(jobs[i].request, jobs[i].prompt_logits));
  }
  expect_all_free(*engine);
}

TEST(Engine, DestructorCancelsWhatIsLeft) {
  Gate gate;
  const auto hold = gate.hook();
  std::vector<Outcome> outcomes(12);
  auto engine = make_engine(options(2, 64, 64, 256, 2), [&](const model::StepInput& input) {
    hold(input);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // far from the last token
  });
  for (Outcome& outcome : outcomes) {
    engine->submit(recorded({.prompt = {1, 2}, .max_tokens = 120}, &outcome)).value();
  }
  gate.await_step(1);
  Outcome late;  // still in the queue between caller and engine
  engine->submit(recorded({.prompt = {1, 2}, .max_tokens = 120}, &late)).value();
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.open();
  });
  engine.reset();
  opener.join();
  outcomes.push_back(late);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.finishes, 1);
    EXPECT_EQ(outcome.reason, FinishReason::kCancelled);
    EXPECT_LT(outcome.tokens.size(), 120u);
  }
}

TEST(Engine, IdleEnginesStartAndStop) {
  for (int i = 0; i < 20; ++i) make_engine(options(2, 8, 8, 64, 2));
  auto engine = make_engine(options(2, 8, 8, 128, 2));
  engine->wait(99);  // unknown: at once
  expect_all_free(*engine);
}

TEST(Engine, SubmitRejects) {
  EngineOptions o = options(4, 64, 64, 64, 1);
  auto engine = make_engine(o);
  const std::vector<int32_t> prompt(10, 1);
  const struct {
    std::string_view name;
    Request request;
    std::vector<std::string> want;
  } kCases[] = {
      {"empty", {.prompt = {}, .max_tokens = 1}, {"0 tokens"}},
      {"token too large", {.prompt = {1, 97}, .max_tokens = 1}, {"97", "position 1"}},
      {"token negative", {.prompt = {-1}, .max_tokens = 1}, {"-1", "97"}},
      {"max_tokens negative", {.prompt = {1}, .max_tokens = -1}, {"-1"}},
      {"context", {.prompt = prompt, .max_tokens = 119}, {"10", "119", "128"}},
      {"prompt alone", {.prompt = std::vector<int32_t>(129), .max_tokens = 0}, {"129", "128"}},
      {"overflow", {.prompt = prompt, .max_tokens = INT64_MAX}, {cat(INT64_MAX), "128"}},
      {"pages", {.prompt = prompt, .max_tokens = 55}, {"10", "55", "64"}},
      {"sampling", {.prompt = prompt, .sampling = {.top_p = 2}, .max_tokens = 1}, {"top_p", "2"}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const Result<RequestId> got = engine->submit(c.request);
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code(), Code::kInvalidArgument);
    for (const std::string& part : c.want) {
      EXPECT_THAT(got.error().message(), testing::HasSubstr(part));
    }
  }
  Outcome outcome;  // exactly all pages
  engine->wait(engine->submit(recorded({.prompt = prompt, .max_tokens = 54}, &outcome)).value());
  EXPECT_EQ(outcome.tokens.size(), 54u);
  EXPECT_EQ(engine->stats().waiting, 0);
}

TEST(Engine, OptionsInEffect) {
  EngineOptions o;
  o.threads = 0;
  o.max_batch_tokens = 8;
  const EngineOptions got = make_engine(o)->options();
  EXPECT_EQ(got.threads, usable_cores());
  EXPECT_EQ(got.max_context, 4096);
  EXPECT_EQ(got.kv_tokens, 4096);
  EXPECT_EQ(got.max_sequences, 8);
  o.kv_tokens = 33;
  EXPECT_EQ(make_engine(o)->options().kv_tokens, 48);
}

TEST(Engine, CreateRejects) {
  const struct {
    std::string_view name;
    void (*change)(EngineOptions&);
    Code code;
    std::string want;
  } kCases[] = {
      {"context", [](EngineOptions& o) { o.max_context = 5000; }, Code::kInvalidArgument, "4096"},
      {"batch", [](EngineOptions& o) { o.max_batch_tokens = 0; }, Code::kInvalidArgument,
       "max_batch_tokens"},
      {"logits", [](EngineOptions& o) { o.max_logit_rows = 0; }, Code::kInvalidArgument,
       "max_logit_rows"},
      {"sequences", [](EngineOptions& o) { o.max_sequences = -1; }, Code::kInvalidArgument,
       "max_sequences"},
      {"kv", [](EngineOptions& o) { o.kv_tokens = -1; }, Code::kInvalidArgument, "kv_tokens"},
      {"threads", [](EngineOptions& o) { o.threads = -1; }, Code::kInvalidArgument, "threads"},
      // 2^34 positions of 16 bytes; available is whatever this host says.
      {"memory", [](EngineOptions& o) { o.kv_tokens = int64_t{1} << 34; }, Code::kResourceExhausted,
       "274877906944"},
      {"logits memory", [](EngineOptions& o) { o.max_logit_rows = 2000000000; },
       Code::kResourceExhausted, "available"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    EngineOptions o = options(4, 64, 64, 64, 1);
    c.change(o);
    const auto got = Engine::create(std::make_unique<FakeModel>(), o);
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code(), c.code) << got.error().message();
    EXPECT_THAT(got.error().message(), testing::HasSubstr(c.want));
  }
}

}  // namespace
}  // namespace nibble::runtime
