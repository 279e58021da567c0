#include "plan/cuda_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recipe/tiny_checkpoint_testing.h"

namespace nibble::plan {
namespace {

using formats::FormatId;
using ::testing::HasSubstr;
using testing::TempDir;
using testing::TinyOptions;

Result<CudaPlan> plan_of(const TinyOptions& tiny, const PlanOptions& options = {}) {
  TempDir dir;
  testing::write_tiny(dir.path(), testing::tiny_tensors(tiny), testing::tiny_config(tiny));
  NIBBLE_TRY(const recipe::Recipe recipe, recipe::read_recipe(dir.path()));
  return make_cuda_plan(recipe, options);
}

bool has(const std::string& module, const char* part) {
  return module.find(part) != std::string::npos;
}

TEST(CudaPlan, WholeTilesTakeTheStoredBytes) {
  TinyOptions tiny;
  tiny.mtp_layers = 1;  // not loaded to the GPU yet
  const Result<CudaPlan> plan = plan_of(tiny);
  ASSERT_TRUE(plan) << plan.error().message();
  // 2 layers x (8 experts + 1 shared) x 3 projections of 256 x 128, 4.5 bits each.
  EXPECT_EQ(plan->weights_by_format.at("nvfp4"), 2 * 9 * 3 * 256 * 128 * 9 / 16);
  int64_t sum = 0;
  for (const auto& [format, bytes] : plan->weights_by_format) sum += bytes;
  EXPECT_EQ(sum, plan->weights_bytes);
  EXPECT_EQ(plan->kv_bytes_per_token, 2 * 2 * 128 * 2);
  EXPECT_EQ(plan->kv_bytes, plan->options.max_context * plan->kv_bytes_per_token);
  ASSERT_EQ(plan->groups.size(), 2u);
  ASSERT_EQ(plan->groups[1].size(), 1u);
  EXPECT_EQ(plan->groups[1][0].experts.size(), 8u);
}

TEST(CudaPlan, ExpertsOfEqualFormatsFormAGroup) {
  TinyOptions tiny;
  tiny.format = [](const std::string& module) {
    if (!testing::tiny_is_mlp(module)) return FormatId::kBf16;
    if (has(module, "layers.1.mlp.experts.3.") || has(module, "layers.1.mlp.experts.5.")) {
      return FormatId::kMxfp8;
    }
    if (has(module, "layers.1.mlp.experts.6.down")) return FormatId::kBf16;
    return FormatId::kNvfp4;
  };
  const Result<CudaPlan> plan = plan_of(tiny);
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->groups[0].size(), 1u);
  ASSERT_EQ(plan->groups[1].size(), 3u);
  std::vector<std::vector<int32_t>> experts;
  for (const CudaExpertGroup& group : plan->groups[1]) experts.push_back(group.experts);
  EXPECT_THAT(experts,
              ::testing::UnorderedElementsAre(std::vector<int32_t>{0, 1, 2, 4, 7},
                                              std::vector<int32_t>{3, 5}, std::vector<int32_t>{6}));
}

TEST(CudaPlan, SlotsHoldTheLargestMlpAndStagingIsBounded) {
  TinyOptions tiny;
  tiny.dense_layers = 1;
  tiny.format = [](const std::string&) { return FormatId::kBf16; };
  const CudaStaging usual;
  Result<CudaPlan> plan = plan_of(tiny);
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->staging.slot_bytes, usual.slot_bytes);
  EXPECT_EQ(plan->staging.slots, usual.slots);
  EXPECT_EQ(plan->host_staging_bytes, usual.readers * usual.chunks * usual.chunk_bytes);
  EXPECT_LE(plan->host_staging_bytes, 64 << 20);
  EXPECT_EQ(plan->device_staging_bytes, usual.device_bytes());  // BF16 has no scales

  tiny.hidden = 512;
  tiny.dense_inner = 20480;
  plan = plan_of(tiny);
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_GE(plan->staging.slot_bytes, 2 * 512 * 20480 * 2);
  EXPECT_LT(plan->staging.slots, usual.slots);
  EXPECT_LE(plan->staging.device_bytes(), usual.device_bytes());
}

TEST(CudaPlan, WhatHasNoKernelIsNamed) {
  TinyOptions tiny;
  tiny.format = [](const std::string& module) {
    if (has(module, "layers.1.mlp.experts.3.up")) return FormatId::kMxfp8;
    return testing::tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  Result<CudaPlan> plan = plan_of(tiny);
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code(), Code::kUnsupported);
  EXPECT_THAT(plan.error().message(), HasSubstr("layer 1 expert 3: gate is nvfp4 and up mxfp8"));

  tiny.format = [](const std::string& module) {
    if (has(module, "layers.0.self_attn.o_proj")) return FormatId::kF32;
    return testing::tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  plan = plan_of(tiny);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message(), HasSubstr("layer 0 o: format f32 has no CUDA kernel"));

  tiny.format = [](const std::string& module) {
    const FormatId of[] = {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8, FormatId::kBf16,
                           FormatId::kFp8Block};
    const size_t at = module.find("layers.0.mlp.experts.");
    if (at != std::string::npos) return of[static_cast<size_t>(module[at + 21] - '0') % 5];
    return testing::tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  plan = plan_of(tiny);
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message(), HasSubstr("layer 0: experts of 5 different formats"));
}

}  // namespace
}  // namespace nibble::plan
