#include "kernels/router/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace nibble::kernels {
namespace {

using testing::ElementsAre;

struct Chosen {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Chosen run(const std::vector<float>& logits, const RouterParams& p,
           device::Isa isa = device::available_isas().back(), int threads = 1) {
  ThreadPool pool(threads);
  const Exec exec{.pool = &pool, .isa = isa};
  const int64_t rows = static_cast<int64_t>(logits.size()) / p.experts;
  Chosen out{std::vector<int32_t>(static_cast<size_t>(rows * p.top_k), -1),
             std::vector<float>(static_cast<size_t>(rows * p.top_k))};
  route(exec, logits.data(), rows, p, out.ids.data(), out.weights.data());
  return out;
}

/// Brute force in double, by full sorts. gap: how far the choice is from another one.
struct Reference {
  std::vector<int32_t> ids;
  std::vector<double> weights;
  double gap = 1.0;
};

Reference reference(const float* logits, const RouterParams& p) {
  const size_t experts = static_cast<size_t>(p.experts), k = static_cast<size_t>(p.top_k);
  std::vector<double> score(logits, logits + experts);
  if (p.score == RouterScore::kSigmoid) {
    for (double& s : score) s = 1 / (1 + std::exp(-s));
  } else if (p.score == RouterScore::kSoftmax) {
    double sum = 0;
    for (double& s : score) sum += s = std::exp(s);
    for (double& s : score) s /= sum;
  }
  std::vector<double> biased = score;
  for (size_t e = 0; e < experts; ++e) {
    if (p.correction_bias != nullptr) biased[e] += static_cast<double>(p.correction_bias[e]);
  }
  Reference out;
  const size_t size = experts / static_cast<size_t>(p.groups);
  std::vector<std::pair<double, size_t>> groups;
  for (size_t g = 0; g < static_cast<size_t>(p.groups); ++g) {
    std::vector<double> members(biased.begin() + static_cast<int64_t>(g * size),
                                biased.begin() + static_cast<int64_t>((g + 1) * size));
    std::sort(members.rbegin(), members.rend());
    groups.emplace_back(-(members[0] + (size > 1 ? members[1] : 0.0)), g);
  }
  std::sort(groups.begin(), groups.end());
  const size_t kept = static_cast<size_t>(p.top_groups);
  if (kept < groups.size()) out.gap = groups[kept].first - groups[kept - 1].first;
  std::vector<std::pair<double, size_t>> order;
  for (size_t g = 0; g < kept; ++g) {
    for (size_t i = 0; i < size; ++i) {
      const size_t e = groups[g].second * size + i;
      order.emplace_back(-biased[e], e);
    }
  }
  std::sort(order.begin(), order.end());
  if (k < order.size()) out.gap = std::min(out.gap, order[k].first - order[k - 1].first);
  for (size_t i = 0; i < k; ++i) out.ids.push_back(static_cast<int32_t>(order[i].second));
  std::sort(out.ids.begin(), out.ids.end());
  double sum = 0;
  for (const int32_t id : out.ids) {
    const double s = score[static_cast<size_t>(id)];
    out.weights.push_back(p.score == RouterScore::kSoftmaxSelected ? std::exp(s) : s);
    sum += out.weights.back();
  }
  const bool divide = p.normalize || p.score == RouterScore::kSoftmaxSelected;
  for (double& w : out.weights) w *= static_cast<double>(p.scaling) / (divide ? sum : 1.0);
  return out;
}

struct Case {
  const char* name;
  RouterScore score;
  int64_t experts, top_k, groups, top_groups;
  bool normalize, bias;
  float scaling;
};
constexpr Case kCases[] = {
    {"glm4_moe", RouterScore::kSigmoid, 128, 8, 1, 1, true, true, 2.5f},
    {"deepseek_v3", RouterScore::kSigmoid, 256, 8, 8, 4, true, true, 2.5f},
    {"small groups", RouterScore::kSigmoid, 16, 4, 4, 2, true, true, 2.5f},
    {"groups without bias", RouterScore::kSoftmax, 64, 6, 8, 3, false, false, 16.0f},
    {"groups of one", RouterScore::kSigmoid, 8, 2, 8, 3, true, true, 1.0f},
    {"qwen3_moe", RouterScore::kSoftmax, 128, 8, 1, 1, true, false, 1.0f},
    {"tail of lanes", RouterScore::kSoftmax, 21, 3, 1, 1, false, true, 1.0f},
    {"gpt_oss", RouterScore::kSoftmaxSelected, 32, 4, 1, 1, false, false, 1.0f},
    {"one expert", RouterScore::kSoftmax, 1, 1, 1, 1, true, false, 1.0f},
    {"all experts", RouterScore::kSigmoid, 5, 5, 1, 1, true, true, 1.0f},
};

TEST(Router, EqualsBruteForceOnRandomRows) {
  constexpr int64_t kRows = 10000;
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    std::mt19937 random(31);
    std::normal_distribution<float> normal;
    std::vector<float> logits(static_cast<size_t>(kRows * c.experts));
    for (float& x : logits) x = 2.0f * normal(random);
    std::vector<float> bias(static_cast<size_t>(c.experts));
    for (float& b : bias) b = 0.1f * normal(random);
    const RouterParams p{.score = c.score,
                         .experts = c.experts,
                         .top_k = c.top_k,
                         .groups = c.groups,
                         .top_groups = c.top_groups,
                         .normalize = c.normalize,
                         .scaling = c.scaling,
                         .correction_bias = c.bias ? bias.data() : nullptr};
    const Chosen got = run(logits, p);
    int64_t close = 0;
    for (int64_t t = 0; t < kRows; ++t) {
      const Reference want = reference(logits.data() + t * c.experts, p);
      if (want.gap < 1e-6) {  // FP32 may choose otherwise
        ++close;
        continue;
      }
      for (int64_t i = 0; i < c.top_k; ++i) {
        const size_t at = static_cast<size_t>(t * c.top_k + i);
        ASSERT_EQ(got.ids[at], want.ids[static_cast<size_t>(i)]) << "row " << t;
        const double w = want.weights[static_cast<size_t>(i)];
        ASSERT_NEAR(static_cast<double>(got.weights[at]), w, 3e-6 * w) << "row " << t;
      }
    }
    EXPECT_LT(close, kRows / 50);
    const size_t some = static_cast<size_t>(200 * c.experts);  // 13 tasks
    const std::vector<float> head(logits.begin(), logits.begin() + static_cast<int64_t>(some));
    const Chosen base = run(head, p);
    for (const device::Isa isa : device::available_isas()) {
      for (const int threads : {1, 2, 3}) {
        const Chosen other = run(head, p, isa, threads);
        EXPECT_EQ(other.ids, base.ids);
        EXPECT_EQ(std::memcmp(other.weights.data(), base.weights.data(),
                              base.weights.size() * sizeof(float)),
                  0)
            << device::isa_name(isa) << " " << threads;
      }
    }
  }
}

TEST(Router, TiesGoToTheLowerExpertAndGroup) {
  RouterParams p{.score = RouterScore::kSigmoid, .experts = 8, .top_k = 3};
  EXPECT_THAT(run(std::vector<float>(8, 0.5f), p).ids, ElementsAre(0, 1, 2));
  EXPECT_THAT(run({0, 1, 0, 1, 1, 1, 0, 0}, p).ids, ElementsAre(1, 3, 4));
  EXPECT_THAT(run({-0.0f, 0, -0.0f, 0, 0, 0, 0, 0},
                  {.score = RouterScore::kSoftmaxSelected, .experts = 8, .top_k = 2})
                  .ids,
              ElementsAre(0, 1));
  p.groups = 4;
  p.top_groups = 2;
  // Group 0 holds the best expert but the lowest sum; groups 1 to 3 tie.
  EXPECT_THAT(run({3, -9, 1, 1, 1, 1, 1, 1}, p).ids, ElementsAre(2, 3, 4));
}

TEST(Router, DroppedGroupsAreChosenOnlyWhenTheKeptRunOut) {
  RouterParams p{
      .score = RouterScore::kSigmoid, .experts = 6, .top_k = 2, .groups = 3, .top_groups = 1};
  const float bias[] = {-5, -5, -5, -5, -1, -5};
  p.correction_bias = bias;
  // All biased scores are negative, which an implementation that masks with 0 would get wrong.
  EXPECT_THAT(run({0, 0, 0, 0, 0, -9}, p).ids, ElementsAre(4, 5));
  p.top_k = 3;
  EXPECT_THAT(run({0, 0, 3, 0, 0, -9}, p).ids, ElementsAre(2, 4, 5));
}

TEST(Router, NaNNeverWinsOverANumber) {
  for (const RouterScore score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSoftmaxSelected}) {
    RouterParams p{.score = score, .experts = 6, .top_k = 3};
    const Chosen got = run({NAN, -50, NAN, 1, NAN, 0}, p);
    EXPECT_THAT(got.ids, ElementsAre(1, 3, 5));
    for (const float w : got.weights) EXPECT_TRUE(std::isfinite(w));
    EXPECT_NEAR(got.weights[1] + got.weights[2], 1.0f, 1e-5f);
    EXPECT_THAT(run(std::vector<float>(6, NAN), p).ids, ElementsAre(0, 1, 2));
    p.groups = 2;
    p.top_groups = 1;
    p.top_k = 2;
    EXPECT_THAT(run({9, NAN, NAN, 1, 2, 0}, p).ids, ElementsAre(3, 4));
  }
  RouterParams p{.score = RouterScore::kSigmoid, .experts = 4, .top_k = 4, .normalize = false};
  const Chosen got = run({0, NAN, 0, 0}, p);
  EXPECT_THAT(got.ids, ElementsAre(0, 1, 2, 3));
  EXPECT_TRUE(std::isnan(got.weights[1]));
  EXPECT_EQ(got.weights[0], 0.5f);
}

TEST(Router, ExtremeLogits) {
  RouterParams p{.score = RouterScore::kSoftmax, .experts = 4, .top_k = 2};
  EXPECT_THAT(run({1e30f, -1e30f, 0, -INFINITY}, p).weights, ElementsAre(1.0f, 0.0f));
  p.score = RouterScore::kSigmoid;
  EXPECT_THAT(run({-200, -INFINITY, -300, -250}, p).ids, ElementsAre(0, 1));  // all round to 0
  EXPECT_THAT(run({-200, -INFINITY, -300, -250}, p).weights, ElementsAre(0.0f, 0.0f));
  EXPECT_THAT(run({}, p).ids, ElementsAre());
}

}  // namespace
}  // namespace nibble::kernels
