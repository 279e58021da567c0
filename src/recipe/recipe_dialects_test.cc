// read_recipe on dialects and mixes that public engines have read wrongly: the same model in other
// words must decode to the same bits, and every weight keeps the format its tensors have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "base/json.h"
#include "recipe/recipe.h"
#include "recipe/recipe_testing.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;
using formats::DType;
using formats::FormatId;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(RecipeDialects, EveryFormatOfAProjection) {
  for (const FormatId format : {FormatId::kF32, FormatId::kF16, FormatId::kBf16, FormatId::kNvfp4,
                                FormatId::kMxfp4, FormatId::kMxfp8, FormatId::kFp8Block,
                                FormatId::kFp8Channel, FormatId::kFp8Tensor, FormatId::kNf3}) {
    SCOPED_TRACE(formats::block_format(format).name);
    TinyOptions options;
    options.layers = 1;
    // Every projection of an expert in another format than its neighbours.
    options.format = [format](const std::string& module) {
      if (module.ends_with("experts.2.up_proj")) return format;
      return tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
    };
    const Recipe got = must(read(options));
    const Weight* weight = got.find({0, Role::kExpertUp, 2});
    EXPECT_EQ(weight->meta.format, format);
    const auto values = decoded(got, {0, Role::kExpertUp, 2});
    const auto want =
        nibble::testing::tiny_values("layers.0.mlp.experts.2.up_proj", 128 * 256, 0.25f);
    double error = 0, power = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error += (values[i] - want[i]) * (values[i] - want[i]);
      power += want[i] * want[i];
    }
    EXPECT_LT(std::sqrt(error / power), 0.25);  // the 3-bit form is the coarsest
    const bool contradicts = format != FormatId::kNvfp4;
    EXPECT_EQ(got.notices().size(), contradicts ? 2u : 1u);  // and the ignored input scales
    if (contradicts) {
      EXPECT_THAT(got.notices()[0],
                  HasSubstr(cat("config says quant_algo NVFP4, tensors hold ",
                                formats::block_format(format).name,
                                " (used): model.layers.0.mlp.experts.2.up_proj: 1 modules")));
    }
  }
}

TEST(RecipeDialects, GateAndUpHaveTheirOwnGlobals) {  // A1
  for (const float ratio : {4.83e-05f / 3.85e-05f, 10.0f}) {
    TinyOptions options;
    TinyTensors tensors = tiny_tensors(options);
    for (auto& [name, tensor] : tensors) {
      if (name.ends_with("gate_proj.weight_scale_2")) set_f32(tensor, 3.85e-05f);
      if (name.ends_with("up_proj.weight_scale_2")) set_f32(tensor, 3.85e-05f * ratio);
    }
    const Recipe got = must(read(tensors, tiny_config(options)));
    for (int32_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(got.find({1, Role::kExpertGate, e})->meta.global, 3.85e-05f);
      EXPECT_EQ(got.find({1, Role::kExpertUp, e})->meta.global, 3.85e-05f * ratio);
    }
    ASSERT_EQ(got.notices().size(), 1u);
    EXPECT_THAT(got.notices()[0], HasSubstr("input_scale (54)"));
  }
}

TEST(RecipeDialects, DivisorAndFactorDecodeToTheSameBits) {  // A2
  TinyOptions factor, divisor;
  divisor.dialect = TinyDialect::kCompressedTensors;
  const Recipe a = must(read(factor)), b = must(read(divisor));
  EXPECT_EQ(expect_same_model(a, b), 3 + 2 * (2 + 6 + 2 + 3 * kExperts + 3));
  const WeightKey key = {1, Role::kExpertDown, 7};
  EXPECT_EQ(a.find(key)->dialect, "modelopt nvfp4");
  EXPECT_EQ(b.find(key)->dialect, "compressed-tensors nvfp4");
  EXPECT_LT(a.find(key)->meta.global, 1e-3f);
  EXPECT_TRUE(a.find(key)->has_input_scale);
  EXPECT_TRUE(b.find(key)->has_input_scale);
}

