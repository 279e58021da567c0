#include "recipe/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/json.h"
#include "recipe/families/family.h"
#include "recipe/tiny_checkpoint_testing.h"
#include "support/vector_file.h"

namespace nibble::recipe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Json tiny() { return nibble::testing::tiny_config({}); }

Result<ModelConfig> parse(const Json& config, const Json* generation = nullptr) {
  return find_family("glm4_moe")->parse_config(config, generation);
}

TEST(Config, ReadsEveryField) {
  Json config = tiny();
  config["n_group"] = 4;
  config["topk_group"] = 2;
  config["first_k_dense_replace"] = 1;
  config["num_nextn_predict_layers"] = 1;
  const auto got = parse(config);
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_EQ(got->hidden_size, 256);
  EXPECT_EQ(got->layers, 2);
  EXPECT_EQ(got->vocab_size, 512);
  EXPECT_EQ(got->max_positions, 4096);
  EXPECT_EQ(got->heads, 4);
  EXPECT_EQ(got->kv_heads, 2);
  EXPECT_EQ(got->head_dim, 64);
  EXPECT_EQ(got->intermediate_size, 384);
  EXPECT_EQ(got->moe_intermediate_size, 128);
  EXPECT_EQ(got->experts, 8);
  EXPECT_EQ(got->top_k, 2);
  EXPECT_EQ(got->shared_experts, 1);
  EXPECT_EQ(got->first_dense_layers, 1);
  EXPECT_EQ(got->groups, 4);
  EXPECT_EQ(got->top_groups, 2);
  EXPECT_EQ(got->mtp_layers, 1);
  EXPECT_TRUE(got->qk_norm);
  EXPECT_FALSE(got->attention_bias);
  EXPECT_FALSE(got->tied_embeddings);
  EXPECT_TRUE(got->normalize_top_k);
  EXPECT_EQ(got->rms_eps, 1e-5f);
  EXPECT_EQ(got->routed_scaling, 2.5f);
  EXPECT_EQ(got->rope_theta, 1e6);
  EXPECT_EQ(got->rotary_dim, 32);
  EXPECT_THAT(got->eos_ids, ElementsAre(2));
}

TEST(Config, BothRopeSpellingsAgree) {
  Json newer = tiny();
  newer.erase("rope_theta");
  newer.erase("partial_rotary_factor");
  newer["rope_parameters"] = {
      {"rope_type", "default"}, {"rope_theta", 1e6}, {"partial_rotary_factor", 0.25}};
  const auto got = parse(newer);
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_EQ(got->rope_theta, 1e6);
  EXPECT_EQ(got->rotary_dim, 16);
  Json absent = tiny();
  absent.erase("partial_rotary_factor");
  EXPECT_EQ(parse(absent)->rotary_dim, 32);  // the family's default, one half
}

TEST(Config, FixturesReadTheSameFromBothFiles) {
  int pairs = 0;
  for (const char* name : {"glm4_moe", "glm4_moe_mtp", "glm4_moe-nvfp4-modelopt"}) {
    const std::string folder = nibble::testing::fixtures_dir() + "/" + name;
    const auto a = read_json_file(folder + "/config.json");
    const auto b = read_json_file(folder + "/config_hub.json");
    ASSERT_TRUE(a && b) << folder;
    const auto left = parse(*a), right = parse(*b);
    ASSERT_TRUE(left) << left.error().message();
    ASSERT_TRUE(right) << right.error().message();
    EXPECT_EQ(left->rope_theta, 1e6);
    EXPECT_EQ(left->rope_theta, right->rope_theta);
    EXPECT_EQ(left->rotary_dim, 16);
    EXPECT_EQ(left->rotary_dim, right->rotary_dim);
    EXPECT_EQ(left->experts, right->experts);
    EXPECT_TRUE(left->attention_bias);
    ++pairs;
  }
  EXPECT_EQ(pairs, 3);
}

