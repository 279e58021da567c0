// What opening a manifest container refuses beyond the vectors: serving configs that point wrongly,
// and inventories that the shards do not bear out.
#include "recipe/container.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "recipe/tiny_checkpoint_testing.h"
#include "support/vector_file.h"

namespace nibble::recipe {
namespace {

namespace fs = std::filesystem;
using nibble::testing::TempDir;
using nibble::testing::VectorSet;
using ::testing::StartsWith;

constexpr const char* kFirst = "model-00001-of-00002.safetensors";
constexpr const char* kSecond = "model-00002-of-00002.safetensors";

class ContainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::copy(VectorSet::load().dir() + "/checkpoints/manifest_nvfp4_csf", root(),
             fs::copy_options::recursive);
    edit("serve/config.json", "/quantization_config/checkpoint_root", root());
  }
  std::string root() const { return dir_.path() + "/root"; }
  void edit(const std::string& file, const std::string& pointer, const Json& value) {
    Json json = read_json_file(root() + "/" + file).value();
    json[Json::json_pointer(pointer)] = value;
    write_file_atomic(root() + "/" + file, json_dump(json)).value();
  }
  void expect_error(const std::string& folder, const char* name, Code code = Code::kCorruptInput) {
    const auto got = open_container(folder);
    ASSERT_FALSE(got);
    EXPECT_THAT(got.error().message(), StartsWith(name));
    EXPECT_EQ(got.error().code(), code);
  }

 private:
  TempDir dir_;
};

TEST_F(ContainerTest, BothDoorsLeadToTheSameTensors) {
  const auto by_root = open_container(root()), by_serve = open_container(root() + "/serve");
  ASSERT_TRUE(by_root && by_serve);
  EXPECT_EQ(by_root->index.tensors().size(), by_serve->index.tensors().size());
  EXPECT_EQ(by_root->files_directory, root() + "/metadata");
  EXPECT_EQ(by_serve->files_directory, root() + "/serve");
  EXPECT_EQ(by_root->manifest->family, "glm53_nvfp4");
  EXPECT_EQ(by_root->manifest->scale_dtype, formats::DType::kF8E4M3);
  EXPECT_EQ(by_serve->quantization()->manifest_csf(), codec::CsfKind::kNvfp4);
  EXPECT_EQ(config_directory(root()), root() + "/metadata");
  EXPECT_EQ(config_directory(root() + "/serve"), root() + "/serve");
}

TEST_F(ContainerTest, ServingConfigs) {
  const struct {
    const char* key;
    Json value;
    const char* error;
  } kCases[] = {
      {"checkpoint_root", "root", "quant_method: "},
      {"checkpoint_root", nullptr, "quant_method: "},
      {"checkpoint_root", 3, "quant_method: "},
      {"format_version", 2, "quant_method: "},
      {"format_version", "1", "quant_method: "},
      {"quant_method", "mxfp4_csf", "quant_method: "},  // the root holds the other codec
      {"quant_method", "modelopt", "quant_method: "},
  };
  const std::string good = read_text_file(root() + "/serve/config.json").value();
  for (const auto& c : kCases) {
    SCOPED_TRACE(cat(c.key, " ", json_dump(c.value)));
    write_file_atomic(root() + "/serve/config.json", good).value();
    edit("serve/config.json", cat("/quantization_config/", c.key), c.value);
    expect_error(root() + "/serve", c.error);
  }
  write_file_atomic(root() + "/serve/config.json", good).value();
  edit("serve/config.json", "/quantization_config/checkpoint_root", "/nowhere");
  EXPECT_EQ(open_container(root() + "/serve").error().code(), Code::kNotFound);
}

TEST_F(ContainerTest, InventoriesAreComparedWithTheShards) {
  const std::string good = read_text_file(root() + "/build-contract.json").value();
  const auto again = [&] { write_file_atomic(root() + "/build-contract.json", good).value(); };
  edit("build-contract.json", "/source_names/absent.weight", kFirst);
  expect_error(root(), "inventory: ");
  again();
  edit("build-contract.json", "/source_names/lm_head.weight", kSecond);  // it lies in the first
  expect_error(root(), "inventory: ");
  again();
  Json contract = parse_json(good, "contract").value();
  contract["source_names"].erase("lm_head.weight");
  write_file_atomic(root() + "/build-contract.json", json_dump(contract)).value();
  expect_error(root(), "inventory: ");
  again();
  edit("manifest.json", "/shards", Json::array({{{"file", kFirst}}, {{"file", kFirst}}}));
  expect_error(root(), "inventory: ");
  fs::remove(root() + "/build-contract.json");
  expect_error(root(), "", Code::kNotFound);
}

TEST_F(ContainerTest, FoldersOfKilledWritersDoNotOpen) {
  for (const char* name : {".partial-7", ".partial-12345"}) {
    fs::copy(root(), root() + name, fs::copy_options::recursive);
    expect_error(root() + name, "unfinished: ");
    expect_error(root() + name + "/", "unfinished: ");
  }
  for (const char* name : {".partial-", ".partial-7b", "-partial-7"}) {
    fs::copy(root(), root() + name, fs::copy_options::recursive);
    EXPECT_TRUE(open_container(root() + name)) << name;
  }
}

TEST_F(ContainerTest, AManifestConfigNeedsItsManifest) {
  fs::remove(root() + "/manifest.json");  // what a killed writer leaves: no config at the top
  expect_error(root(), "", Code::kNotFound);
}

}  // namespace
}  // namespace nibble::recipe
