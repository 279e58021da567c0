// read_recipe on small checkpoints that the tests write themselves: every way in which a checkpoint
// can be incomplete, damaged or at odds with its config. Dialects are in recipe_dialects_test.cc.
#include "recipe/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "base/json.h"
#include "recipe/recipe_testing.h"
#include "support/vector_file.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;
using formats::DType;
using formats::FormatId;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Recipe, PlainCheckpointIsTotal) {
  TinyOptions options;
  options.format = [](const std::string&) { return FormatId::kBf16; };
  options.attention_bias = true;
  options.dense_layers = 1;
  Json config = tiny_config(options);
  config.erase("quantization_config");
  const Recipe got = must(read(tiny_tensors(options), config));
  // embedding, head, norm; 2 x (2 norms, q k v o, 3 biases, 2 norms); dense 3; router, bias,
  // shared.
  EXPECT_EQ(got.weights().size(), 3u + 2u * 11u + 3u + 2u + 3u * kExperts + 3u);
  EXPECT_THAT(got.notices(), IsEmpty());
  EXPECT_FALSE(got.mtp_present());
  EXPECT_EQ(got.config().family, "glm4_moe");
  EXPECT_EQ(got.raw_config().at("model_type"), "glm4_moe");
  const Weight* up = got.find({1, Role::kExpertUp, 5});
  ASSERT_NE(up, nullptr);
  EXPECT_EQ(up->name, "model.layers.1.mlp.experts.5.up_proj");
  EXPECT_EQ(up->dialect, "plain");
  EXPECT_EQ(up->meta.rows, 128);
  EXPECT_EQ(up->meta.cols, 256);
  EXPECT_EQ(up->scales.tensor, nullptr);
  EXPECT_EQ(got.find({0, Role::kQBias})->meta.cols, 256);
  EXPECT_EQ(got.find({1, Role::kDenseUp}), nullptr);
  EXPECT_EQ(key_text({1, Role::kExpertUp, 5}), "layer 1 expert 5 up");
  EXPECT_EQ(key_text({-1, Role::kEmbedding}), "embedding");
  const auto want =
      nibble::testing::tiny_values("layers.1.mlp.experts.5.up_proj", 128 * 256, 0.25f);
  EXPECT_TRUE(same_bits(decoded(got, {1, Role::kExpertUp, 5}), want));
}

TEST(Recipe, BadScalesAreNamed) {  // A12
  TinyOptions options;
  options.format = [](const std::string& module) {
    if (module.ends_with("experts.5.up_proj")) return FormatId::kMxfp4;
    if (module.ends_with("experts.4.up_proj")) return FormatId::kFp8Channel;
    return tiny_is_mlp(module) ? FormatId::kNvfp4 : FormatId::kBf16;
  };
  const struct {
    int32_t expert;
    size_t byte;
    int value;
    const char* want;  // null: valid
  } cases[] = {
      {3, 17, 0x7F, "element 17: expected a finite scale that is not negative, found NaN"},
      {3, 2000, 0xFF, "element 2000"},
      {3, 5, 0x81, "element 5: expected a finite scale that is not negative, found -0.00195"},
      {3, 5, 0x80, nullptr},
      {5, 33, 0xFF, "element 33: expected a finite scale that is not negative, found NaN"},
      {5, 33, 0x00, nullptr},
      {4, 4 * 9 + 3, 0xFF, "element 9"},  // sign and exponent of an F32
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(cat(c.expert, " ", c.byte, " ", c.value));
    TinyTensors tensors = tiny_tensors(options);
    const std::string name = cat("model.layers.1.mlp.experts.", c.expert, ".up_proj.weight_scale");
    tensors.at(name).bytes[c.byte] = static_cast<std::byte>(c.value);
    const Recipe got = must(read(tensors, tiny_config(options)));
    const WeightKey key = {1, Role::kExpertUp, c.expert};
    const Weight* weight = got.find(key);
    std::vector<std::byte> scales(static_cast<size_t>(weight->scales.bytes));
    ASSERT_TRUE(got.index().read(*weight->scales.tensor, weight->scales.begin, scales));
    const auto checked = check_scales(key, *weight, scales);
    ASSERT_EQ(static_cast<bool>(checked), c.want == nullptr);
    if (c.want != nullptr) {
      EXPECT_THAT(checked.error().message(),
                  StartsWith(cat("layer 1 expert ", c.expert, " up: tensor '", name, "' ")));
      EXPECT_THAT(checked.error().message(), HasSubstr(c.want));
    }
    EXPECT_FALSE(check_scales(key, *weight, std::span(scales).first(scales.size() - 1)));
    std::fill(scales.begin(), scales.end(), std::byte{0});
    const auto zeros = check_scales(key, *weight, scales);
    EXPECT_EQ(static_cast<bool>(zeros), c.expert == 5);  // E8M0 has no zero
  }
}