TEST(Config, MergesEosIdsOfThreePlaces) {
  Json config = {{"text_config", tiny()}, {"model_type", "glm4v_moe"}, {"eos_token_id", {7, 8}}};
  const Json generation = {{"eos_token_id", {8, 9}}};
  const auto got = parse(config, &generation);
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_THAT(got->eos_ids, ElementsAre(7, 8, 2, 9));
  EXPECT_EQ(model_type(config), "glm4_moe");
}

TEST(Config, TextConfigDecidesOnTies) {
  Json config = {{"text_config", tiny()}, {"tie_word_embeddings", true}};
  EXPECT_FALSE(parse(config)->tied_embeddings);
  config["text_config"].erase("tie_word_embeddings");
  EXPECT_TRUE(parse(config)->tied_embeddings);
}

struct Hostile {
  const char* key;
  Json value;
  const char* message;
};

TEST(Config, RefusesHostileValues) {
  const Hostile cases[] = {
      {"hidden_size", -1, "hidden_size"},
      {"hidden_size", 0, "hidden_size"},
      {"hidden_size", "256", "expected an integer, found \"256\""},
      {"hidden_size", 2.5, "hidden_size"},
      {"hidden_size", Json::array({1}), "hidden_size"},
      {"hidden_size", int64_t{1} << 62, "1 to 1048576"},
      {"hidden_size", 18446744073709551615ULL, "64-bit"},
      {"num_hidden_layers", 1e300, "num_hidden_layers"},
      {"num_hidden_layers", 5000, "1 to 4096"},
      {"vocab_size", -5, "vocab_size"},
      {"num_attention_heads", 3, "multiple of num_key_value_heads"},
      {"num_key_value_heads", 0, "num_key_value_heads"},
      {"head_dim", 1 << 19, "num_attention_heads * head_dim"},
      {"n_routed_experts", 0, "n_routed_experts"},
      {"num_experts_per_tok", 9, "num_experts_per_tok"},
      {"n_group", 3, "divisor"},
      {"n_shared_experts", -1, "n_shared_experts"},
      {"moe_intermediate_size", nullptr, "expected a number, found nothing"},
      {"num_nextn_predict_layers", 1000, "0 to 64"},
      {"rms_norm_eps", 0, "rms_norm_eps"},
      {"rms_norm_eps", "1e-5", "rms_norm_eps"},
      {"rope_theta", -1.0, "rope_theta"},
      {"partial_rotary_factor", 1.5, "partial_rotary_factor"},
      {"partial_rotary_factor", 1e-9, "even number"},
      {"rope_parameters", "x", "rope_parameters"},
      {"rope_scaling", {{"type", "yarn"}}, "yarn"},
      {"routed_scaling_factor", 0.0, "routed_scaling_factor"},
      {"norm_topk_prob", 1, "true or false"},
      {"use_qk_norm", "yes", "true or false"},
      {"tie_word_embeddings", 0, "true or false"},
      {"hidden_act", "gelu", "gelu"},
      {"scoring_func", "softmax", "softmax"},
      {"eos_token_id", -1, "eos_token_id"},
      {"eos_token_id", 512, "vocab_size 512"},
      {"eos_token_id", Json::array({Json::array({1})}), "token ids"},
      {"eos_token_id", "</s>", "eos_token_id"},
  };
  for (const Hostile& c : cases) {
    SCOPED_TRACE(cat(c.key, " = ", json_dump(c.value)));
    Json config = tiny();
    config[c.key] = c.value;
    const auto got = parse(config);
    ASSERT_FALSE(got);
    EXPECT_THAT(got.error().message(), HasSubstr(c.message));
  }
  for (const Json& file : {Json(), Json(3), Json("x"), Json::array(), Json::object()}) {
    EXPECT_FALSE(parse(file)) << json_dump(file);
  }
}

TEST(Config, KnowsItsFamilies) {
  EXPECT_EQ(find_family("glm4_moe")->name, "glm4_moe");
  EXPECT_EQ(find_family("llama"), nullptr);
  EXPECT_EQ(find_family(""), nullptr);
  EXPECT_THAT(known_families(), HasSubstr("glm4_moe"));
  EXPECT_EQ(model_type(Json(3)), "");
  EXPECT_EQ(model_type({{"model_type", 3}}), "");
}

}  // namespace
}  // namespace nibble::recipe
