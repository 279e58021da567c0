// Whole models against the reference outputs that Hugging Face transformers computed in FP32 for
// the fixtures (tests/data/fixtures): logits, hidden states, chosen experts, greedy continuations;
// and the promise that a prompt's bits depend on nothing beside it.
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/engine.h"
#include "support/fixture.h"

namespace nibble {
namespace {

using kernels::Activations;
using testing::ids;
using testing::LoadedModel;

const char* const kPrompts[] = {"p7", "p40"};

class Fixture : public ::testing::TestWithParam<const char*> {
 protected:
  std::string directory() const { return testing::fixtures_dir() + "/" + GetParam(); }
  testing::TensorFile reference() const {
    return testing::TensorFile(directory() + "/reference.safetensors");
  }
};

double max_difference(const std::vector<float>& got, const std::vector<float>& want) {
  EXPECT_EQ(got.size(), want.size());
  double worst = 0;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    const double d = std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    worst = std::isnan(d) ? INFINITY : std::max(worst, d);
  }
  return worst;
}

double largest(const std::vector<float>& values) {
  double m = 0;
  for (const float v : values) m = std::max(m, std::abs(static_cast<double>(v)));
  return m;
}

TEST_P(Fixture, LogitsHiddenStatesAndExpertsEqualTheReference) {
  LoadedModel loaded(directory(), Activations::kF32, 2);
  ASSERT_TRUE(loaded.ok());
  const testing::TensorFile file = reference();
  const recipe::ModelConfig& c = loaded.model().config();
  for (const std::string prompt : kPrompts) {
    SCOPED_TRACE(prompt);
    const std::vector<int32_t> tokens = ids(file, prompt + ".input_ids");
    const size_t rows = tokens.size();
    const LoadedModel::Output out = loaded.whole(tokens);
    EXPECT_LE(max_difference(out.logits, file.get(prompt + ".logits").as<float>()), 1e-4);
    for (int64_t layer = c.first_dense_layers; layer < c.layers; ++layer) {
      const std::string name = cat(prompt, ".moe.", layer, ".topk_");
      const size_t count = rows * static_cast<size_t>(c.top_k);
      const auto begin = static_cast<int64_t>(static_cast<size_t>(layer) * count);
      const std::vector<int32_t> chosen(out.topk_ids.begin() + begin,
                                        out.topk_ids.begin() + begin + static_cast<int64_t>(count));
      EXPECT_EQ(chosen, file.get(name + "ids").as<int32_t>()) << name;
      const std::vector<float> weights(
          out.topk_weights.begin() + begin,
          out.topk_weights.begin() + begin + static_cast<int64_t>(count));
      EXPECT_LE(max_difference(weights, file.get(name + "weights").as<float>()), 1e-5);
    }
    if (prompt != "p7") continue;
    for (int64_t layer = 0; layer <= c.layers; ++layer) {
      const std::string name = layer == 0 ? "p7.hidden.embed" : cat("p7.hidden.", layer - 1);
      const std::vector<float> want = file.get(name).as<float>();
      const auto begin = layer * static_cast<int64_t>(want.size());
      const std::vector<float> got(out.hidden.begin() + begin,
                                   out.hidden.begin() + begin + static_cast<int64_t>(want.size()));
      EXPECT_LE(max_difference(got, want), 1e-4 * largest(want)) << name;
    }
  }
}

TEST_P(Fixture, Bf16ActivationsStayNearWhereTheSameExpertsAreChosen) {
  LoadedModel loaded(directory(), Activations::kBf16, 2);
  ASSERT_TRUE(loaded.ok());
  const testing::TensorFile file = reference();
  const recipe::ModelConfig& c = loaded.model().config();
  for (const std::string prompt : kPrompts) {
    SCOPED_TRACE(prompt);
    const LoadedModel::Output out = loaded.whole(ids(file, prompt + ".input_ids"));
    testing::expect_near_where_experts_agree(c, file, prompt, out);
  }
}

TEST_P(Fixture, GreedyContinuationEqualsTheReference) {
  const testing::TensorFile file = reference();
  LoadedModel loaded(directory(), Activations::kF32, 2);
  ASSERT_TRUE(loaded.ok());
  for (const std::string prompt : kPrompts) {
    SCOPED_TRACE(prompt);
    Result<recipe::Recipe> recipe = recipe::read_recipe(directory());
    ASSERT_TRUE(recipe) << recipe.error().message();
    ThreadPool pool(2);
    plan::PlanOptions plan_options;
    plan_options.activations = Activations::kF32;
    Result<plan::PrecisionPlan> plan = plan::make_plan(*recipe, plan_options);
    ASSERT_TRUE(plan);
    Result<load::LoadedWeights> weights = load::load_weights(*recipe, *plan, pool, {});
    ASSERT_TRUE(weights);
    runtime::EngineOptions options;
    options.activations = Activations::kF32;
    options.threads = 2;
    Result<std::unique_ptr<runtime::Engine>> engine = runtime::Engine::create(
        std::move(*model::make_model(recipe->config(), weights->store)), options);
    ASSERT_TRUE(engine) << engine.error().message();
    std::vector<int32_t> got;
    runtime::Request request;
    request.prompt = ids(file, prompt + ".input_ids");
    request.max_tokens = 16;
    request.callbacks.on_token = [&](const runtime::TokenEvent& e) { got.push_back(e.token); };
    const Result<runtime::RequestId> id = (*engine)->submit(std::move(request));
    ASSERT_TRUE(id) << id.error().message();
    (*engine)->wait(*id);
    EXPECT_EQ(got, ids(file, prompt + ".greedy_ids"));
  }
}

TEST_P(Fixture, SamePromptSameBits) {
  const testing::TensorFile file = reference();
  const std::vector<int32_t> prompt = ids(file, "p40.input_ids");
  for (const Activations activations : {Activations::kF32, Activations::kBf16}) {
    LoadedModel one(directory(), activations, 1), two(directory(), activations, 2);
    ASSERT_TRUE(one.ok() && two.ok());
    const std::vector<float> whole = one.whole(prompt).logits;
    EXPECT_EQ(whole, two.whole(prompt).logits) << "threads";
    for (const size_t chunk : {size_t{1}, size_t{7}}) {
      EXPECT_EQ(whole, one.together({prompt}, [&](size_t, size_t) { return chunk; })[0])
          << "chunks of " << chunk;
    }
    // Eight prompts of different lengths, stepped together in ragged chunks.
    std::vector<std::vector<int32_t>> prompts;
    for (const size_t length : {40, 7, 1, 3, 70, 17, 64, 33}) {
      std::vector<int32_t> tokens;
      for (size_t t = 0; t < length; ++t) {
        tokens.push_back(prompt[(t * 7 + length) % prompt.size()]);
      }
      prompts.push_back(tokens);
    }
    const auto mixed =
        two.together(prompts, [](size_t i, size_t step) { return (i * 3 + step) % 6; });
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(one.whole(prompts[i]).logits, mixed[i]) << "prompt " << i << " in a batch";
    }
  }
}

