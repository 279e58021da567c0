#include "load/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "load/convert_scales.h"
#include "load/scales_testing.h"
#include "recipe/container.h"
#include "support/vector_file.h"

namespace nibble::load {
namespace {

namespace fs = std::filesystem;
using namespace nibble::testing;  // NOLINT: a test's own vocabulary
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Verify : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_.path() + "/" + name; }
  std::string write(const std::string& name, const TinyTensors& tensors, const Json& config) {
    fs::create_directory(path(name));
    write_tiny(path(name), tensors, config);
    return path(name);
  }
  /// The ModelOpt checkpoint, compressed, as tensors and config.
  void compressed(TinyTensors& tensors, Json& config) {
    const TinyOptions options;
    write("plain", nvfp4_tensors(options), tiny_config(options));
    ASSERT_TRUE(convert_scales(path("plain"), path("csf"), {}, pool_, {}));
    const auto csf = recipe::open_container(path("csf"));
    ASSERT_TRUE(csf);
    tensors = tensors_of(csf->index);
    config = csf->config;
  }
  VerifyReport alone(const std::string& folder) {
    const auto report = verify_checkpoint(folder, pool_, {});
    EXPECT_TRUE(report) << report.error().message();
    return report ? *report : VerifyReport{};
  }
  VerifyReport against(const std::string& a, const std::string& b) {
    const auto report = verify_against(a, b, pool_, {});
    EXPECT_TRUE(report) << report.error().message();
    return report ? *report : VerifyReport{};
  }

  TempDir dir_;
  ThreadPool pool_{2};
};

TEST_F(Verify, PlainCheckpointsPassTheCodec) {
  const std::string checkpoints = VectorSet::load().dir() + "/checkpoints/";
  const std::string demo = NIBBLE_SOURCE_DIR "/models/demo";
  const struct {
    std::string folder;
    int64_t planes, bytes;
  } kCases[] = {
      {write("deepseek", deepseek_tensors(), deepseek_config()), 9 * 3, 9 * 3 * 1024},
      {write("kimi", kimi_tensors(), kimi_config()), 8 * 3, 8 * 3 * 1024},
      {checkpoints + "gpt_oss", 4, -1},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.folder);
    std::string folder = c.folder;
    if (c.bytes < 0) {  // without the answers beside it
      folder = path("gpt_oss");
      fs::copy(c.folder, folder, fs::copy_options::recursive);
      fs::remove(folder + "/expected.safetensors");
    }
    const VerifyReport report = alone(folder);
    EXPECT_TRUE(report.same());
    EXPECT_EQ(report.planes, c.planes);
    EXPECT_EQ(report.stored_planes, 0);
    EXPECT_EQ(report.plane_bytes, c.bytes < 0 ? 2 * (128 + 256) * 4 : c.bytes);
    EXPECT_GT(report.plane_bytes, 0);
    EXPECT_GT(report.csf_bytes, 0);
  }
  const VerifyReport report = alone(demo);
  EXPECT_TRUE(report.same());
  EXPECT_GE(report.planes, 8 * 32 * 3);  // and the MXFP8 ones beside the experts
  EXPECT_EQ(report.not_encodable, 0);
  std::printf("demo: %lld planes, %lld bytes, csf %lld, %lld exceptions\n",
              static_cast<long long>(report.planes), static_cast<long long>(report.plane_bytes),
              static_cast<long long>(report.csf_bytes), static_cast<long long>(report.exceptions));
}

TEST_F(Verify, OneFlippedByteIsFoundWhereItIs) {
  const std::string plain = write("plain", deepseek_tensors(), deepseek_config());
  ASSERT_TRUE(convert_scales(plain, path("csf"), {}, pool_, {}));
  EXPECT_TRUE(against(path("csf"), plain).same());
  const struct {
    const char* tensor;
    int64_t cols, byte, element_bytes;
  } kCases[] = {
      {"layers.1.ffn.experts.2.w3.scale", 8, 8 * 77 + 5, 1},  // compressed on the other side
      {"layers.0.ffn.experts.0.w2.scale", 4, 0, 1},
      {"layers.0.ffn.experts.0.w2.scale", 4, 1023, 1},
      {"mtp.0.ffn.experts.0.w1.scale", 8, 9, 1},  // plain on both
      {"layers.0.ffn.experts.3.w1.weight", 128, 128 * 3 + 17, 1},
      {"head.weight", 256, 2 * 256 * 31 + 2 * 255 + 1, 2},
      {"norm.weight", 3, 9, 4},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(cat(c.tensor, " byte ", c.byte));
    TinyTensors tensors = deepseek_tensors();
    std::byte& byte = tensors.at(c.tensor).bytes.at(static_cast<size_t>(c.byte));
    const int was = std::to_integer<int>(byte);
    byte ^= std::byte{0x10};
    fs::remove_all(path("flipped"));
    const std::string flipped = write("flipped", tensors, deepseek_config());
    for (const std::string& other : {plain, path("csf"), path("csf/serve")}) {
      const VerifyReport report = against(other, flipped);
      EXPECT_EQ(report.differing, 1);
      ASSERT_TRUE(report.first);
      EXPECT_EQ(report.first->tensor, c.tensor);
      EXPECT_EQ(report.first->row, c.byte / c.element_bytes / c.cols);
      EXPECT_EQ(report.first->column, c.byte / c.element_bytes % c.cols);
      EXPECT_EQ(report.first->left, was);
      EXPECT_EQ(report.first->right, was ^ 0x10);
      const VerifyReport mirrored = against(flipped, other);
      ASSERT_TRUE(mirrored.first);
      EXPECT_EQ(mirrored.first->left, was ^ 0x10);
    }
  }
}