TEST(Recipe, BadGlobalScales) {
  for (const TinyDialect dialect : {TinyDialect::kModelOpt, TinyDialect::kCompressedTensors}) {
    const bool ct = dialect == TinyDialect::kCompressedTensors;
    const std::string name =
        cat("model.layers.1.mlp.experts.2.up_proj.weight_", ct ? "global_scale" : "scale_2");
    TinyOptions options;
    options.dialect = dialect;
    for (const float bad : {0.0f, -1.0f, std::nanf(""), INFINITY, ct ? 1e-45f : -0.0f}) {
      TinyTensors tensors = tiny_tensors(options);
      set_f32(tensors.at(name), bad);
      const auto got = read(tensors, tiny_config(options));
      ASSERT_FALSE(got) << bad;
      EXPECT_THAT(got.error().message(), StartsWith(cat("global_scale: '", name, "'")));
    }
    TinyTensors tensors = tiny_tensors(options);
    const float before = f32_of(tensors.at(name));
    tensors.at(name) = TinyTensor{DType::kF32, {2}, std::vector<std::byte>(8)};
    EXPECT_GT(before, 0.0f);
    const auto got = read(tensors, tiny_config(options));
    ASSERT_FALSE(got);
    EXPECT_THAT(got.error().message(), StartsWith("tensor_form: "));
  }
}

TEST(Recipe, MissingAndSurplusAreListedByPattern) {
  TinyOptions options;
  TinyTensors tensors = tiny_tensors(options);
  for (int e = 0; e < kExperts; ++e) {
    for (const char* part : {"weight", "weight_scale", "weight_scale_2", "input_scale"}) {
      tensors.erase(cat("model.layers.1.mlp.experts.", e, ".up_proj.", part));
      if (e < 3) {
        tensors[cat("model.layers.1.mlp.experts.", e, ".side_proj.", part)] =
            TinyTensor{DType::kF32, {}, std::vector<std::byte>(4)};
      }
    }
  }
  tensors.erase("model.layers.0.mlp.experts.6.down_proj.weight_scale");
  tensors.erase("model.norm.weight");
  const auto got = read(tensors, tiny_config(options));
  ASSERT_FALSE(got);
  const std::string& message = got.error().message();
  EXPECT_EQ(got.error().code(), Code::kCorruptInput);
  EXPECT_THAT(message, StartsWith("tensor_missing: the model and the files differ by 10 missing"));
  EXPECT_THAT(message, HasSubstr("model.layers.1.mlp.experts.{0..7}.up_proj.weight: 8 missing"));
  EXPECT_THAT(message, HasSubstr("model.norm.weight: 1 missing"));
  EXPECT_THAT(message, HasSubstr("model.layers.0.mlp.experts.6.down_proj.weight_scale: 1 missing"));
  EXPECT_THAT(message, HasSubstr("layer 0 expert 6 down lacks"));
  EXPECT_THAT(message, HasSubstr("model.layers.1.mlp.experts.{0..2}.side_proj.weight: 3 surplus"));
  EXPECT_THAT(message, Not(HasSubstr("input_scale")));

  TinyTensors more = tiny_tensors(options);
  more["model.visual.patch.weight"] = TinyTensor{DType::kBf16, {1}, std::vector<std::byte>(2)};
  const auto surplus = read(more, tiny_config(options));
  ASSERT_FALSE(surplus);
  EXPECT_THAT(surplus.error().message(), StartsWith("tensor_surplus: "));
  EXPECT_THAT(surplus.error().message(), HasSubstr("model.visual.patch.weight: 1 surplus"));
}

