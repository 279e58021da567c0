#include "recipe/quantization.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "recipe/module_name.h"
#include "recipe/name_summary.h"

namespace nibble::recipe {
namespace {

using formats::FormatId;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kExpert = "model.layers.1.mlp.experts.3.up_proj";

/// Format that the config declares: "nvfp4", "plain", "unknown".
std::string says(const Quantization& quant, std::string_view module) {
  const auto declared = quant.declared(module);
  if (!declared) return declared.error().message();
  if (!declared->known) return "unknown";
  if (declared->form == nullptr) return "plain";
  return std::string(formats::block_format(declared->form->format).name);
}

Quantization parse(const Json& quant, int64_t experts = 0) {
  auto got = Quantization::parse(quant, experts);
  EXPECT_TRUE(got) << got.error().message();
  return got ? *got : Quantization();
}

TEST(ShellMatch, Table) {
  const struct {
    const char *pattern, *text;
    bool want;
  } cases[] = {
      {"*.self_attn.q_proj", "model.layers.0.self_attn.q_proj", true},
      {"*.self_attn.q_proj", "model.layers.0.self_attn.k_proj", false},
      {"model.layers.0*", "model.layers.0.mlp.gate", true},
      {"model.layers.?.mlp", "model.layers.10.mlp", false},
      {"a[0-2]b", "a1b", true},
      {"a[!0-2]b", "a1b", false},
      {"a[]]b", "a]b", true},
      {"a[b", "a[b", true},
      {"*", "", true},
      {"", "", true},
      {"", "a", false},
      {"**a**", "bab", true},
      {"A", "a", false},
      {"*a*a*a*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false},
  };
  for (const auto& c : cases) EXPECT_EQ(shell_match(c.pattern, c.text), c.want) << c.pattern;
}

TEST(NameList, PrefixesDoNotMatter) {
  NameList list;
  ASSERT_TRUE(list.add("model.layers.0.mlp.gate"));
  ASSERT_TRUE(list.add("*.self_attn.q_proj"));
  ASSERT_TRUE(list.add("re:.*shared_experts\\.down"));
  EXPECT_TRUE(list.matches("model.language_model.layers.0.mlp.gate"));
  EXPECT_TRUE(list.matches("layers.0.mlp.gate"));
  EXPECT_FALSE(list.matches("model.layers.10.mlp.gate"));
  EXPECT_FALSE(list.matches("model.layers.0.mlp.gate_proj"));  // exact, no substrings
  EXPECT_TRUE(list.matches("model.layers.5.self_attn.q_proj"));
  EXPECT_TRUE(list.matches("model.layers.5.mlp.shared_experts.down_proj"));
  EXPECT_FALSE(list.matches("lm_head"));
}

TEST(NameList, SubstringsAndLayerBuckets) {
  NameList list(/*substrings=*/true);
  ASSERT_TRUE(list.add("self_attn"));
  ASSERT_TRUE(list.add("model.layers.1.mlp"));
  EXPECT_TRUE(list.matches("model.layers.7.self_attn.q_proj"));
  EXPECT_TRUE(list.matches("model.language_model.layers.1.mlp.gate"));
  EXPECT_FALSE(list.matches("model.layers.11.mlp.gate"));
  EXPECT_FALSE(list.matches("model.layers.2.mlp.gate"));
}

TEST(NameList, HostilePatternsEndInTime) {
  NameList list;
  ASSERT_TRUE(list.add("re:(a*)*b"));
  EXPECT_FALSE(list.matches(std::string(4000, 'a')));
  EXPECT_FALSE(NameList().add("re:("));
  EXPECT_FALSE(NameList().add(std::string(5000, 'a')));
}

TEST(ModuleName, Numbers) {
  const ModuleNumbers a = module_numbers(kExpert);
  EXPECT_EQ(a.layer, 1);
  EXPECT_EQ(a.expert, 3);
  EXPECT_EQ(a.experts_module, "model.layers.1.mlp.experts");
  EXPECT_EQ(module_numbers("mtp.layers.0.mlp.experts.2.up_proj").layer, -1);
  EXPECT_EQ(module_numbers("model.layers.1.mlp.shared_experts.up_proj").experts_module, "");
  EXPECT_EQ(module_numbers("model.layers.99999999999.x").layer, -1);
  EXPECT_EQ(module_numbers("lm_head").layer, -1);
}

TEST(NameSummary, PatternsAndCounts) {
  std::vector<std::string> names;
  for (int layer = 3; layer <= 40; ++layer) {
    for (int e = 0; e < 8; ++e) {
      names.push_back(cat("model.layers.", layer, ".mlp.experts.", e, ".up_proj.weight"));
    }
  }
  names.push_back("model.norm.weight");
  EXPECT_EQ(pattern_lines(names, "missing", "; ", 10),
            "model.layers.{3..40}.mlp.experts.{0..7}.up_proj.weight: 304 missing; "
            "model.norm.weight: 1 missing");
  EXPECT_EQ(pattern_lines({"a.1", "a.3", "a.4", "b.1"}, "x", "; ", 1),
            "a.{1,3..4}: 3 x; and 1 more patterns: 1");
}

TEST(Quantization, ModelOptFlatAndNested) {
  const Json flat = {{"quant_method", "modelopt"},
                     {"quant_algo", "nvfp4"},
                     {"ignore", {"lm_head", "*.mlp.gate", "self_attn"}}};
  const Json nested = {
      {"quantization",
       {{"quant_algo", "NVFP4"}, {"exclude_modules", {"lm_head", "*.mlp.gate", "self_attn"}}}}};
  for (const Json& quant : {flat, nested}) {
    const Quantization got = parse(quant);
    EXPECT_EQ(got.method(), QuantMethod::kModelOpt);
    EXPECT_EQ(says(got, kExpert), "nvfp4");
    EXPECT_EQ(says(got, "lm_head"), "plain");
    EXPECT_EQ(says(got, "model.layers.1.mlp.gate"), "plain");
    EXPECT_EQ(says(got, "model.language_model.layers.1.self_attn.q_proj"), "plain");
  }
}

TEST(Quantization, ModelOptAlgorithms) {
  const struct {
    const char *algo, *want;
  } cases[] = {{"NVFP4", "nvfp4"},
               {"W4A16_NVFP4", "nvfp4"},
               {"MXFP8", "mxfp8"},
               {"fp8", "fp8_tensor"},
               {"FP8_PER_CHANNEL_PER_TOKEN", "fp8_channel"},
               {"FP8_PB_WO", "fp8_block"},
               {"FP8_BLOCK_SCALES", "fp8_block"}};
  for (const auto& c : cases) {
    EXPECT_EQ(says(parse({{"quant_method", "modelopt"}, {"quant_algo", c.algo}}), kExpert), c.want);
  }
  const auto bad = Quantization::parse({{"quant_method", "modelopt"}, {"quant_algo", "W4A8"}}, 0);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code(), Code::kUnsupported);
  EXPECT_THAT(bad.error().message(), StartsWith("quant_method: quant_algo 'W4A8'"));
}

TEST(Quantization, MixedPrecisionLooksUpModules) {
  const Quantization got =
      parse({{"quant_method", "modelopt"},
             {"quant_algo", "MIXED_PRECISION"},
             {"ignore", {"*.mlp.gate"}},
             {"quantized_layers",
              {{"model.language_model.layers.1.mlp.experts", {{"quant_algo", "NVFP4"}}},
               {"model.layers.2.mlp.experts.0.up_proj", {{"quant_algo", "MXFP8"}}},
               {"model.layers.0.self_attn.qkv_proj", {{"quant_algo", "FP8_PB_WO"}}},
               {"model.layers.0.mlp.gate", {{"quant_algo", "FP8"}}}}}});
  EXPECT_EQ(says(got, kExpert), "nvfp4");
  EXPECT_EQ(says(got, "model.layers.2.mlp.experts.7.up_proj"), "mxfp8");
  EXPECT_EQ(says(got, "model.layers.0.self_attn.k_proj"), "fp8_block");
  EXPECT_EQ(says(got, "model.layers.0.self_attn.o_proj"), "plain");
  EXPECT_EQ(says(got, "model.layers.0.mlp.gate"), "plain");
}

TEST(Quantization, ScaleEncodingIsNeverIgnored) {
  const auto with = [](const char* algo, Json encoding) {
    return Quantization::parse({{"quant_method", "modelopt"},
                                {"quant_algo", "MIXED_PRECISION"},
                                {"quantized_layers",
                                 {{"model.layers.1.mlp.experts",
                                   {{"quant_algo", algo}, {"weight_scale_encoding", encoding}}}}}},
                               0);
  };
  const auto good = with("NVFP4", "csf");
  ASSERT_TRUE(good);
  EXPECT_TRUE(good->has_encoded_scales());
  EXPECT_TRUE(good->declared(kExpert)->encoded_scale);
  EXPECT_FALSE(good->declared("model.layers.0.mlp.experts.3.up_proj")->encoded_scale);
  for (const auto& bad : {with("NVFP4", "zip"), with("MXFP8", "csf"), with("NVFP4", 3)}) {
    ASSERT_FALSE(bad);
    EXPECT_THAT(bad.error().message(), StartsWith("scale_encoding: "));
  }
}

TEST(Quantization, CompressedTensorsGroups) {
  const Quantization got =
      parse({{"quant_method", "compressed-tensors"},
             {"format", "mixed-precision"},
             {"config_groups",
              {{"group_0", {{"targets", {"Linear"}}, {"format", "nvfp4-pack-quantized"}}},
               {"group_1",
                {{"targets", {"re:.*down_proj", "lm_head"}},
                 {"format", "float-quantized"},
                 {"weights", {{"num_bits", 8}, {"type", "float"}}}}}}},
             {"ignore", {"re:.*self_attn.*"}}});
  EXPECT_EQ(says(got, kExpert), "nvfp4");
  EXPECT_EQ(says(got, "model.layers.1.mlp.experts.3.down_proj"), "fp8_channel");
  EXPECT_TRUE(fits(*got.declared("lm_head"), FormatId::kFp8Block));
  EXPECT_FALSE(fits(*got.declared("lm_head"), FormatId::kBf16));
  EXPECT_EQ(says(got, "model.layers.1.self_attn.q_proj"), "plain");
  EXPECT_EQ(says(parse({{"quant_method", "compressed-tensors"},
                        {"format", "mxfp4-pack-quantized"},
                        {"config_groups", {{"g", {{"targets", {"Linear"}}}}}}}),
                 kExpert),
            "mxfp4");
}

TEST(Quantization, Fp8AndMxfp4) {
  const Quantization fp8 = parse({{"quant_method", "fp8"},
                                  {"weight_block_size", {32, 64}},
                                  {"modules_to_not_convert", {"lm_head"}}});
  EXPECT_EQ(says(fp8, kExpert), "fp8_block");
  EXPECT_EQ(says(fp8, "lm_head"), "plain");
  EXPECT_EQ(fp8.fp8_block(*fp8.declared(kExpert)), (std::array<int64_t, 2>{32, 64}));
  const Quantization mxfp4 = parse({{"quant_method", "mxfp4"}});
  EXPECT_EQ(says(mxfp4, kExpert), "mxfp4");
  EXPECT_EQ(says(mxfp4, "model.layers.0.self_attn.q_proj"), "plain");
  const auto v4 = Quantization::from_config(
      {{"expert_dtype", "fp4"},
       {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}}},
      nullptr);
  ASSERT_TRUE(v4);
  EXPECT_EQ(says(*v4, "layers.0.ffn.experts.1.w1"), "mxfp4");
  EXPECT_EQ(says(*v4, "layers.0.attn.wq_a"), "fp8_block");
}

TEST(Quantization, WhereTheObjectIsFound) {
  const Json fp8 = {{"quant_method", "fp8"}};
  const Json hf = {{"quantization", {{"quant_algo", "NVFP4"}}}};
  const auto method = [&](const Json& config, const Json* second) {
    const auto got = Quantization::from_config(config, second);
    EXPECT_TRUE(got);
    return got ? got->method() : QuantMethod::kNone;
  };
  EXPECT_EQ(method(Json::object(), nullptr), QuantMethod::kNone);
  EXPECT_EQ(method({{"quantization_config", nullptr}}, nullptr), QuantMethod::kNone);
  EXPECT_EQ(method({{"quantization_config", fp8}}, &hf), QuantMethod::kFp8);
  EXPECT_EQ(method({{"text_config", {{"quantization_config", fp8}}}}, &hf), QuantMethod::kFp8);
  EXPECT_EQ(method(Json::object(), &hf), QuantMethod::kModelOpt);
}

Json hybrid() {
  return {{"quant_method", "nvfp4_nf3_hybrid"}, {"hybrid_bit_map", {{"1", {4, 3, 3, 4}}}}};
}

TEST(Quantization, HybridTiers) {
  Json quant = hybrid();
  quant["dense_format"] = "mxfp8";
  quant["ignored_layers"] = {"o_proj", "shared_experts"};
  quant["exclude_modules"] = {"lm_head"};
  const Quantization got = parse(quant, 4);
  EXPECT_EQ(says(got, "model.layers.1.mlp.experts.0.up_proj"), "nvfp4");
  EXPECT_EQ(says(got, "model.layers.1.mlp.experts.1.up_proj"), "nf3");
  EXPECT_TRUE(got.declared("model.layers.1.mlp.experts.1.up_proj")->required);
  EXPECT_EQ(says(got, "model.layers.2.mlp.experts.1.up_proj"), "nvfp4");
  EXPECT_FALSE(got.declared("model.layers.2.mlp.experts.1.up_proj")->required);
  EXPECT_THAT(says(got, "model.layers.1.mlp.experts.4.up_proj"), StartsWith("bit_map: "));
  EXPECT_EQ(says(got, "model.layers.0.self_attn.q_proj"), "mxfp8");
  EXPECT_EQ(says(got, "model.layers.0.self_attn.o_proj"), "plain");
  EXPECT_EQ(says(got, "model.layers.0.mlp.shared_experts.up_proj"), "plain");
  EXPECT_EQ(says(got, "lm_head"), "plain");
  quant["ignored_layers"] = {"q_proj"};
  EXPECT_THAT(says(parse(quant, 4), "model.layers.0.self_attn.k_proj"),
              StartsWith("ignored_partial: "));
  quant["kept_format"] = "mxfp4_e8m0k32";
  EXPECT_EQ(says(parse({{"quantization", quant}}, 4), "model.layers.1.mlp.experts.0.up_proj"),
            "mxfp4");
}

TEST(Quantization, HybridErrors) {
  const struct {
    const char* key;
    Json value;
    const char* error;
  } cases[] = {
      {"hybrid_bit_map", Json::object(), "bit_map: "},
      {"hybrid_bit_map", Json::array({3}), "bit_map: "},
      {"hybrid_bit_map", nullptr, "bit_map: "},
      {"hybrid_bit_map", {{"1", {4, 3, 3}}}, "bit_map: "},
      {"hybrid_bit_map", {{"1", {4, 3, 3, 2}}}, "bit_map: "},
      {"hybrid_bit_map", {{"1", {4, 3, 3, 260}}}, "bit_map: "},
      {"hybrid_bit_map", {{"x", {4, 3, 3, 4}}}, "bit_map: "},
      {"hybrid_bit_map", {{"-1", {4, 3, 3, 4}}}, "bit_map: "},
      {"kept_format", "int4", "kept_format: "},
      {"kept_format", 4, "kept_format: "},
      {"demoted_format", "nf2", "demoted_format: "},
      {"nf3_levels", {-1, -0.5, -0.25, 0, 0.25, 0.5, 1}, "nf3_levels: "},
      {"nf3_levels", {-1, -0.5, -0.25, 0, 0, 0.25, 0.5, 1}, "nf3_levels: "},
      {"nf3_levels", {-1, -0.5, -0.25, 0.1, 0.1000001, 0.25, 0.5, 1}, "nf3_levels: "},
      {"nf3_levels", "x", "nf3_levels: "},
      {"nf3_scale_bias_log2", 4000, "key 'nf3_scale_bias_log2'"},
      {"dense_format", "int8", "quant_method: "},
      {"ignored_layers", {1}, "key 'ignored_layers'"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(cat(c.key, " = ", json_dump(c.value)));
    Json quant = hybrid();
    quant[c.key] = c.value;
    const auto got = Quantization::parse(quant, 4);
    ASSERT_FALSE(got);
    EXPECT_THAT(got.error().message(), StartsWith(c.error));
  }
}

TEST(Quantization, RefusesWrongNesting) {
  const Json cases[] = {
      Json("modelopt"),
      Json::array({1}),
      {{"quant_method", 3}},
      {{"quant_method", "gptq"}},
      {{"quant_method", "nvfp4_csf"}},
      {{"quant_method", "modelopt"}, {"quant_algo", Json::array()}},
      {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", "lm_head"}},
      {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", {1}}},
      {{"quant_method", "modelopt"}, {"quant_algo", "MIXED_PRECISION"}, {"quantized_layers", {1}}},
      {{"quant_method", "compressed-tensors"}, {"format", "nvfp4-pack-quantized"}},
      {{"quant_method", "compressed-tensors"}, {"config_groups", {{"a", 1}}}},
      {{"quant_method", "compressed-tensors"},
       {"format", "pack-quantized"},
       {"config_groups", {{"a", {{"targets", {"Linear"}}}}}}},
      {{"quant_method", "compressed-tensors"},
       {"format", "nvfp4-pack-quantized"},
       {"config_groups", {{"a", {{"targets", "Linear"}}}}}},
      {{"quant_method", "fp8"}, {"weight_block_size", {128}}},
      {{"quant_method", "fp8"}, {"weight_block_size", {0, 128}}},
      {{"quant_method", "fp8"}, {"weight_block_size", {-1, 128}}},
      {{"quant_method", "fp8"}, {"weight_block_size", {"128", 128}}},
      {{"quant_method", "fp8"}, {"weight_block_size", {1e18, 128}}},
      {{"quant_method", "fp8"}, {"weight_block_size", {18446744073709551615ULL, 128}}},
  };
  for (const Json& quant : cases) EXPECT_FALSE(Quantization::parse(quant, 0)) << json_dump(quant);
}

}  // namespace
}  // namespace nibble::recipe
