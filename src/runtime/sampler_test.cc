#include "runtime/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string_view>

#include "runtime/random.h"
#include "runtime/softmax.h"

namespace nibble::runtime {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Sampled run(const std::vector<float>& logits, const SamplingParams& params, uint64_t draw = 0,
            const std::vector<int32_t>& prompt = {}, const std::vector<int32_t>& output = {}) {
  std::vector<std::pair<float, int32_t>> scratch;
  return sample(logits, prompt, output, params, draw, scratch);
}

std::set<int32_t> seen(const std::vector<float>& logits, const SamplingParams& params,
                       uint64_t draws = 400, const std::vector<int32_t>& prompt = {},
                       const std::vector<int32_t>& output = {}) {
  std::set<int32_t> tokens;
  for (uint64_t d = 0; d < draws; ++d) tokens.insert(run(logits, params, d, prompt, output).token);
  return tokens;
}

/// Gaussian-like logits without a library's distribution: sums of uniforms.
std::vector<float> random_logits(uint64_t seed, size_t vocab, float spread) {
  std::vector<float> logits(vocab);
  for (size_t i = 0; i < vocab; ++i) {
    const uint64_t bits = random_bits(seed, i);
    float sum = 0;
    for (int k = 0; k < 4; ++k) sum += static_cast<float>(bits >> (16 * k) & 0xFFFF) * 0x1p-16f;
    logits[i] = (sum - 2.0f) * spread;
  }
  return logits;
}

// The slow reference: probabilities in double, everything sorted.
struct Reference {
  std::vector<double> probability;  // [vocab] after all filters, sum 1
  std::vector<int32_t> kept;        // in order: higher logit first, then lower id
};

std::vector<double> penalised(const std::vector<float>& logits, const std::vector<int32_t>& prompt,
                              const std::vector<int32_t>& output, const SamplingParams& params) {
  std::vector<double> x(logits.begin(), logits.end());
  std::set<int32_t> any(prompt.begin(), prompt.end());
  any.insert(output.begin(), output.end());
  for (int32_t t : any) {
    double& v = x[static_cast<size_t>(t)];
    const double p = params.repetition_penalty;
    v = v > 0 ? v / p : v * p;
  }
  std::map<int32_t, int> count;
  for (int32_t t : output) ++count[t];
  for (auto [t, n] : count) {
    x[static_cast<size_t>(t)] -= static_cast<double>(params.frequency_penalty) * n +
                                 static_cast<double>(params.presence_penalty);
  }
  return x;
}

Reference reference(const std::vector<float>& logits, const std::vector<int32_t>& prompt,
                    const std::vector<int32_t>& output, const SamplingParams& params) {
  const std::vector<double> x = penalised(logits, prompt, output, params);
  Reference ref;
  ref.probability.assign(x.size(), 0);
  for (size_t i = 0; i < x.size(); ++i) ref.kept.push_back(static_cast<int32_t>(i));
  auto at = [&](int32_t i) { return x[static_cast<size_t>(i)]; };
  std::sort(ref.kept.begin(), ref.kept.end(),
            [&](int32_t a, int32_t b) { return at(a) != at(b) ? at(a) > at(b) : a < b; });
  const double max = at(ref.kept[0]);
  auto p = [&](int32_t i) {
    return std::exp((at(i) - max) / static_cast<double>(params.temperature));
  };
  std::erase_if(ref.kept, [&](int32_t i) { return p(i) < static_cast<double>(params.min_p); });
  if (params.top_k > 0 && ref.kept.size() > static_cast<size_t>(params.top_k)) {
    ref.kept.resize(static_cast<size_t>(params.top_k));
  }
  double total = 0, share = 0;
  for (int32_t i : ref.kept) total += p(i);
  if (params.top_p < 1) {
    size_t n = 0;
    while (n < ref.kept.size() && share < static_cast<double>(params.top_p) * total) {
      share += p(ref.kept[n++]);
    }
    ref.kept.resize(std::max<size_t>(n, 1));
    total = share;
  }
  for (int32_t i : ref.kept) ref.probability[static_cast<size_t>(i)] = p(i) / total;
  return ref;
}

/// The token of a uniform in [0, 1) by the reference; `margin` is how near a boundary it fell.
int32_t reference_draw(const Reference& ref, double uniform, double* margin) {
  double sum = 0;
  int32_t last = -1;
  *margin = 1;
  for (size_t i = 0; i < ref.probability.size(); ++i) {
    if (ref.probability[i] == 0) continue;
    last = static_cast<int32_t>(i);
    sum += ref.probability[i];
    *margin = std::min(*margin, std::abs(uniform - sum));
    if (uniform < sum) return last;
  }
  return last;
}

TEST(Random, PhiloxKnownAnswers) {  // Random123's kat_vectors, philox4x32 with 10 rounds
  using testing::ElementsAre;
  EXPECT_THAT(philox4x32({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  const uint32_t f = 0xffffffff;
  EXPECT_THAT(philox4x32({f, f, f, f}, {f, f}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(Softmax, ExponentialIsAccurate) {
  EXPECT_EQ(exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(exp_nonpositive(-0.0f), 1.0f);
  EXPECT_EQ(exp_nonpositive(-kInf), 0.0f);
  EXPECT_EQ(exp_nonpositive(-87.5f), 0.0f);
  double worst = 0;
  for (int i = 0; i <= 870000; ++i) {
    const float x = -static_cast<float>(i) * 1e-4f;
    const double want = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(exp_nonpositive(x)) / want - 1));
  }
  EXPECT_LT(worst, 0x1p-22);
  EXPECT_GT(worst, 0);
}

TEST(Sampler, EdgeCases) {
  const struct {
    std::string_view name;
    std::vector<float> logits;
    SamplingParams params;
    std::set<int32_t> want;  // exactly the tokens that occur in 400 draws
  } kCases[] = {
      {"greedy", {1, 3, 2}, {}, {1}},
      {"greedy takes the lowest of equals", {1, 3, 3, 3}, {}, {1}},
      {"greedy ignores the filters", {1, 3, 3}, {.top_k = 3, .top_p = 0.5f, .min_p = 0.1f}, {1}},
      {"greedy of -inf and a number", {-kInf, -5, -kInf}, {}, {1}},
      {"one token", {0.5f}, {.temperature = 1}, {0}},
      {"all equal", {2, 2, 2, 2}, {.temperature = 1}, {0, 1, 2, 3}},
      {"-inf is never drawn", {0, -kInf, 0}, {.temperature = 1}, {0, 2}},
      {"top_k 1 is greedy", {1, 3, 3}, {.temperature = 1, .top_k = 1}, {1}},
      {"top_k 1 is greedy when hot", {0, 20, 20.000002f}, {.temperature = 1000, .top_k = 1}, {2}},
      {"top_k among equals keeps low ids", {2, 2, 2, 2}, {.temperature = 1, .top_k = 2}, {0, 1}},
      {"top_k beyond the vocabulary", {2, 2}, {.temperature = 1, .top_k = 1 << 30}, {0, 1}},
      {"tiny top_p keeps one", {2, 2, 1}, {.temperature = 1, .top_p = 1e-30f}, {0}},
      {"top_p reached exactly", {2, 2, 2, 2}, {.temperature = 1, .top_p = 0.5f}, {0, 1}},
      {"top_p just beyond", {2, 2, 2, 2}, {.temperature = 1, .top_p = 0.51f}, {0, 1, 2}},
      {"top_p after top_k renormalises",  // 0.75 of {0, 1} needs both, of all four it needs three
       {2, 2, 2, 2},
       {.temperature = 1, .top_k = 2, .top_p = 0.75f},
       {0, 1}},
      {"min_p 1 keeps the equals of the first",
       {3, 2.9f, 3},
       {.temperature = 1, .min_p = 1},
       {0, 2}},
      {"min_p cuts", {0, -1, -3}, {.temperature = 1, .min_p = 0.2f}, {0, 1}},
      {"min_p works after the temperature",
       {0, -1, -3},
       {.temperature = 3, .min_p = 0.2f},
       {0, 1, 2}},
      {"cold is greedy", {1, 3, 2.99f}, {.temperature = 1e-30f}, {1}},
      {"cold keeps equals", {1, 3, 3}, {.temperature = 1e-30f}, {1, 2}},
      {"large logits do not overflow", {3e38f, 3e38f, -3e38f}, {.temperature = 0.5f}, {0, 1}},
      {"NaN", {1, kNan, 2}, {}, {-1}},
      {"NaN when drawing", {1, kNan, 2}, {.temperature = 1}, {-1}},
      {"+inf", {1, kInf, 2}, {.temperature = 1}, {-1}},
      {"all -inf", {-kInf, -kInf}, {}, {-1}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    EXPECT_EQ(seen(c.logits, c.params), c.want);
  }
}

TEST(Sampler, NanIsFoundAtEveryPlace) {
  for (size_t vocab = 1; vocab <= 20; ++vocab) {
    for (size_t at = 0; at < vocab; ++at) {
      std::vector<float> logits(vocab, 1.0f);
      logits[at] = kNan;
      EXPECT_EQ(run(logits, {}).token, -1) << vocab << " " << at;
      logits[at] = 2.0f;
      EXPECT_EQ(run(logits, {}).token, static_cast<int32_t>(at));
    }
  }
}

TEST(Sampler, Penalties) {
  const struct {
    std::string_view name;
    std::vector<float> logits;
    SamplingParams params;
    std::vector<int32_t> prompt, output;
    int32_t want;
  } kCases[] = {
      {"repetition divides positive", {3, 2}, {.repetition_penalty = 2}, {0}, {}, 1},
      {"repetition multiplies negative", {-1, -1.5f}, {.repetition_penalty = 2}, {0}, {}, 1},
      {"repetition once however often", {3, 1.4f}, {.repetition_penalty = 2}, {0, 0}, {0, 0}, 0},
      {"repetition sees the output", {3, 2}, {.repetition_penalty = 2}, {}, {0}, 1},
      {"presence does not see the prompt", {3, 2}, {.presence_penalty = 2}, {0}, {}, 0},
      {"presence sees the output", {3, 2}, {.presence_penalty = 2}, {}, {0}, 1},
      {"presence once however often", {3, 2}, {.presence_penalty = 0.9f}, {}, {0, 0, 0}, 0},
      {"frequency counts", {3, 2}, {.frequency_penalty = 0.4f}, {}, {0, 0}, 0},
      {"frequency counts on", {3, 2}, {.frequency_penalty = 0.4f}, {}, {0, 0, 0}, 1},
      {"frequency does not see the prompt", {3, 2}, {.frequency_penalty = 9}, {0, 0}, {}, 0},
      {"negative penalty rewards", {3, 2}, {.presence_penalty = -2}, {}, {1}, 1},
      {"repetition comes before presence",  // 4 / 2 - 1 = 1 > 0.9, but (4 - 1) / 2 = 1.5
       {4, 1.2f},
       {.repetition_penalty = 2, .presence_penalty = 1},
       {},
       {0},
       1},
      {"equals after a penalty: lowest id", {2, 3}, {.presence_penalty = 1}, {}, {1}, 0},
      {"-inf stays", {-kInf, -3}, {.presence_penalty = -9}, {}, {0}, 1},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    EXPECT_EQ(run(c.logits, c.params, 0, c.prompt, c.output).token, c.want);
    SamplingParams cold = c.params;  // the same through temperature
    cold.temperature = 1;
    cold.top_k = 1;
    EXPECT_EQ(run(c.logits, cold, 0, c.prompt, c.output).token, c.want);
  }
}

TEST(Sampler, LogprobIsOfTheRawLogits) {
  const std::vector<float> logits = random_logits(3, 1003, 5);
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x));
  for (uint64_t d = 0; d < 50; ++d) {
    const Sampled s =
        run(logits, {.temperature = 1.7f, .top_k = 40, .presence_penalty = 1}, d, {}, {7});
    const double want = static_cast<double>(logits[static_cast<size_t>(s.token)]) - std::log(sum);
    EXPECT_NEAR(static_cast<double>(s.logprob), want, 2e-6);
  }
  EXPECT_EQ(run({4.0f}, {}).logprob, 0.0f);
}

TEST(Sampler, AgreesWithTheReference) {
  const float temperatures[] = {0.3f, 1.0f, 2.5f};
  const int32_t top_ks[] = {0, 1, 2, 7, 50, 600};
  const float top_ps[] = {1.0f, 0.999f, 0.9f, 0.5f, 0.05f};
  const float min_ps[] = {0.0f, 0.01f, 0.3f};
  int compared = 0, skipped = 0;
  uint64_t round = 0;
  std::vector<std::pair<float, int32_t>> scratch;
  for (float temperature : temperatures) {
    for (int32_t top_k : top_ks) {
      for (float top_p : top_ps) {
        for (float min_p : min_ps) {
          ++round;
          SamplingParams params = {.temperature = temperature,
                                   .top_k = top_k,
                                   .top_p = top_p,
                                   .min_p = min_p,
                                   .seed = round};
          const std::vector<float> logits = random_logits(round, 500, round % 3 == 0 ? 8.0f : 2.0f);
          std::vector<int32_t> prompt, output;
          if (round % 2 == 0) {
            params.repetition_penalty = 1.3f;
            params.presence_penalty = 0.5f;
            params.frequency_penalty = 0.25f;
            for (uint64_t i = 0; i < 60; ++i) {
              auto& history = i % 3 == 0 ? prompt : output;
              history.push_back(static_cast<int32_t>(random_bits(round, 5000 + i) % 100));
            }
          }
          const Reference ref = reference(logits, prompt, output, params);
          for (uint64_t draw = 0; draw < 40; ++draw) {
            double margin = 0;
            const double uniform = static_cast<double>(random_bits(params.seed, draw)) * 0x1p-64;
            const int32_t want = reference_draw(ref, uniform, &margin);
            const int32_t got = sample(logits, prompt, output, params, draw, scratch).token;
            EXPECT_THAT(ref.kept, testing::Contains(got));
            if (margin < 1e-5) {  // FP32 against FP64 may differ at a boundary
              ++skipped;
            } else {
              ++compared;
              EXPECT_EQ(got, want) << "round " << round << " draw " << draw;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 10000);
  EXPECT_LT(skipped, compared / 100);
}

TEST(Sampler, LargeVocabularyAgreesWithTheReference) {
  std::vector<std::pair<float, int32_t>> scratch;
  std::vector<float> equal(200003, 1.5f);  // the whole vocabulary in one bucket
  const std::vector<float> spread = random_logits(11, 200003, 12.0f);
  for (const std::vector<float>* logits :
       {&spread, static_cast<const std::vector<float>*>(&equal)}) {
    for (const SamplingParams& params :
         {SamplingParams{.temperature = 1, .top_p = 0.95f, .seed = 4},
          SamplingParams{.temperature = 0.8f, .top_k = 100000, .top_p = 0.9f, .seed = 5},
          SamplingParams{.temperature = 1.5f, .top_k = 20, .min_p = 0.01f, .seed = 6}}) {
      const Reference ref = reference(*logits, {}, {}, params);
      int equal_draws = 0;
      for (uint64_t draw = 0; draw < 10; ++draw) {
        double margin = 0;
        const double uniform = static_cast<double>(random_bits(params.seed, draw)) * 0x1p-64;
        const int32_t want = reference_draw(ref, uniform, &margin);
        const int32_t got = sample(*logits, {}, {}, params, draw, scratch).token;
        equal_draws += got == want;
        // FP32 sums of 200k tokens cannot hit every boundary, but never leave the neighbourhood.
        EXPECT_LE(std::abs(got - want), 2) << params.top_k << " draw " << draw;
      }
      EXPECT_GE(equal_draws, 8);
    }
  }
}

TEST(Sampler, DrawsFollowTheDistribution) {
  const std::vector<float> logits = {1.0f, 0.0f, 2.5f, -1.0f, 0.5f, 2.5f, 1.7f, -2.0f};
  const SamplingParams params = {.temperature = 0.9f, .top_p = 0.97f, .seed = 20240229};
  const Reference ref = reference(logits, {}, {}, params);
  constexpr int kDraws = 200000;
  std::vector<int> count(logits.size());
  for (uint64_t d = 0; d < kDraws; ++d) {
    ++count[static_cast<size_t>(run(logits, params, d).token)];
  }
  double chi_square = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (ref.probability[i] == 0) {
      EXPECT_EQ(count[i], 0);
      continue;
    }
    const double expected = ref.probability[i] * kDraws;
    chi_square += (count[i] - expected) * (count[i] - expected) / expected;
  }
  ASSERT_EQ(ref.kept.size(), 6u);
  EXPECT_LT(chi_square, 20.5);  // 5 degrees of freedom: p = 0.001
}

TEST(Sampler, SeedAndDrawDecide) {
  const std::vector<float> logits = random_logits(1, 100, 1.0f);
  std::vector<int32_t> a, b, other;
  for (uint64_t d = 0; d < 50; ++d) {
    a.push_back(run(logits, {.temperature = 1, .seed = 9}, d).token);
    other.push_back(run(logits, {.temperature = 1, .seed = 10}, d).token);
  }
  for (uint64_t d = 50; d-- > 0;) {  // any order, with scratch full of something else
    std::vector<std::pair<float, int32_t>> scratch(1000, {kNan, 77});
    b.push_back(sample(logits, {}, {}, {.temperature = 1, .seed = 9}, d, scratch).token);
  }
  std::reverse(b.begin(), b.end());
  EXPECT_EQ(a, b);
  EXPECT_NE(a, other);
}

TEST(Sampler, ParametersAreChecked) {
  const struct {
    SamplingParams params;
    std::string_view name;  // empty: good
  } kCases[] = {
      {{}, ""},
      {{.temperature = -1}, "temperature"},
      {{.temperature = kNan}, "temperature"},
      {{.temperature = kInf}, "temperature"},
      {{.top_k = -1}, "top_k"},
      {{.top_p = 0}, "top_p"},
      {{.top_p = 1.01f}, "top_p"},
      {{.top_p = kNan}, "top_p"},
      {{.min_p = -0.1f}, "min_p"},
      {{.min_p = 2}, "min_p"},
      {{.repetition_penalty = 0}, "repetition_penalty"},
      {{.presence_penalty = kNan}, "presence_penalty"},
      {{.frequency_penalty = kInf}, "frequency_penalty"},
  };
  for (const auto& c : kCases) {
    const Result<void> got = check_sampling(c.params);
    EXPECT_EQ(got.has_value(), c.name.empty());
    if (!got) {
      EXPECT_EQ(got.error().code(), Code::kInvalidArgument);
      EXPECT_THAT(got.error().message(), testing::HasSubstr(std::string(c.name)));
    }
  }
}

}  // namespace
}  // namespace nibble::runtime
