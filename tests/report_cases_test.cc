// Cases from public bug reports that end in wrong logits (users' cases A1, A2, A5 to A9, A11, A13).
// Each tiny checkpoint is compared with its twin: the same weights decoded to FP32 and stored
// plain, so that every format, dialect and naming goes through loader and kernels and must mean the
// same.
#include <gtest/gtest.h>

#include <cmath>

#include "base/json.h"
#include "recipe/tiny_checkpoint_testing.h"
#include "support/loaded_model.h"

namespace nibble {
namespace {

using formats::FormatId;
using kernels::Activations;
using testing::TempDir;
using testing::TinyDialect;
using testing::TinyOptions;
using testing::TinyTensors;

const std::vector<int32_t> kPrompt = {5,  17,  300, 42, 42, 7,   511, 0,
                                      99, 256, 31,  8,  64, 128, 2,   77};

std::vector<float> logits_of(const std::string& directory) {
  testing::LoadedModel loaded(directory, Activations::kF32, 2);
  return loaded.ok() ? loaded.whole(kPrompt).logits : std::vector<float>();
}

// Every matrix of the checkpoint decoded to F32, under its own name.
TinyTensors twin(const std::string& directory, const TinyTensors& source) {
  const recipe::Recipe recipe = std::move(recipe::read_recipe(directory).value());
  TinyTensors out;
  for (const auto& [key, weight] : recipe.weights()) {
    if (plan::is_vector(key.role)) {
      const std::string& name = weight.codes.tensor->name;
      out[name] = source.at(name);
      continue;
    }
    const std::vector<float> values = testing::decode_weight(recipe.index(), weight);
    out[weight.name + ".weight"] = {
        formats::DType::kF32, {weight.meta.rows, weight.meta.cols}, testing::tiny_bytes(values)};
  }
  return out;
}

double rms(const std::vector<float>& v) {
  double sum = 0;
  for (const float x : v) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum / static_cast<double>(v.size()));
}

void expect_twin_agrees(const TinyOptions& options, TinyTensors tensors) {
  TempDir stored, plain;
  testing::write_tiny(stored.path(), tensors, testing::tiny_config(options));
  Json config = testing::tiny_config(options);
  config.erase("quantization_config");
  testing::write_tiny(plain.path(), twin(stored.path(), tensors), config);
  const std::vector<float> got = logits_of(stored.path()), want = logits_of(plain.path());
  ASSERT_FALSE(want.empty());
  ASSERT_EQ(got.size(), want.size());
  EXPECT_GT(rms(want), 0.05);
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 2e-5 * (1 + rms(want))) << "logit " << i;
  }
}

TEST(ReportCases, A1GateAndUpKeepTheirOwnGlobalScales) {
  for (const float ratio : {1.0f, 4.83e-05f / 3.85e-05f, 10.0f}) {
    TinyOptions options;
    options.global_factor = [&](const std::string& module) {
      return module.ends_with("up_proj") ? ratio : 1.0f;
    };
    expect_twin_agrees(options, testing::tiny_tensors(options));
  }
}

TEST(ReportCases, A2BothNvfp4DialectsGiveTheSameBits) {
  std::vector<float> seen[2];
  for (const TinyDialect dialect : {TinyDialect::kModelOpt, TinyDialect::kCompressedTensors}) {
    TinyOptions options;
    options.dialect = dialect;
    TempDir dir;
    testing::write_tiny(dir.path(), testing::tiny_tensors(options), testing::tiny_config(options));
    seen[dialect == TinyDialect::kModelOpt ? 0 : 1] = logits_of(dir.path());
  }
  ASSERT_FALSE(seen[0].empty());
  EXPECT_EQ(seen[0], seen[1]);
}

TEST(ReportCases, A5AndA6TheMtpLayerHasItsOwnFormat) {
  for (const FormatId format : {FormatId::kFp8Block, FormatId::kBf16}) {
    TinyOptions options;
    options.mtp_layers = 1;
    options.format = [&](const std::string& module) {
      if (!testing::tiny_is_mlp(module)) return FormatId::kBf16;
      return module.find("layers.2.") != std::string::npos ? format : FormatId::kNvfp4;
    };
    expect_twin_agrees(options, testing::tiny_tensors(options));
  }
}