TEST(Recipe, Fp8WithoutItsScaleIsMissing) {
  TinyOptions options;
  options.format = [](const std::string& module) {
    return tiny_is_mlp(module) ? FormatId::kFp8Block : FormatId::kBf16;
  };
  TinyTensors tensors = tiny_tensors(options);
  tensors.erase("model.layers.1.mlp.experts.0.up_proj.weight_scale_inv");
  const auto got = read(tensors, tiny_config(options));
  ASSERT_FALSE(got);
  EXPECT_THAT(got.error().message(), StartsWith("tensor_missing: "));
  EXPECT_THAT(got.error().message(), HasSubstr("experts.0.up_proj.weight_scale: 1 missing"));
}

TEST(Recipe, WrongShapesAreNamed) {
  const struct {
    const char* name;
    TinyTensor tensor;
    const char* expected;
  } cases[] = {
      {"model.layers.1.mlp.experts.0.up_proj.weight",
       {DType::kU8, {128, 64}, std::vector<std::byte>(128 * 64)},
       "found F8_E4M3 [128, 16]"},
      {"model.layers.1.mlp.experts.0.up_proj.weight_scale",
       {DType::kF8E4M3, {128, 8}, std::vector<std::byte>(128 * 8)},
       "expected F8_E4M3 [128, 16] of nvfp4 [128, 256], found F8_E4M3 [128, 8]"},
      {"model.layers.1.mlp.experts.0.up_proj.weight",
       {DType::kI32, {128, 32}, std::vector<std::byte>(128 * 32 * 4)},
       "found I32 [128, 32]"},
      {"model.layers.1.mlp.experts.0.up_proj.weight",
       {DType::kU8, {128, 0}, {}},
       "expected extents above 0"},
      {"model.norm.weight",
       {DType::kBf16, {128}, std::vector<std::byte>(256)},
       "expected F32, BF16 or F16 [256], found BF16 [128]"},
      {"model.layers.0.self_attn.q_proj.weight",
       {DType::kBf16, {256, 128}, std::vector<std::byte>(256 * 256)},
       "expected bf16 codes of a matrix [256, 256], found BF16 [256, 128]"},
      {"model.layers.0.self_attn.q_proj.weight",
       {DType::kBf16, {256, 256, 1}, std::vector<std::byte>(256 * 512)},
       "expected a matrix of two extents"},
  };
  for (const auto& c : cases) {
    TinyOptions options;
    TinyTensors tensors = tiny_tensors(options);
    tensors.at(c.name) = c.tensor;
    const auto got = read(tensors, tiny_config(options));
    ASSERT_FALSE(got) << c.name;
    EXPECT_THAT(got.error().message(), StartsWith("tensor_form: 'model."));
    EXPECT_THAT(got.error().message(), HasSubstr(c.expected));
  }
}

TEST(Recipe, MtpPromises) {
  TinyOptions options;
  options.mtp_promised = 1;
  const Recipe absent = must(read(options));
  EXPECT_FALSE(absent.mtp_present());
  EXPECT_EQ(absent.config().mtp_layers, 1);
  EXPECT_THAT(absent.notices(),
              Contains("MTP layer 2 is promised by num_nextn_predict_layers but its 41 tensors are "
                       "absent"));

  options.mtp_layers = 1;
  TinyTensors tensors = tiny_tensors(options);
  tensors.erase("model.layers.2.enorm.weight");
  const auto partial = read(tensors, tiny_config(options));
  ASSERT_FALSE(partial);
  EXPECT_THAT(partial.error().message(), HasSubstr("model.layers.2.enorm.weight: 1 missing"));

  options.mtp_promised = 0;
  const Recipe unpromised = must(read(options));
  EXPECT_TRUE(unpromised.mtp_present());
  EXPECT_EQ(unpromised.config().mtp_layers, 1);
  EXPECT_THAT(unpromised.notices()[0],
              StartsWith("config promises 0 MTP layers, the tensors hold 1 from layer 2 on"));
}

