#include "plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recipe/tiny_checkpoint_testing.h"

namespace nibble::plan {
namespace {

using formats::FormatId;
using recipe::Role;
using ::testing::HasSubstr;
using testing::TempDir;
using testing::TinyOptions;

Result<PrecisionPlan> plan_of(const TinyOptions& tiny, const PlanOptions& options) {
  TempDir dir;
  testing::write_tiny(dir.path(), testing::tiny_tensors(tiny), testing::tiny_config(tiny));
  NIBBLE_TRY(const recipe::Recipe recipe, recipe::read_recipe(dir.path()));
  return make_plan(recipe, options);
}

TEST(Plan, BytesAreThoseOfTheFormats) {
  TinyOptions tiny;
  tiny.mtp_layers = 1;
  const Result<PrecisionPlan> plan = plan_of(tiny, {});
  ASSERT_TRUE(plan) << plan.error().message();
  // NVFP4: 3 layers x (8 experts + 1 shared) x 3 projections of 256 x 128, 4.5 bits each.
  EXPECT_EQ(plan->memory.weights_by_format.at("nvfp4"), 3 * 9 * 3 * 256 * 128 * 9 / 16);
  int64_t sum = 0;
  for (const auto& [format, bytes] : plan->memory.weights_by_format) sum += bytes;
  EXPECT_EQ(sum, plan->memory.weights_bytes);
  EXPECT_GT(plan->memory.mtp_bytes, 9 * 3 * 256 * 128 * 9 / 16);
  // BF16 keys and values: 2 layers x 2 heads x (64 + 64) x 2 bytes.
  EXPECT_EQ(plan->memory.kv_bytes_per_token, 2 * 2 * 128 * 2);
  EXPECT_EQ(plan->memory.kv_bytes, 4096 * plan->memory.kv_bytes_per_token);
}

TEST(Plan, LeavesTheMtpLayerOutWhenAsked) {
  TinyOptions tiny;
  tiny.mtp_layers = 1;
  PlanOptions options;
  options.load_mtp = false;
  const Result<PrecisionPlan> plan = plan_of(tiny, options);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->memory.mtp_bytes, 0);
  EXPECT_EQ(plan->weights.count({2, Role::kQ, -1}), 0u);
}

TEST(Plan, GroupsExpertsOfEqualFormats) {
  TinyOptions tiny;
  tiny.format = [](const std::string& module) {
    if (!testing::tiny_is_mlp(module)) return FormatId::kBf16;
    if (module.find("layers.1.mlp.experts.3.up") != std::string::npos) return FormatId::kMxfp8;
    return FormatId::kNvfp4;
  };
  const Result<PrecisionPlan> plan = plan_of(tiny, {});
  ASSERT_TRUE(plan) << plan.error().message();
  ASSERT_EQ(plan->groups.size(), 3u);
  EXPECT_EQ(plan->groups[0].experts.size(), 8u);
  size_t odd = plan->groups[1].experts.size() == 1 ? 1 : 2;
  EXPECT_EQ(plan->groups[odd].experts, std::vector<int32_t>{3});
  EXPECT_EQ(plan->groups[odd].up, FormatId::kMxfp8);
}

TEST(Plan, SharesAreCutAtGroups) {
  const TinyOptions tiny;
  PlanOptions one, two, three;
  two.ranks = 2;
  three.ranks = 3;
  const Result<PrecisionPlan> whole = plan_of(tiny, one), half = plan_of(tiny, two);
  ASSERT_TRUE(whole && half);
  const recipe::WeightKey down{1, Role::kExpertDown, 5};
  EXPECT_EQ(half->weights.at(down).resident_bytes() * 2, whole->weights.at(down).resident_bytes());
  EXPECT_EQ(half->memory.kv_bytes_per_token * 2, whole->memory.kv_bytes_per_token);
  const Result<PrecisionPlan> refused = plan_of(tiny, three);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("do not split over 3 ranks"));
  // 128 columns of down over 16 ranks are 8: half a group. (Heads are checked first: give enough.)
  TinyOptions heads = tiny;
  heads.heads = heads.kv_heads = 16;
  heads.head_dim = 16;
  PlanOptions sixteen;
  sixteen.ranks = 16;
  const Result<PrecisionPlan> cut = plan_of(heads, sixteen);
  ASSERT_FALSE(cut);
  EXPECT_THAT(cut.error().message(), HasSubstr("cut_not_group"));
}

}  // namespace
}  // namespace nibble::plan