TEST(RecipeDialects, InputScalesAreOptional) {
  TinyOptions options;
  TinyTensors tensors = tiny_tensors(options);
  for (int e : {3, 5}) {
    for (const char* p : {"gate_proj", "up_proj", "down_proj"}) {
      ASSERT_EQ(tensors.erase(cat("model.layers.1.mlp.experts.", e, ".", p, ".input_scale")), 1u);
    }
  }
  const Recipe got = must(read(tensors, tiny_config(options)));
  EXPECT_FALSE(got.find({1, Role::kExpertUp, 3})->has_input_scale);
  EXPECT_TRUE(got.find({1, Role::kExpertUp, 4})->has_input_scale);
}

TEST(RecipeDialects, MtpExpertsInBlockFp8UnderBothNames) {  // A5
  std::vector<Recipe> recipes;
  for (const char* algo : {"FP8_PB_WO", "FP8_BLOCK_SCALES"}) {
    for (const bool four_extents : {false, true}) {
      TinyOptions options;
      options.mtp_layers = 1;
      options.mtp_base = "mtp.layers.";
      options.inner = 192;  // the last block is partial
      options.format = [](const std::string& module) {
        if (module.find("mtp.") == 0 && module.find(".experts.") != std::string::npos) {
          return FormatId::kFp8Block;
        }
        const bool body = tiny_is_mlp(module) && module.find("mtp.") != 0;
        return body ? FormatId::kNvfp4 : FormatId::kBf16;
      };
      TinyTensors tensors = tiny_tensors(options);
      if (four_extents) {
        TinyTensors renamed;
        for (auto& [name, tensor] : tensors) {
          if (!name.ends_with("_inv")) {
            renamed[name] = tensor;
            continue;
          }
          tensor.shape = {tensor.shape[0], 1, tensor.shape[1], 1};
          renamed[name.substr(0, name.size() - 4)] = tensor;
        }
        tensors = renamed;
      }
      Json config = tiny_config(options);
      Json layers = {{"mtp.layers.0.mlp.experts", {{"quant_algo", algo}}}};
      for (int l = 0; l < kLayers; ++l) {
        layers[cat("model.layers.", l, ".mlp.experts")] = {{"quant_algo", "NVFP4"}};
        for (const char* p : {"gate_proj", "up_proj", "down_proj"}) {
          layers[cat("model.layers.", l, ".mlp.shared_experts.", p)] = {{"quant_algo", "NVFP4"}};
        }
      }
      config["quantization_config"] = {{"quant_method", "modelopt"},
                                       {"quant_algo", "MIXED_PRECISION"},
                                       {"quantized_layers", layers}};
      Recipe got = must(read(tensors, config));
      EXPECT_TRUE(got.mtp_present());
      EXPECT_EQ(got.notices().size(), 1u) << got.notices()[0];  // nothing but input scales
      const Weight* gate = got.find({kLayers, Role::kExpertGate, 7});
      EXPECT_EQ(gate->meta.format, FormatId::kFp8Block);
      EXPECT_EQ(gate->meta.block_rows, 128);
      EXPECT_EQ(gate->dialect, four_extents ? "modelopt fp8" : "deepseek fp8");
      EXPECT_EQ(got.find({kLayers, Role::kMtpProjection})->meta.cols, 512);
      recipes.push_back(std::move(got));
    }
  }
  for (size_t i = 1; i < recipes.size(); ++i) {
    EXPECT_GT(expect_same_model(recipes[0], recipes[i]), 100);
  }
}

TEST(RecipeDialects, MtpInBf16BesideAnNvfp4Body) {  // A6
  for (const bool own_head : {false, true}) {
    TinyOptions options;
    options.mtp_layers = 1;
    options.mtp_own_head = own_head;
    options.format = [](const std::string& module) {
      const bool body = tiny_is_mlp(module) && module.find("layers.2.") == std::string::npos;
      return body ? FormatId::kNvfp4 : FormatId::kBf16;
    };
    const Recipe got = must(read(options));
    EXPECT_TRUE(got.mtp_present());
    EXPECT_EQ(got.find({2, Role::kExpertUp, 3})->meta.format, FormatId::kBf16);
    EXPECT_EQ(got.find({1, Role::kExpertUp, 3})->meta.format, FormatId::kNvfp4);
    EXPECT_EQ(got.find({2, Role::kMtpHead}) != nullptr, own_head);
    EXPECT_EQ(got.find({2, Role::kMtpEmbedding}) != nullptr, own_head);
    EXPECT_EQ(got.find({2, Role::kMtpHeadNorm})->meta.cols, 256);
    EXPECT_THAT(got.notices()[0], StartsWith("config says quant_algo NVFP4, tensors hold bf16"));
    EXPECT_THAT(got.notices()[0],
                HasSubstr("model.layers.2.mlp.experts.{0..7}.gate_proj: 8 modules"));
  }
}

