// Every mix of formats on an NVIDIA GPU against the CPU: tiny checkpoints, the same logits within
// BF16, the same bits in chunks and with compressed scales. Skipped where no GPU is usable.
#include <gtest/gtest.h>

#include <cmath>

#include "cli/cuda_model.h"
#include "recipe/tiny_checkpoint_testing.h"
#include "support/loaded_model.h"

namespace nibble {
namespace {

using formats::FormatId;
using kernels::Activations;
using testing::LoadedModel;
using testing::TinyOptions;

bool has(const std::string& module, const std::string& part) {
  return module.find(part) != std::string::npos;
}

std::unique_ptr<LoadedModel> on_cuda(const std::string& directory, plan::Scales scales) {
  Result<recipe::Recipe> recipe = recipe::read_recipe(directory);
  plan::PlanOptions options;
  options.scales = scales;
  ThreadPool pool(2);
  cli::CudaModel model = std::move(cli::load_cuda_model(*recipe, options, kernels::KvType::kBf16,
                                                        *device::cuda_device(0), pool, {})
                                       .value());
  return std::make_unique<LoadedModel>(std::move(model.model), std::move(model.report));
}

std::vector<int32_t> prompt_of(int32_t tokens, const TinyOptions& tiny) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < tokens; ++i) {
    prompt.push_back((i * 131 + 7) % static_cast<int32_t>(tiny.vocab));
  }
  return prompt;
}

void expect_like_the_cpu(const TinyOptions& tiny) {
  testing::TempDir dir;
  testing::write_tiny(dir.path(), testing::tiny_tensors(tiny), testing::tiny_config(tiny));
  LoadedModel cpu(dir.path(), Activations::kBf16, 2);
  ASSERT_TRUE(cpu.ok());
  const std::vector<int32_t> prompt = prompt_of(70, tiny);
  const LoadedModel::Output want = cpu.whole(prompt);
  const std::unique_ptr<LoadedModel> plain = on_cuda(dir.path(), plan::Scales::kPlain);
  const LoadedModel::Output got = plain->whole(prompt);
  // Rounding moves a near tie to another expert, which changes that row and later ones: rows count
  // until the first such choice, and most choices must agree.
  const auto rows = prompt.size();
  const size_t top_k = static_cast<size_t>(tiny.top_k), vocab = static_cast<size_t>(tiny.vocab);
  size_t same = rows;
  for (int64_t layer = tiny.dense_layers; layer < tiny.layers; ++layer) {
    for (size_t i = 0; i < rows * top_k; ++i) {
      const size_t at = static_cast<size_t>(layer) * rows * top_k + i;
      if (got.topk_ids[at] != want.topk_ids[at]) same = std::min(same, i / top_k);
    }
  }
  EXPECT_GE(same, 8u);
  double difference = 0, size = 0;
  for (size_t i = 0; i < same * vocab; ++i) {
    const double d = static_cast<double>(got.logits[i]) - static_cast<double>(want.logits[i]);
    difference += std::isnan(d) ? INFINITY : d * d;
    size += static_cast<double>(want.logits[i]) * static_cast<double>(want.logits[i]);
  }
  EXPECT_LE(std::sqrt(difference / size), 0.02);

  EXPECT_EQ(got.logits, plain->together({prompt}, [](size_t, size_t) { return size_t{9}; })[0]);
  EXPECT_EQ(got.logits, plain->together({prompt}, [](size_t, size_t) { return size_t{1}; })[0]);
  EXPECT_EQ(got.logits, on_cuda(dir.path(), plan::Scales::kCsf)->whole(prompt).logits);
}

class CudaFormats : public ::testing::Test {
 protected:
  void SetUp() override {
    const Result<device::CudaDevice> device = device::cuda_device(0);
    if (!device) GTEST_SKIP() << device.error().message();
  }
};

