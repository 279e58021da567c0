// Whole folders of the test vectors, read without a family: every stored module resolves, decodes
// and equals expected.safetensors bit for bit, and every damaged folder is refused by name.
// Manifest containers are read by their root and by their serving directory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdio>
#include <filesystem>

#include "base/json.h"
#include "formats/element.h"
#include "recipe/container.h"
#include "recipe/module_name.h"
#include "recipe/module_resolver.h"
#include "recipe/scale_plane.h"
#include "recipe/tiny_checkpoint_testing.h"
#include "support/vector_file.h"

namespace nibble::recipe {
namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointIndex;
using nibble::testing::Case;
using nibble::testing::TempDir;
using nibble::testing::TensorFile;
using nibble::testing::VectorSet;
using ::testing::StartsWith;

const VectorSet& vectors() {
  static const VectorSet set = VectorSet::load();
  return set;
}

bool is_manifest(const std::string& folder) { return file_exists(folder + "/manifest.json"); }

/// Makes a copied container's serving directory point to the copy.
std::string serving_directory(const std::string& root) {
  const std::string path = root + "/serve/config.json";
  std::string text = read_text_file(path).value();
  const size_t at = text.find("@ROOT@");
  NIBBLE_CHECK(at != std::string::npos, path);
  text.replace(at, 6, root);
  write_file_atomic(path, text).value();
  return root + "/serve";
}

/// A copy of a vectors folder without the answers, JSON edits applied.
void copy_folder(const std::string& from, const std::string& to, const nlohmann::json& edits) {
  for (const auto& entry : fs::directory_iterator(from)) {
    if (entry.path().filename() == "expected.safetensors") continue;
    fs::copy(entry.path(), fs::path(to) / entry.path().filename(), fs::copy_options::recursive);
  }
  for (const auto& edit : edits) {
    const std::string path = to + "/" + edit.at(0).get<std::string>();
    Json file = read_json_file(path).value();
    file[Json::json_pointer(edit.at(1).get<std::string>())] = edit.at(2);
    write_file_atomic(path, json_dump(file)).value();
  }
}

/// The role a projection's name plays, as the expected names spell it.
std::string role_of(const std::string& projection) {
  if (projection == "gate_proj" || projection == "w1") return "gate";
  if (projection == "up_proj" || projection == "w3") return "up";
  if (projection == "down_proj" || projection == "w2") return "down";
  return {};
}

/// "L0.E1.gate" for an expert's projection, else the module's name.
std::string expected_name(const std::string& module) {
  const ModuleNumbers numbers = module_numbers(module);
  const std::string role = role_of(module.substr(module.rfind('.') + 1));
  if (numbers.expert < 0 || role.empty()) return module;
  return cat("L", numbers.layer, ".E", numbers.expert, ".", role);
}

using Decoded = std::map<std::string, std::vector<uint16_t>>;

std::vector<uint16_t> as_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  out.reserve(values.size());
  for (const float value : values) out.push_back(formats::encode_bf16(value));
  return out;
}

/// gpt-oss: stacked, gate and up in alternate rows, biases beside them.
Result<void> decode_gpt_oss(const CheckpointIndex& index, const Quantization& quant,
                            int64_t experts, Decoded& out) {
  const std::string base = "model.layers.0.mlp.experts.";
  for (int64_t e = 0; e < experts; ++e) {
    for (const char* name : {"gate_up_proj", "down_proj"}) {
      const std::string module = base + name;
      NIBBLE_TRY(Resolution found, resolve(index, quant, {module, e, experts}, 0, 0));
      NIBBLE_TRY(const Weight weight, weight_of(std::move(found), module));
      const auto values = as_bf16(nibble::testing::decode_weight(index, weight));
      const checkpoint::TensorInfo* bias = index.find(module + "_bias");
      if (bias == nullptr) return Error(Code::kCorruptInput, module + "_bias");
      std::vector<uint16_t> row_bias(static_cast<size_t>(weight.meta.rows));
      NIBBLE_TRY(
          index.read(*bias, e * weight.meta.rows * 2, std::as_writable_bytes(std::span(row_bias))));
      const bool down = module.ends_with("down_proj");
      for (int64_t r = 0; r < weight.meta.rows; ++r) {
        const std::string key = cat("L0.E", e, ".", down ? "down" : r % 2 == 0 ? "gate" : "up");
        auto& rows = out[key];
        const auto begin = values.begin() + r * weight.meta.cols;
        rows.insert(rows.end(), begin, begin + weight.meta.cols);
        out[key + "_bias"].push_back(row_bias[static_cast<size_t>(r)]);
      }
    }
  }
  return {};
}