TEST(ReportCases, A7QuantizedHead) {
  TinyOptions options;
  options.format = [](const std::string& module) {
    return module == "lm_head" || testing::tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  expect_twin_agrees(options, testing::tiny_tensors(options));
}

TEST(ReportCases, A7TiedEmbeddingServesAsHead) {
  TinyOptions tied;
  tied.tied = true;
  tied.head = false;
  TinyTensors tensors = testing::tiny_tensors(tied);
  TempDir one, two;
  testing::write_tiny(one.path(), tensors, testing::tiny_config(tied));
  TinyOptions untied = tied;
  untied.tied = false;
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  testing::write_tiny(two.path(), tensors, testing::tiny_config(untied));
  const std::vector<float> want = logits_of(two.path());
  ASSERT_FALSE(want.empty());
  EXPECT_EQ(logits_of(one.path()), want);
}

TEST(ReportCases, A8MixedQkvAndBothPrefixes) {
  std::vector<float> seen;
  for (const std::string prefix : {"model.", "model.language_model."}) {
    TinyOptions options;
    options.prefix = prefix;
    options.format = [](const std::string& module) {
      const bool quantized =
          testing::tiny_is_mlp(module) || module.ends_with("k_proj") || module.ends_with("v_proj");
      return quantized ? FormatId::kNvfp4 : FormatId::kBf16;
    };
    const TinyTensors tensors = testing::tiny_tensors(options);
    expect_twin_agrees(options, tensors);
    TempDir dir;
    testing::write_tiny(dir.path(), tensors, testing::tiny_config(options));
    const std::vector<float> logits = logits_of(dir.path());
    if (!seen.empty()) {
      EXPECT_EQ(seen, logits);
    }
    seen = logits;
  }
}

TEST(ReportCases, A9SwappingGateAndUpWouldShow) {
  TinyOptions options;
  TinyTensors tensors = testing::tiny_tensors(options);
  expect_twin_agrees(options, tensors);
  TempDir right, swapped;
  testing::write_tiny(right.path(), tensors, testing::tiny_config(options));
  TinyTensors other;
  for (auto& [name, tensor] : tensors) {
    std::string renamed = name;
    const size_t gate = name.find("gate_proj"), up = name.find("up_proj");
    if (gate != std::string::npos) renamed.replace(gate, 9, "up_proj");
    if (up != std::string::npos) renamed.replace(up, 7, "gate_proj");
    other[renamed] = tensor;
  }
  testing::write_tiny(swapped.path(), other, testing::tiny_config(options));
  EXPECT_NE(logits_of(right.path()), logits_of(swapped.path()));
}

TEST(ReportCases, A11StackedExpertsEqualSingleOnes) {
  for (const FormatId format : {FormatId::kMxfp4, FormatId::kMxfp8, FormatId::kBf16}) {
    std::vector<float> seen[2];
    for (const bool stacked : {false, true}) {
      TinyOptions options;
      options.stacked = stacked;
      options.format = [&](const std::string& module) {
        return module.find(".experts.") != std::string::npos ? format : FormatId::kBf16;
      };
      TempDir dir;
      testing::write_tiny(dir.path(), testing::tiny_tensors(options),
                          testing::tiny_config(options));
      seen[stacked ? 1 : 0] = logits_of(dir.path());
    }
    ASSERT_FALSE(seen[0].empty());
    EXPECT_EQ(seen[0], seen[1]);
  }
}

TEST(ReportCases, A13SmallGlobalScalesAreApplied) {
  TinyOptions options;
  options.global_factor = [](const std::string&) { return 0x1p-10f; };
  TinyTensors tensors = testing::tiny_tensors(options);
  // Payload up by 2^6 where E4M3 allows it, so that the activations still matter.
  expect_twin_agrees(options, tensors);
  TempDir small, normal;
  testing::write_tiny(small.path(), tensors, testing::tiny_config(options));
  const TinyOptions plain;
  testing::write_tiny(normal.path(), testing::tiny_tensors(plain), testing::tiny_config(plain));
  EXPECT_NE(logits_of(small.path()), logits_of(normal.path()));
}

}  // namespace
}  // namespace nibble