TEST_F(CudaFormats, ExpertsInEveryFormat) {
  for (const FormatId format : {FormatId::kBf16, FormatId::kNvfp4, FormatId::kMxfp4,
                                FormatId::kMxfp8, FormatId::kFp8Block, FormatId::kNf3}) {
    SCOPED_TRACE(formats::block_format(format).name);
    TinyOptions tiny;
    tiny.format = [format](const std::string& module) {
      return testing::tiny_is_mlp(module) ? format : FormatId::kBf16;
    };
    expect_like_the_cpu(tiny);
  }
}

// Wide enough that compressing pays, and with groups of two and of three chunks at the end.
TEST_F(CudaFormats, CompressedScalesGiveTheSameBits) {
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8}) {
    SCOPED_TRACE(formats::block_format(format).name);
    TinyOptions tiny;
    tiny.hidden = 1664;
    tiny.inner = 960;
    tiny.format = [format](const std::string& module) {
      return testing::tiny_is_mlp(module) ? format : FormatId::kBf16;
    };
    testing::TempDir dir;
    testing::write_tiny(dir.path(), testing::tiny_tensors(tiny), testing::tiny_config(tiny));
    const std::unique_ptr<LoadedModel> plain = on_cuda(dir.path(), plan::Scales::kPlain),
                                       csf = on_cuda(dir.path(), plan::Scales::kCsf);
    ASSERT_FALSE(csf->report().scales.empty());
    for (const load::ScaleReport& s : csf->report().scales) {
      EXPECT_TRUE(s.compressed()) << "layer " << s.layer << ' ' << recipe::role_name(s.role) << ": "
                                  << s.csf_bytes << " of " << s.plain_bytes << " bytes";
    }
    const std::vector<int32_t> prompt = prompt_of(90, tiny);
    const std::vector<float> want = plain->whole(prompt).logits;
    EXPECT_EQ(want, csf->whole(prompt).logits);
    for (const size_t chunk : {size_t{1}, size_t{5}}) {
      EXPECT_EQ(want, csf->together({prompt}, [&](size_t, size_t) { return chunk; })[0])
          << "chunks of " << chunk;
    }
  }
}

TEST_F(CudaFormats, LinearLayersInEveryFormat) {
  for (const FormatId format : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8,
                                FormatId::kFp8Block, FormatId::kFp8Channel, FormatId::kFp8Tensor}) {
    SCOPED_TRACE(formats::block_format(format).name);
    TinyOptions tiny;
    tiny.attention_bias = true;
    tiny.format = [format](const std::string& module) {
      if (testing::tiny_is_mlp(module)) return FormatId::kNvfp4;
      return has(module, "self_attn") || has(module, "lm_head") ? format : FormatId::kBf16;
    };
    expect_like_the_cpu(tiny);
  }
}

TEST_F(CudaFormats, EveryProjectionAnotherFormat) {
  TinyOptions tiny;
  tiny.dense_layers = 1;
  tiny.layers = 3;
  tiny.tied = true;
  tiny.head = false;
  tiny.format = [](const std::string& module) {
    if (has(module, "q_proj")) return FormatId::kMxfp8;
    if (has(module, "v_proj")) return FormatId::kNvfp4;
    if (has(module, "layers.0.mlp.down")) return FormatId::kMxfp4;
    if (has(module, "layers.0.mlp")) return FormatId::kMxfp8;
    if (has(module, "shared_experts")) return FormatId::kBf16;
    if (has(module, "down_proj")) return FormatId::kMxfp8;
    return testing::tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  expect_like_the_cpu(tiny);
}

TEST_F(CudaFormats, TiersOfExperts) {
  TinyOptions tiny;
  tiny.experts = 12;
  tiny.top_k = 4;
  tiny.format = [](const std::string& module) {
    const size_t at = module.find(".experts.");
    if (at == std::string::npos || has(module, "shared")) {
      return testing::tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
    }
    const FormatId of[] = {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kNf3, FormatId::kMxfp8};
    return of[static_cast<size_t>(std::stoi(module.substr(at + 9))) % 4];
  };
  expect_like_the_cpu(tiny);
}

}  // namespace
}  // namespace nibble
