// Plain to csf to plain on every source, the forms of the containers, the policy, and what a kill
// at a random moment leaves behind.
#include "load/convert_scales.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <random>
#include <thread>

#include "codec/csf_inventory.h"
#include "load/scales_testing.h"
#include "load/verify.h"
#include "recipe/container.h"
#include "support/vector_file.h"

namespace nibble::load {
namespace {

namespace fs = std::filesystem;
using namespace nibble::testing;  // NOLINT: a test's own vocabulary
using recipe::Container;
using ::testing::HasSubstr;
using ::testing::Not;

Container open(const std::string& path) {
  auto container = recipe::open_container(path);
  NIBBLE_CHECK(container, path, container ? "" : container.error().message());
  return std::move(*container);
}

class ConvertScales : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }
  std::string write(const std::string& name, const TinyTensors& tensors, const Json& config) {
    fs::create_directory(path(name));
    write_tiny(path(name), tensors, config);
    return path(name);
  }
  std::string deepseek() { return write("deepseek", deepseek_tensors(), deepseek_config()); }
  std::string kimi() { return write("kimi", kimi_tensors(), kimi_config()); }
  std::string nvfp4(const std::string& prefix) {
    TinyOptions options;
    options.prefix = prefix;
    return write("nvfp4", nvfp4_tensors(options), tiny_config(options));
  }
  Result<ScalesReport> convert(const std::string& from, const std::string& to,
                               const ConvertScalesOptions& options) {
    return convert_scales(from, path(to), options, pool_, {});
  }
  ScalesReport must(Result<ScalesReport> report) {
    EXPECT_TRUE(report) << report.error().message();
    return report ? std::move(*report) : ScalesReport{};
  }
  void expect_refused(const std::string& from, const ConvertScalesOptions& options, Code code,
                      const std::string& mention) {
    const auto report = convert(from, "refused", options);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code(), code);
    EXPECT_THAT(report.error().message(), HasSubstr(mention));
    EXPECT_FALSE(fs::exists(path("refused")));
  }
  VerifyReport against(const std::string& a, const std::string& b) {
    const auto report = verify_against(a, b, pool_, {});
    EXPECT_TRUE(report) << report.error().message();
    return report ? *report : VerifyReport{};
  }
  static ConvertScalesOptions plain() { return {.form = ScalesForm::kPlain}; }

  TempDir dir_;
  ThreadPool pool_{2};
};

