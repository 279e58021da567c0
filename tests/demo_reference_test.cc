// The demo model in BF16 (not in this repository: name its folder in NIBBLE_DEMO_BF16) against the
// numbers that Hugging Face transformers gave for it: top-20 logits, greedy texts, perplexity.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "base/file.h"
#include "base/json.h"
#include "runtime/engine.h"
#include "support/loaded_model.h"
#include "text/tokenizer.h"

namespace nibble {
namespace {

using kernels::Activations;

class Demo : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* given = std::getenv("NIBBLE_DEMO_BF16");
    if (given == nullptr) {
      GTEST_SKIP()
          << "the BF16 demo is 76 MB and not in the repository; set NIBBLE_DEMO_BF16 to it";
    }
    directory_ = given;
    Result<Json> json = read_json_file(NIBBLE_SOURCE_DIR "/tests/data/demo_reference.json");
    ASSERT_TRUE(json) << json.error().message();
    reference_ = *json;
  }
  std::string directory_;
  Json reference_;
};

std::vector<int32_t> ids_of(const Json& list) { return list.get<std::vector<int32_t>>(); }

TEST_F(Demo, Top20LogitsAndGreedyTextsEqualTheReference) {
  testing::LoadedModel loaded(directory_, Activations::kF32, 2);
  ASSERT_TRUE(loaded.ok());
  const size_t vocab = static_cast<size_t>(loaded.model().config().vocab_size);
  for (const Json& prompt : reference_["prompts"]) {
    SCOPED_TRACE(prompt["text"].get<std::string>());
    std::vector<int32_t> tokens = ids_of(prompt["ids"]);
    const std::vector<float> logits = loaded.whole(tokens).logits;
    const float* last = logits.data() + (tokens.size() - 1) * vocab;
    for (const Json& pair : prompt["top20"]) {
      EXPECT_NEAR(last[pair[0].get<size_t>()], pair[1].get<double>(), 1e-3);
    }
    // Teacher-forced: the argmax after each greedy token is the next one.
    const std::vector<int32_t> greedy = ids_of(prompt["greedy_ids"]);
    const size_t prompt_rows = tokens.size();
    tokens.insert(tokens.end(), greedy.begin(), greedy.end() - 1);
    const std::vector<float> all = loaded.whole(tokens).logits;
    for (size_t i = 0; i < greedy.size(); ++i) {
      const float* row = all.data() + (prompt_rows - 1 + i) * vocab;
      EXPECT_EQ(std::max_element(row, row + vocab) - row, greedy[i]) << "step " << i;
    }
  }
}

TEST_F(Demo, PerplexityOfTheFirstWindowsEqualsTheReference) {
  testing::LoadedModel loaded(directory_, Activations::kF32, 2);
  ASSERT_TRUE(loaded.ok());
  const Result<text::Tokenizer> tokenizer = text::Tokenizer::open(directory_);
  ASSERT_TRUE(tokenizer) << tokenizer.error().message();
  const Result<std::string> text =
      read_text_file(NIBBLE_SOURCE_DIR "/tests/data/demo_valid_head.txt");
  ASSERT_TRUE(text);
  const std::vector<int32_t> ids = tokenizer->encode(*text);
  const size_t vocab = static_cast<size_t>(loaded.model().config().vocab_size);
  double nll = 0;
  constexpr size_t kWindow = 512, kWindows = 16;
  ASSERT_GE(ids.size(), kWindow * kWindows);
  for (size_t w = 0; w < kWindows; ++w) {
    const auto begin = ids.begin() + static_cast<int64_t>(w * kWindow);
    const std::vector<int32_t> window(begin, begin + kWindow);
    const std::vector<float> logits = loaded.whole(window).logits;
    for (size_t i = 1; i < kWindow; ++i) {
      const float* row = logits.data() + (i - 1) * vocab;
      const double top = *std::max_element(row, row + vocab);
      double sum = 0;
      for (size_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<double>(row[v]) - top);
      nll += top + std::log(sum) - static_cast<double>(row[static_cast<size_t>(window[i])]);
    }
    if (w == 0) {
      EXPECT_NEAR(std::exp(nll / (kWindow - 1)), 15.2777, 15.2777 * 5e-4);
    }
  }
  EXPECT_NEAR(std::exp(nll / (kWindows * (kWindow - 1))), 15.8519, 15.8519 * 5e-4);
}

}  // namespace
}  // namespace nibble