// Compressed scales hold the same bytes, so every logit has the same bits: alone, in chunks and in
// a batch, whatever the activations.
void expect_csf_changes_no_bit(const std::string& directory, const std::vector<int32_t>& prompt,
                               bool expect_compressed) {
  for (const Activations activations : {Activations::kF32, Activations::kBf16}) {
    LoadedModel plain(directory, activations, 1);
    LoadedModel csf(directory, activations, 2, plan::Scales::kCsf);
    ASSERT_TRUE(plain.ok() && csf.ok());
    int64_t compressed = 0;
    for (const load::ScaleReport& s : csf.report().scales) compressed += s.compressed() ? 1 : 0;
    EXPECT_EQ(compressed > 0, expect_compressed);
    EXPECT_EQ(csf.report().resident_bytes < plain.report().resident_bytes, expect_compressed);
    EXPECT_EQ(plain.whole(prompt).logits, csf.whole(prompt).logits);
    const std::vector<std::vector<int32_t>> prompts = {
        prompt, {prompt.begin(), prompt.begin() + 5}, {prompt.rbegin(), prompt.rend()}};
    const auto mixed = [](size_t i, size_t step) { return (i * 2 + step) % 5; };
    EXPECT_EQ(plain.together(prompts, mixed), csf.together(prompts, mixed));
  }
}

TEST_P(Fixture, CompressedScalesGiveTheSameBits) {
  const bool quantized = std::string(GetParam()).find("fp4") != std::string::npos;
  expect_csf_changes_no_bit(directory(), ids(reference(), "p40.input_ids"), quantized);
}

TEST(BundledDemo, CompressedScalesGiveTheSameBits) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < 120; ++i) prompt.push_back((i * 977 + 13) % 8188);
  expect_csf_changes_no_bit(NIBBLE_SOURCE_DIR "/models/demo", prompt, true);
}

INSTANTIATE_TEST_SUITE_P(Glm4Moe, Fixture, ::testing::ValuesIn(testing::kGlm4MoeFixtures),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace nibble