TEST(Recipe, AllowedExtrasAreOneNotice) {
  TinyOptions options;
  options.input_scales = false;
  TinyTensors tensors = tiny_tensors(options);
  const TinyTensor scalar = {DType::kF32, {}, std::vector<std::byte>(4)};
  tensors["model.layers.0.self_attn.k_proj.k_scale"] = scalar;
  tensors["model.layers.0.self_attn.v_proj.v_scale"] = scalar;
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = scalar;
  const Recipe got = must(read(tensors, tiny_config(options)));
  ASSERT_EQ(got.notices().size(), 1u);
  EXPECT_EQ(got.notices()[0],
            "stored but not needed, ignored: inv_freq (1), k_scale (1), v_scale (1)");
}

TEST(Recipe, ScaleEncodingAndTensorsMustAgree) {
  TinyOptions options;
  TinyTensors tensors = tiny_tensors(options);
  const std::string scale = "model.layers.1.mlp.experts.0.up_proj.weight_scale";
  tensors[scale + ".nvfp4_csf_fixed"] =
      TinyTensor{DType::kU8, {8, 144}, std::vector<std::byte>(8 * 144)};
  const auto half = read(tensors, tiny_config(options));
  ASSERT_FALSE(half);
  EXPECT_THAT(half.error().message(), StartsWith("partner_missing: "));
  tensors[scale + ".nvfp4_csf_exceptions"] = TinyTensor{DType::kU32, {0}, {}};
  const auto twice = read(tensors, tiny_config(options));
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().message(), StartsWith("scale_twice: "));
  tensors.erase(scale);
  const auto undeclared = read(tensors, tiny_config(options));
  ASSERT_FALSE(undeclared);
  EXPECT_EQ(undeclared.error().code(), Code::kCorruptInput);
  EXPECT_THAT(undeclared.error().message(), StartsWith("scale_encoding: "));
  Json config = tiny_config(options);
  config["quantization_config"]["quantized_layers"] = {
      {"model.layers.1.mlp.experts", {{"quant_algo", "NVFP4"}, {"weight_scale_encoding", "csf"}}}};
  const auto declared = read(tiny_tensors(options), config);
  ASSERT_FALSE(declared);
  EXPECT_EQ(declared.error().code(), Code::kCorruptInput);
  EXPECT_THAT(declared.error().message(), StartsWith("scale_encoding: "));
  for (const auto& [shape, fault] : std::vector<std::pair<std::vector<int64_t>, const char*>>{
           {{8, 144}, nullptr}, {{8, 128}, "fixed_shape: "}, {{1, 1152}, "fixed_shape: "}}) {
    TinyTensors module = tiny_tensors(options);
    for (const auto& [name, tensor] : tiny_tensors(options)) {
      if (!name.starts_with("model.layers.1.mlp.experts.") || !name.ends_with("weight_scale")) {
        continue;
      }
      const int64_t rows = tensor.shape[0], cols = tensor.shape[1];
      const std::vector<int64_t> full = {rows / 16, 16 * (1 + cols / 2)};
      const std::vector<int64_t> chosen = name == scale ? shape : full;
      module.erase(name);
      module[name + ".nvfp4_csf_fixed"] = TinyTensor{
          DType::kU8, chosen, std::vector<std::byte>(static_cast<size_t>(chosen[0] * chosen[1]))};
      module[name + ".nvfp4_csf_exceptions"] = TinyTensor{DType::kU32, {0}, {}};
    }
    const auto got = read(module, config);
    ASSERT_EQ(static_cast<bool>(got), fault == nullptr);
    if (fault != nullptr) {
      EXPECT_THAT(got.error().message(), StartsWith(fault));
      continue;
    }
    const Weight& up = got->weights().at({1, Role::kExpertUp, 0});
    EXPECT_TRUE(up.stored_csf());
    EXPECT_EQ(up.scales.tensor, nullptr);
    EXPECT_EQ(up.dialect, "modelopt nvfp4 csf");
  }
}