TEST(RecipeDialects, QuantizedHeadAndTiedEmbeddings) {  // A7
  TinyOptions options;
  options.format = [](const std::string& module) {
    return tiny_is_mlp(module) || module == "lm_head" ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  for (const bool tied : {false, true}) {
    options.tied = tied;
    const Recipe got = must(read(options));
    EXPECT_EQ(got.find({-1, Role::kHead})->meta.format, FormatId::kNvfp4);
    EXPECT_EQ(got.find({-1, Role::kHead})->meta.rows, 512);
    EXPECT_EQ(got.find({-1, Role::kEmbedding})->meta.format, FormatId::kBf16);
    EXPECT_THAT(
        got.notices(),
        Contains(HasSubstr("config says unquantized (on the ignore list), tensors hold nvfp4 "
                           "(used): lm_head: 1 modules")));
  }
  options.head = false;
  const Recipe tied = must(read(options));
  EXPECT_EQ(tied.find({-1, Role::kHead}), nullptr);
  EXPECT_TRUE(tied.config().tied_embeddings);
  options.tied = false;
  const auto untied = read(options);
  ASSERT_FALSE(untied);
  EXPECT_THAT(untied.error().message(), StartsWith("tensor_missing: "));
  EXPECT_THAT(untied.error().message(), HasSubstr("lm_head.weight: 1 missing"));
}

TEST(RecipeDialects, ExclusionsByProjectionAndPrefix) {  // A8
  for (const char* stored : {"model.", "model.language_model."}) {
    for (const char* listed : {"model.", "model.language_model."}) {
      SCOPED_TRACE(cat(stored, " ", listed));
      TinyOptions options;
      options.prefix = stored;
      options.format = [](const std::string& module) {
        const bool quantized = tiny_is_mlp(module) || module.ends_with("self_attn.k_proj") ||
                               module.ends_with("self_attn.v_proj") ||
                               module.ends_with("self_attn.o_proj");
        return quantized ? FormatId::kNvfp4 : FormatId::kBf16;
      };
      Json config = tiny_config(options);
      config["quantization_config"]["ignore"] = {"*.self_attn.q_proj",
                                                 cat(listed, "layers.0.mlp.gate"), "lm_head"};
      const Recipe got = must(read(tiny_tensors(options), config));
      EXPECT_EQ(got.find({1, Role::kQ})->meta.format, FormatId::kBf16);
      EXPECT_EQ(got.find({1, Role::kK})->meta.format, FormatId::kNvfp4);
      EXPECT_EQ(got.find({1, Role::kV})->meta.format, FormatId::kNvfp4);
      const auto want = nibble::testing::tiny_values("layers.1.self_attn.q_proj", 256 * 256, 0.2f);
      EXPECT_TRUE(same_bits(decoded(got, {1, Role::kQ}), want));
      EXPECT_EQ(got.notices().size(), 1u) << got.notices()[0];
    }
  }
}

TEST(RecipeDialects, IndexWinsOverASecondCopy) {  // A10
  constexpr const char* kName = "model.layers.1.mlp.experts.0.gate_proj";
  TinyOptions nvfp4, fp8;
  fp8.format = [](const std::string& module) {
    return tiny_is_mlp(module) ? FormatId::kFp8Tensor : FormatId::kBf16;
  };
  TempDir dir, other;
  nibble::testing::write_tiny(dir.path(), tiny_tensors(nvfp4), tiny_config(nvfp4));
  TinyTensors extra;
  for (const auto& [name, tensor] : tiny_tensors(fp8)) {
    if (name.starts_with(kName)) extra[name] = tensor;
  }
  ASSERT_EQ(extra.size(), 2u);
  nibble::testing::write_tiny(other.path(), extra, tiny_config(fp8));
  namespace fs = std::filesystem;
  fs::copy_file(other.path() + "/model.safetensors", dir.path() + "/second.safetensors");
  const auto bare = read_recipe(dir.path());
  ASSERT_FALSE(bare);
  EXPECT_THAT(bare.error().message(), HasSubstr("model.safetensors"));
  EXPECT_THAT(bare.error().message(), HasSubstr("second.safetensors"));
  EXPECT_THAT(bare.error().message(), HasSubstr(kName));

  Json map;
  for (const auto& [name, tensor] : tiny_tensors(nvfp4)) {
    const bool second = name.starts_with(kName);
    if (!second || name.ends_with(".weight") || name.ends_with(".weight_scale")) {
      map[name] = second ? "second.safetensors" : "model.safetensors";
    }
  }
  ASSERT_TRUE(write_file_atomic(dir.path() + "/model.safetensors.index.json",
                                json_dump({{"weight_map", map}})));
  const Recipe got = must(read_recipe(dir.path()));
  EXPECT_EQ(got.find({1, Role::kExpertGate, 0})->meta.format, FormatId::kFp8Tensor);
  EXPECT_THAT(got.notices(), Contains(HasSubstr(cat(kName, ".weight (model.safetensors)"))));
}

TEST(RecipeDialects, StackedExpertsAreThePerExpertOnes) {  // A11
  for (const TinyDialect dialect :
       {TinyDialect::kModelOpt, TinyDialect::kCompressedTensors, TinyDialect::kDeepSeek}) {
    for (const FormatId format :
         {FormatId::kMxfp4, FormatId::kNvfp4, FormatId::kFp8Block, FormatId::kFp8Tensor,
          FormatId::kFp8Channel, FormatId::kBf16, FormatId::kMxfp8}) {
      SCOPED_TRACE(formats::block_format(format).name);
      const bool by_dialect = format == FormatId::kMxfp4 || format == FormatId::kNvfp4 ||
                              format == FormatId::kFp8Channel;
      if (dialect != TinyDialect::kModelOpt && !by_dialect) continue;
      TinyOptions options;
      options.dialect = dialect;
      options.format = [format](const std::string& module) {
        return tiny_is_mlp(module) ? format : FormatId::kBf16;
      };
      const Recipe apart = must(read(options));
      options.stacked = true;
      const Recipe stacked = must(read(options));
      EXPECT_EQ(expect_same_model(apart, stacked), 3 + 2 * (2 + 6 + 2 + 3 * kExperts + 3));
      const Weight* up = stacked.find({1, Role::kExpertUp, 3});
      EXPECT_EQ(up->name, "model.layers.1.mlp.experts.up_proj");
      EXPECT_EQ(up->codes.begin, 3 * up->codes.bytes);
      EXPECT_EQ(up->scales.begin, 3 * up->scales.bytes);
      EXPECT_EQ(up->meta.global, apart.find({1, Role::kExpertUp, 3})->meta.global);
    }
  }
}

TEST(RecipeDialects, OneGlobalForAllStackedExperts) {
  TinyOptions options;
  options.stacked = true;
  TinyTensors tensors = tiny_tensors(options);
  const std::string name = "model.layers.1.mlp.experts.up_proj.weight_scale_2";
  ASSERT_EQ(tensors.at(name).shape, std::vector<int64_t>{kExperts});
  tensors[name] = TinyTensor{DType::kF32, {}, std::vector<std::byte>(4)};
  set_f32(tensors[name], 0.25f);
  const Recipe got = must(read(tensors, tiny_config(options)));
  EXPECT_EQ(got.find({1, Role::kExpertUp, 0})->meta.global, 0.25f);
  EXPECT_EQ(got.find({1, Role::kExpertUp, 7})->meta.global, 0.25f);
  tensors[name].shape = {3};
  tensors[name].bytes.resize(12);
  const auto three = read(tensors, tiny_config(options));
  ASSERT_FALSE(three);
  EXPECT_THAT(three.error().message(), StartsWith("tensor_form: "));
}

TEST(RecipeDialects, F4IsTheSameBytes) {
  TinyOptions options;
  TinyTensors tensors = tiny_tensors(options);
  const Recipe bytes = must(read(tensors, tiny_config(options)));
  for (auto& [name, tensor] : tensors) {
    if (tensor.dtype != DType::kU8) continue;
    tensor.dtype = DType::kF4;
    tensor.shape[1] *= 2;
  }
  EXPECT_GT(expect_same_model(bytes, must(read(tensors, tiny_config(options)))), 60);
}

TEST(RecipeDialects, PerTensorFactorsAreAlwaysApplied) {  // A13
  TinyOptions plain, shifted;
  plain.dialect = shifted.dialect = TinyDialect::kModelOpt;
  shifted.global_factor = [](const std::string&) { return 0x1p-10f; };
  const Recipe a = must(read(plain)), b = must(read(shifted));
  for (const WeightKey& key : {WeightKey{1, Role::kExpertDown, 2}, WeightKey{0, Role::kSharedUp}}) {
    const auto left = decoded(a, key), right = decoded(b, key);
    for (size_t i = 0; i < left.size(); ++i) ASSERT_EQ(left[i] * 0x1p-10f, right[i]);
  }
}

TEST(RecipeDialects, ConfigDecidesBetweenOneRowForms) {
  TempDir dir;
  const std::vector<std::byte> codes(256), scales(8, std::byte{127});
  nibble::testing::write_tiny(dir.path(),
                              {{"a.weight", {DType::kF8E4M3, {1, 256}, codes}},
                               {"a.scale", {DType::kF8E8M0, {1, 8}, scales}}},
                              Json::object());
  const auto index = CheckpointIndex::open(dir.path());
  ASSERT_TRUE(index) << index.error().message();
  const auto mx = resolve_module(*index, Json(), "a", 0, 0);
  ASSERT_TRUE(mx) << mx.error().message();
  EXPECT_EQ(mx->meta.format, FormatId::kMxfp8);
  const auto block =
      resolve_module(*index, {{"quant_method", "fp8"}, {"weight_block_size", {32, 32}}}, "a", 0, 0);
  ASSERT_TRUE(block) << block.error().message();
  EXPECT_EQ(block->meta.format, FormatId::kFp8Block);
  EXPECT_EQ(block->meta.block_cols, 32);
  const auto none = resolve_module(*index, Json(), "b", 0, 0);
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message(), StartsWith("tensor_missing: 'b.weight'"));
  EXPECT_FALSE(resolve_module(*index, Json(), "a", 2, 256));
}