struct Meaning {
  Decoded weights;
  std::map<std::string, std::vector<uint8_t>> scales;  // of compressed scales
};

/// Opens, parses and decodes everything a folder stores.
Result<Meaning> decode_folder(const std::string& folder) {
  NIBBLE_TRY(const Container container, open_container(folder));
  const CheckpointIndex& index = container.index;
  NIBBLE_TRY(const Quantization quant, container.quantization());
  Meaning meaning;
  Decoded& out = meaning.weights;
  if (quant.method() == QuantMethod::kMxfp4) {
    const auto experts = container.config.at("num_local_experts").get<int64_t>();
    NIBBLE_TRY(decode_gpt_oss(index, quant, experts, out));
    return meaning;
  }
  for (const std::string& module : weight_modules(index)) {
    NIBBLE_TRY(Resolution found, resolve(index, quant, {module, -1, 0}, 0, 0));
    NIBBLE_TRY(const Weight weight, weight_of(std::move(found), module));
    out[expected_name(module)] = as_bf16(nibble::testing::decode_weight(index, weight));
    if (!weight.stored_csf()) continue;
    NIBBLE_TRY(const std::vector<std::byte> plane, read_scale_plane(index, weight));
    auto& scale = meaning.scales[expected_name(module)];
    for (const std::byte value : plane) scale.push_back(std::to_integer<uint8_t>(value));
  }
  return meaning;
}

/// Compares with the answers; returns the number of weights and compressed scales seen.
std::pair<int, int> expect_meaning(const Meaning& got, const TensorFile& expected) {
  EXPECT_EQ(got.weights.size() + got.scales.size(), expected.header().size());
  for (const auto& [name, bits] : got.weights) {
    EXPECT_TRUE(expected.has(name + ":bf16")) << name;
    EXPECT_EQ(bits, expected.get(name + ":bf16").as<uint16_t>()) << name;
  }
  for (const auto& [name, plane] : got.scales) {
    EXPECT_TRUE(expected.has(name + ":scale")) << name;
    EXPECT_EQ(plane, expected.get(name + ":scale").as<uint8_t>()) << name;
  }
  return {static_cast<int>(got.weights.size()), static_cast<int>(got.scales.size())};
}

TEST(VectorCheckpoints, DecodeBitForBit) {
  const auto& cases = vectors().cases("checkpoint.load");
  ASSERT_FALSE(cases.empty());
  int folders = 0, weights = 0, scales = 0, manifests = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.id);
    const std::string folder = vectors().dir() + "/" + c.params.at("folder").get<std::string>();
    TempDir copy;
    copy_folder(folder, copy.path(), nlohmann::json::array());
    const TensorFile expected(folder + "/expected.safetensors");
    std::vector<std::string> doors = {copy.path()};
    if (is_manifest(folder)) doors.push_back(serving_directory(copy.path()));
    manifests += static_cast<int>(doors.size()) - 1;
    for (const std::string& door : doors) {
      const auto got = decode_folder(door);
      ASSERT_TRUE(got) << got.error().message();
      const auto [w, s] = expect_meaning(*got, expected);
      weights += w;
      scales += s;
    }
    ++folders;
  }
  std::printf(
      "checkpoint.load: %d folders, %d manifests by both doors, %d weights, %d csf scales\n",
      folders, manifests, weights, scales);
  EXPECT_EQ(folders, 12);
  EXPECT_EQ(manifests, 3);
  EXPECT_EQ(scales, 6 + 2 * 18);
}

TEST(VectorCheckpoints, RefuseByName) {
  const auto& cases = vectors().cases("checkpoint.refuse");
  ASSERT_FALSE(cases.empty());
  int run = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.id);
    const std::string folder = vectors().dir() + "/" + c.params.at("folder").get<std::string>();
    TempDir copy;
    copy_folder(folder, copy.path(), c.params.at("edits"));
    const auto got = decode_folder(copy.path());
    ASSERT_FALSE(got);
    EXPECT_THAT(got.error().message(), StartsWith(c.error + ": "));
    EXPECT_EQ(got.error().code(), Code::kCorruptInput);  // and not merely unsupported
    ++run;
  }
  std::printf("checkpoint.refuse: %d folders\n", run);
  EXPECT_EQ(run, 21);
}

}  // namespace
}  // namespace nibble::recipe