TEST_F(Verify, MissingTensorsAndOtherFormsAreDifferences) {
  const std::string plain = write("plain", deepseek_tensors(), deepseek_config());
  TinyTensors tensors = deepseek_tensors();
  tensors.erase("norm.weight");
  tensors["zz.weight"] = plain_bf16("zz", 2, 2);
  tensors.at("head.weight").shape = {64, 128};
  const VerifyReport report = against(plain, write("other", tensors, deepseek_config()));
  EXPECT_EQ(report.differing, 3);
  EXPECT_EQ(report.first->tensor, "head.weight");
  EXPECT_EQ(report.first->what, "BF16 [32, 256] against BF16 [64, 128]");
  TinyTensors only = deepseek_tensors();
  only.erase("norm.weight");
  const VerifyReport missing = against(plain, write("only", only, deepseek_config()));
  EXPECT_THAT(difference_text(*missing.first), HasSubstr("'norm.weight': is missing in"));
}

TEST_F(Verify, DamagedStreamsAreFoundOrRefused) {
  TinyTensors tensors;
  Json config;
  ASSERT_NO_FATAL_FAILURE(compressed(tensors, config));
  const VerifyReport good = alone(path("csf"));
  EXPECT_EQ(good.stored_planes, 2 * 8 * 3);
  EXPECT_EQ(good.not_canonical, 0);
  EXPECT_GT(good.exceptions, 0);
  const std::string scale = "model.layers.1.mlp.experts.4.down_proj.weight_scale";  // [256, 8]
  const std::string fixed = scale + ".nvfp4_csf_fixed", words = scale + ".nvfp4_csf_exceptions";

  // A code of row 37, column 3: slab 2, row 5 of it, byte 1, high nibble.
  TinyTensors edited = tensors;
  edited.at(fixed).bytes.at(2 * 80 + 16 + 5 * 4 + 1) ^= std::byte{0x10};
  VerifyReport report = against(write("code", edited, config), path("plain"));
  EXPECT_EQ(report.differing, 1);
  EXPECT_EQ(report.first->tensor, scale);
  EXPECT_EQ(report.first->row, 37);
  EXPECT_EQ(report.first->column, 3);

  // A base out of range: refused by name, wherever it is read.
  edited = tensors;
  edited.at(fixed).bytes.at(80) = std::byte{241};
  const auto refused = verify_checkpoint(write("base", edited, config), pool_, {});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), StartsWith("base_range"));
  EXPECT_THAT(refused.error().message(), HasSubstr(fixed));

  // An exception that repeats its code: legal, not canonical, and the same plane.
  edited = tensors;
  TinyTensor& list = edited.at(words);
  const std::byte value = [&] {
    const auto container = recipe::open_container(path("plain"));
    std::byte first{};
    EXPECT_TRUE(container->index.read(*container->index.find(scale), 0, std::span(&first, 1)));
    return first;
  }();
  const bool first_is_listed = !list.bytes.empty() && list.bytes[0] == std::byte{0} &&
                               list.bytes[1] == std::byte{0} && list.bytes[2] == std::byte{0};
  ASSERT_FALSE(first_is_listed);
  const std::byte word[] = {std::byte{0}, std::byte{0}, std::byte{0}, value};
  list.bytes.insert(list.bytes.begin(), std::begin(word), std::end(word));
  ++list.shape[0];
  report = against(write("legal", edited, config), path("plain"));
  EXPECT_TRUE(report.same());
  EXPECT_EQ(report.not_canonical, 1);
}

}  // namespace
}  // namespace nibble::load