TEST(RecipeDialects, BlockExtentsThatTheGridDenies) {
  TinyOptions options;
  options.dialect = TinyDialect::kDeepSeek;
  options.format = [](const std::string& module) {
    return tiny_is_mlp(module) ? FormatId::kFp8Block : FormatId::kBf16;
  };
  Json config = tiny_config(options);
  config["quantization_config"]["weight_block_size"] = {64, 64};
  const Recipe got = must(read(tiny_tensors(options), config));
  EXPECT_EQ(got.find({0, Role::kSharedUp})->meta.block_rows, 128);
  EXPECT_THAT(got.notices(),
              Contains(HasSubstr("weight_block_size [64, 64], tensors hold fp8 blocks "
                                 "of 128 x 128, not of 64 x 64 (used)")));
}

TEST(RecipeDialects, HybridTiersOfAnEngineModel) {
  TinyOptions options;
  options.format = [](const std::string& module) {
    const bool odd = module.find("experts.1.") != std::string::npos ||
                     module.find("experts.6.") != std::string::npos;
    if (odd && module.find("layers.1.") != std::string::npos) return FormatId::kNf3;
    return tiny_is_mlp(module) && module.find("shared") == std::string::npos ? FormatId::kNvfp4
                                                                             : FormatId::kBf16;
  };
  Json config = tiny_config(options);
  config["quantization_config"] = {{"quant_method", "modelopt"},
                                   {"hybrid_bit_map", {{"1", {4, 3, 4, 4, 4, 4, 3, 4}}}}};
  const Recipe got = must(read(tiny_tensors(options), config));
  EXPECT_EQ(got.find({1, Role::kExpertUp, 6})->meta.format, FormatId::kNf3);
  EXPECT_EQ(got.find({1, Role::kExpertUp, 6})->meta.nf3_bias_log2, 4);
  EXPECT_EQ(got.find({1, Role::kExpertUp, 5})->meta.format, FormatId::kNvfp4);
  config["quantization_config"]["hybrid_bit_map"]["1"][2] = 3;
  const auto wrong = read(tiny_tensors(options), config);
  ASSERT_FALSE(wrong);
  EXPECT_THAT(wrong.error().message(), StartsWith("tensor_missing: "));
  EXPECT_THAT(wrong.error().message(),
              HasSubstr("model.layers.1.mlp.experts.2.gate_proj.nf3_packed: 1 missing"));
  EXPECT_THAT(wrong.error().message(), HasSubstr("the bit map's demoted tier is nf3"));
}

}  // namespace
}  // namespace nibble::recipe