TEST_F(ConvertScales, RoundTripGivesEveryTensorBack) {
  const std::string demo = NIBBLE_SOURCE_DIR "/models/demo";
  const struct {
    const char* name;
    std::string source;
    ConvertScalesOptions options;
    const char* container;
    int64_t planes;  // compressed
  } kCases[] = {
      {"demo", demo, {}, "modelopt", 8 * 32 * 3},
      {"deepseek", deepseek(), {}, "manifest deepseek_v41", 2 * 4 * 3},
      {"kimi", kimi(), {}, "manifest kimi_k3", 1 * 4 * 3},
      {"modelopt", nvfp4("model.language_model."), {}, "modelopt", 2 * 8 * 3},
      {"manifest_nvfp4",
       path("nvfp4"),
       {.container = ScalesContainer::kManifest, .max_shard_bytes = 60'000},
       "manifest glm53_nvfp4",
       2 * 8 * 3},
      {"manifest_named",
       path("deepseek"),
       {.family = "deepseek_v4_flash", .max_shard_bytes = 40'000},
       "manifest deepseek_v4_flash",
       2 * 4 * 3},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const std::string csf = cat(c.name, "-csf"), back = cat(c.name, "-back");
    const ScalesReport report = must(convert(c.source, csf, c.options));
    EXPECT_EQ(report.container, c.container);
    EXPECT_EQ(report.planes_changed, c.planes);
    EXPECT_LT(report.written_bytes, report.source_bytes);
    int64_t before = 0, after = 0;
    for (const ScalesReport::Group& g : report.groups) {
      EXPECT_TRUE(g.compressed) << g.module << " " << g.projection << ": " << g.why_plain;
      before += g.plain_bytes;
      after += g.csf_bytes;
    }
    EXPECT_EQ(report.source_bytes - report.written_bytes, before - after);
    const VerifyReport same = against(path(csf), c.source);
    EXPECT_TRUE(same.same()) << difference_text(same.first.value_or(Difference{}));
    EXPECT_EQ(same.stored_planes, c.planes);
    EXPECT_EQ(same.not_canonical, 0);
    EXPECT_EQ(same.tensors, static_cast<int64_t>(open(c.source).index.tensors().size()));

    const ScalesReport decoded = must(convert(path(csf), back, plain()));
    EXPECT_EQ(decoded.planes_changed, c.planes);
    const TinyTensors want = tensors_of(open(c.source).index),
                      got = tensors_of(open(path(back)).index);
    ASSERT_EQ(got.size(), want.size());
    for (const auto& [name, tensor] : want) {
      ASSERT_TRUE(got.contains(name)) << name;
      EXPECT_TRUE(got.at(name) == tensor) << name;
    }
    for (const char* file : {"config.json", "hf_quant_config.json"}) {
      ASSERT_EQ(file_exists(cat(path(back), "/", file)), file_exists(cat(c.source, "/", file)));
      if (!file_exists(cat(c.source, "/", file))) continue;
      EXPECT_EQ(*read_text_file(cat(path(back), "/", file)),
                *read_text_file(cat(c.source, "/", file)));
    }
    std::printf("%s: %lld planes, ratio %.3f\n", c.name, static_cast<long long>(c.planes),
                static_cast<double>(after) / static_cast<double>(before));
  }
}

TEST_F(ConvertScales, ModelOptForm) {
  const std::string source = nvfp4("model.");
  must(convert(source, "csf", {}));
  const Container csf = open(path("csf"));
  const std::string up = "model.layers.1.mlp.experts.3.up_proj.weight_scale";
  EXPECT_EQ(csf.index.find(up), nullptr);
  const checkpoint::TensorInfo* fixed = csf.index.find(up + ".nvfp4_csf_fixed");
  const checkpoint::TensorInfo* exceptions = csf.index.find(up + ".nvfp4_csf_exceptions");
  ASSERT_TRUE(fixed != nullptr && exceptions != nullptr);
  EXPECT_EQ(fixed->dtype, DType::kU8);
  EXPECT_EQ(fixed->shape, (std::vector<int64_t>{128 / 16, 16 * (1 + 256 / 32)}));
  EXPECT_EQ(exceptions->dtype, DType::kU32);
  const Json quant = csf.config["quantization_config"];
  EXPECT_EQ(quant["quant_algo"], "MIXED_PRECISION");
  const Json entry = {
      {"quant_algo", "NVFP4"}, {"group_size", 16}, {"weight_scale_encoding", "csf"}};
  EXPECT_EQ(quant["quantized_layers"]["model.layers.1.mlp.experts"], entry);
  const Json shared = quant["quantized_layers"]["model.layers.1.mlp.shared_experts.up_proj"];
  EXPECT_EQ(shared, (Json{{"quant_algo", "NVFP4"}, {"group_size", 16}}));
  EXPECT_EQ(quant["ignore"], open(source).config["quantization_config"]["ignore"]);
  const auto recipe = recipe::read_recipe(path("csf"));  // and a model can be made of it
  ASSERT_TRUE(recipe) << recipe.error().message();
  const auto original = recipe::read_recipe(source);
  EXPECT_EQ(recipe->notices(), original->notices());
  ASSERT_EQ(recipe->weights().size(), original->weights().size());
  for (const auto& [key, weight] : recipe->weights()) {
    SCOPED_TRACE(recipe::key_text(key));
    const auto plane = recipe::read_scale_plane(recipe->index(), weight);
    const auto want = recipe::read_scale_plane(original->index(), *original->find(key));
    ASSERT_TRUE(plane && want);
    EXPECT_EQ(*plane, *want);
    EXPECT_TRUE(recipe::check_scales(key, weight, *plane));
  }
  EXPECT_TRUE(recipe->find({1, recipe::Role::kExpertUp, 3})->stored_csf());
}

TEST_F(ConvertScales, ManifestForm) {
  const std::string source = kimi();
  must(convert(source, "csf", {.max_shard_bytes = 50'000}));
  const Json manifest = *read_json_file(path("csf/manifest.json"));
  const Json contract = *read_json_file(path("csf/build-contract.json"));
  for (const Json& file : {manifest, contract}) {
    EXPECT_EQ(file["schema"], "lil-mxfp4-csf-checkpoint/1");
    EXPECT_EQ(file["codec"], "row-base-offset1-u24-exceptions/1");
    EXPECT_EQ(file["family"], "kimi_k3");
  }
  EXPECT_GT(manifest["shards"].size(), 2u);
  EXPECT_EQ(contract["source_names"].size(), kimi_tensors().size());
  const Json serving =
      (*read_json_file(path("csf/serve/config.json")))["text_config"]["quantization_config"];
  EXPECT_EQ(serving["quant_method"], "mxfp4_csf");
  EXPECT_EQ(serving["format_version"], 1);
  EXPECT_EQ(serving["checkpoint_root"], path("csf"));
  EXPECT_EQ(serving["format"], "mxfp4-pack-quantized");
  EXPECT_TRUE(against(path("csf/serve"), source).same());
  must(convert(path("csf/serve"), "back", plain()));
  EXPECT_TRUE(against(path("back"), source).same());
  EXPECT_EQ(*read_text_file(path("back/config.json")), *read_text_file(source + "/config.json"));
  // The draft layer's experts are no part of the family's layers.
  EXPECT_NE(
      open(path("csf"))
          .index.find("language_model.model.layers.2.block_sparse_moe.experts.0.w1.weight_scale"),
      nullptr);
}

TEST_F(ConvertScales, WhatWouldGrowStaysPlain) {
  const auto noise = [](TinyTensor& tensor) {
    std::mt19937 random(7);
    for (std::byte& b : tensor.bytes) b = static_cast<std::byte>(random() % 255);
  };
  TinyTensors tensors = deepseek_tensors();
  for (int64_t e = 0; e < kHeavyExperts; ++e) {
    noise(tensors.at(cat("layers.1.ffn.experts.", e, ".w2.scale")));
  }
  const std::string source = write("noisy", tensors, deepseek_config());
  const ScalesReport report = must(convert(source, "csf", {}));
  int kept = 0;
  for (const ScalesReport::Group& g : report.groups) {
    const bool noisy = g.module == "layers.1.ffn.experts" && g.projection == "w2";
    EXPECT_EQ(g.compressed, !noisy) << g.module << " " << g.projection;
    EXPECT_EQ(g.why_plain.empty(), !noisy);
    kept += noisy;
  }
  EXPECT_EQ(kept, 1);
  EXPECT_TRUE(against(path("csf"), source).same());

  // In the ModelOpt form a module is one: noise in one projection keeps all three plain.
  TinyOptions options;
  TinyTensors two = nvfp4_tensors(options);
  for (int64_t e = 0; e < options.experts; ++e) {
    noise(two.at(cat("model.layers.1.mlp.experts.", e, ".up_proj.weight_scale")));
    noise(two.at(cat("model.layers.1.mlp.experts.", e, ".down_proj.weight_scale")));
  }
  const ScalesReport modelopt =
      must(convert(write("two", two, tiny_config(options)), "two-csf", {}));
  for (const ScalesReport::Group& g : modelopt.groups) {
    EXPECT_EQ(g.compressed, g.module == "model.layers.0.mlp.experts");
  }
  EXPECT_FALSE(open(path("two-csf"))
                   .config["quantization_config"]["quantized_layers"]["model.layers.1.mlp.experts"]
                   .contains("weight_scale_encoding"));
  EXPECT_TRUE(against(path("two-csf"), path("two")).same());
}

TEST_F(ConvertScales, UnequalGlobalsKeepAModelOptModulePlain) {
  TinyOptions options;
  TinyTensors tensors = nvfp4_tensors(options);
  tensors.at("model.layers.0.mlp.experts.5.up_proj.weight_scale_2").bytes =
      tiny_bytes(std::vector<float>{0.25f});
  const ScalesReport report = must(convert(write("g", tensors, tiny_config(options)), "csf", {}));
  for (const ScalesReport::Group& g : report.groups) {
    EXPECT_EQ(g.compressed, g.module == "model.layers.1.mlp.experts");
    EXPECT_THAT(g.why_plain, HasSubstr(g.compressed ? "" : "expert 5"));
  }
}

TEST_F(ConvertScales, OthersContainersBecomePlainAndCsfAgain) {
  for (const char* name : {"modelopt_mixed_csf", "manifest_nvfp4_csf",
                           "manifest_mxfp4_csf_deepseek", "manifest_mxfp4_csf_kimi"}) {
    SCOPED_TRACE(name);
    const std::string source = path(name);
    fs::copy(cat(VectorSet::load().dir(), "/checkpoints/", name), source,
             fs::copy_options::recursive);
    fs::remove(source + "/expected.safetensors");
    const bool manifest = file_exists(source + "/manifest.json");
    const std::string once = cat(name, "-plain"), again = cat(name, "-csf");
    must(convert(source, once, plain()));
    EXPECT_TRUE(against(path(once), source).same());
    EXPECT_THAT(*read_text_file(path(once) + "/config.json"), Not(HasSubstr("csf")));
    ConvertScalesOptions options;
    if (manifest) options.container = ScalesContainer::kManifest;
    must(convert(path(once), again, options));
    EXPECT_TRUE(against(path(again), source).same());
  }
}

TEST_F(ConvertScales, Refusals) {
  const std::string source = deepseek();
  expect_refused(source, plain(), Code::kInvalidArgument, "does not store");
  expect_refused(source, {.family = "glm"}, Code::kInvalidArgument, "unknown");
  expect_refused(source, {.family = "kimi_k3"}, Code::kUnsupported, "kimi_k3");
  expect_refused(source, {.container = ScalesContainer::kModelOpt}, Code::kUnsupported, "ModelOpt");
  expect_refused(source, {.max_shard_bytes = 0}, Code::kInvalidArgument, "shard size");
  expect_refused(source, {.max_shard_bytes = 300}, Code::kInvalidArgument, "shard size");
  expect_refused(path("absent"), {}, Code::kNotFound, "absent");
  must(convert(source, "csf", {}));
  expect_refused(path("csf"), {}, Code::kInvalidArgument, "already");
  EXPECT_FALSE(convert(source, "csf", {}));
  TinyOptions ct;
  ct.dialect = TinyDialect::kCompressedTensors;
  const std::string other = write("ct", tiny_tensors(ct), tiny_config(ct));
  expect_refused(other, {}, Code::kUnsupported, "--dialect modelopt");
}

/// Kills a conversion after a random time; returns whether it was still running.
bool killed_run(const std::string& from, const std::string& to, const ConvertScalesOptions& options,
                std::chrono::microseconds after) {
  const pid_t child = ::fork();
  NIBBLE_CHECK(child >= 0, "fork");
  if (child == 0) {
    ThreadPool pool(1);
    const auto report = convert_scales(from, to, options, pool, {});
    ::_exit(report ? 0 : 1);
  }
  const std::string partial = cat(to, ".partial-", child);
  int status = 0;
  bool ended = false;
  while (!ended && !fs::exists(partial)) {  // a busy machine may start the child late
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    ended = ::waitpid(child, &status, WNOHANG) == child;
  }
  if (ended) return false;
  std::this_thread::sleep_for(after);
  ::kill(child, SIGKILL);
  NIBBLE_CHECK(::waitpid(child, &status, 0) == child, "waitpid");
  NIBBLE_CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, status);
  return WIFSIGNALED(status);
}

TEST_F(ConvertScales, FiftyKillsLeaveNothingThatLoads) {
  const std::string sources[] = {deepseek(), nvfp4("model.")};
  std::mt19937 random(20);
  int runs = 0, killed = 0, left_partial = 0, finished = 0;
  int64_t whole_us = 0;  // a run that finishes, nearly
  for (int i = 0; killed < 50 && runs < 1000; i = ++runs) {
    SCOPED_TRACE(i);
    const bool decode = i % 2 == 1;
    const std::string& source = sources[i / 2 % 2];
    const std::string csf = cat(path("csf-of-"), i / 2 % 2);
    ConvertScalesOptions options = decode ? plain() : ConvertScalesOptions{};
    options.max_shard_bytes = 80'000;
    const std::string from = decode ? csf : source;
    if (!fs::exists(csf)) must(convert_scales(source, csf, {}, pool_, {}));
    if (i < 4) {
      const auto start = std::chrono::steady_clock::now();
      must(convert_scales(from, path("timed"), options, pool_, {}));
      whole_us = std::max<int64_t>(whole_us, std::chrono::duration_cast<std::chrono::microseconds>(
                                                 std::chrono::steady_clock::now() - start)
                                                 .count());
      fs::remove_all(path("timed"));
    }
    const std::chrono::microseconds after(random() % static_cast<uint32_t>(whole_us));
    const bool in_time = killed_run(from, path("target"), options, after);
    killed += in_time;
    if (!in_time) whole_us = std::max<int64_t>(1000, whole_us * 9 / 10);
    if (fs::exists(path("target"))) {  // it was renamed: then it is whole
      EXPECT_TRUE(against(path("target"), source).same());
      ++finished;
    }
    std::vector<std::string> left;
    for (const auto& entry : fs::directory_iterator(dir_.path())) {
      if (entry.path().filename().string().starts_with("target")) left.push_back(entry.path());
    }
    for (const std::string& folder : left) {
      const bool partial = folder.find("target.partial-") != std::string::npos;
      left_partial += partial;
      EXPECT_EQ(static_cast<bool>(recipe::open_container(folder)), !partial) << folder;
      fs::remove_all(folder);
    }
  }
  std::printf("%d runs: %d killed, %d left a partial folder, %d had finished\n", runs, killed,
              left_partial, finished);
  EXPECT_EQ(killed, 50);
  EXPECT_GT(left_partial, 25);
}

}  // namespace
}  // namespace nibble::load