TEST(Recipe, OtherRefusals) {
  TinyOptions options;
  const TinyTensors tensors = tiny_tensors(options);
  Json config = tiny_config(options);
  config["model_type"] = "llama";
  const auto family = read(tensors, config);
  ASSERT_FALSE(family);
  EXPECT_EQ(family.error().code(), Code::kUnsupported);
  EXPECT_THAT(family.error().message(), HasSubstr("known are glm4_moe"));
  config = tiny_config(options);
  config["num_hidden_layers"] = 4096;
  config["n_routed_experts"] = 65536;
  const auto huge = read(tensors, config);
  ASSERT_FALSE(huge);
  EXPECT_THAT(huge.error().message(), HasSubstr("4096 layers of 65536 experts"));
  TempDir dir;
  nibble::testing::write_tiny(dir.path(), tensors, config);
  std::filesystem::remove(dir.path() + "/config.json");
  const auto bare = read_recipe(dir.path());
  ASSERT_FALSE(bare);
  EXPECT_EQ(bare.error().code(), Code::kNotFound);
}

TEST(Recipe, FixturesRead) {
  int read_count = 0;
  for (const char* name : {"glm4_moe", "glm4_moe_mtp", "glm4_moe-nvfp4-modelopt",
                           "glm4_moe-nvfp4-ct", "glm4_moe-mxfp4-ct"}) {
    SCOPED_TRACE(name);
    const std::string folder = nibble::testing::fixtures_dir() + "/" + name;
    auto index = CheckpointIndex::open(folder + "/model.safetensors");
    ASSERT_TRUE(index) << index.error().message();
    const size_t stored = index->tensors().size();
    const auto got = read_recipe(std::move(*index), folder);
    ASSERT_TRUE(got) << got.error().message();
    EXPECT_EQ(got->mtp_present(), std::string(name) == "glm4_moe_mtp");
    EXPECT_GT(stored, got->weights().size() - 1);
    for (const std::string& notice : got->notices()) {
      EXPECT_THAT(notice, HasSubstr("not needed, ignored: input_"));
    }
    ++read_count;
  }
  EXPECT_EQ(read_count, 5);
}

// As many tensors as the largest public checkpoints have.
TEST(Recipe, LargeIndexReadsInASecond) {
  TinyOptions options;
  options.layers = 92;
  options.experts = 271;
  options.hidden = options.inner = 32;
  options.heads = options.kv_heads = 1;
  options.head_dim = 32;
  options.vocab = 64;
  TempDir dir;
  const TinyTensors tensors = tiny_tensors(options);
  ASSERT_GT(tensors.size(), 299'000u);
  Json config = tiny_config(options);
  std::vector<std::string> ignore = {"lm_head"};
  for (int64_t l = 0; l < options.layers; ++l) {
    ignore.push_back(cat("model.layers.", l, ".self_attn*"));
    ignore.push_back(cat("model.layers.", l, ".mlp.gate"));
  }
  config["quantization_config"]["ignore"] = ignore;
  nibble::testing::write_tiny(dir.path(), tensors, config, 64 << 20);
  auto index = CheckpointIndex::open(dir.path());
  ASSERT_TRUE(index) << index.error().message();
  const std::clock_t cpu_begin = std::clock();
  const auto begin = std::chrono::steady_clock::now();
  const auto got = read_recipe(std::move(*index), dir.path());
  const double cpu = static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_GT(got->weights().size(), 75'000u);
  EXPECT_THAT(got->notices(), Each(HasSubstr("input_scale")));
  std::printf("%zu tensors, %zu weights: %.3f s beyond the index (%.3f s of CPU)\n", tensors.size(),
              got->weights().size(), seconds, cpu);
  EXPECT_LT(cpu, 5.0);  // well below a second alone on a machine; sanitizers slow it down
}

}  // namespace
}  // namespace nibble::recipe
