#include "load/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/json.h"
#include "checkpoint/checkpoint_writer.h"
#include "formats/element.h"
#include "formats/quantize.h"
#include "load/convert_spell.h"
#include "support/vector_file.h"

namespace nibble::load {
namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using formats::FormatId;
using formats::QuantizedMatrix;
using recipe::Recipe;
using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const CheckpointIndex& index, const TensorInfo& tensor) {
  Bytes bytes(static_cast<size_t>(tensor.bytes));
  EXPECT_TRUE(index.read(tensor, 0, bytes));
  return bytes;
}

QuantizedMatrix planes_of(const Recipe& recipe, const Weight& weight) {
  QuantizedMatrix out;
  out.meta = weight.meta;
  out.codes = bytes_of(recipe.index(), *weight.codes.tensor);
  if (weight.scales.tensor != nullptr) out.scales = bytes_of(recipe.index(), *weight.scales.tensor);
  return out;
}

std::vector<float> values_of(const Recipe& recipe, const Weight& weight) {
  const QuantizedMatrix planes = planes_of(recipe, weight);
  std::vector<float> values(static_cast<size_t>(weight.meta.rows * weight.meta.cols));
  formats::decode_rows(planes.view(), 0, weight.meta.rows, values.data());
  return values;
}

class ConvertTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("convert_test-" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  static Recipe fixture(const std::string& name) {
    const std::string folder = nibble::testing::fixtures_dir() + "/" + name;
    auto index = CheckpointIndex::open(folder + "/model.safetensors");  // beside a reference file
    EXPECT_TRUE(index) << index.error().message();
    auto recipe = recipe::read_recipe(std::move(*index), folder);
    EXPECT_TRUE(recipe) << recipe.error().message();
    return std::move(*recipe);
  }
  /// A copy of a fixture that `edit` may change: tensors by name, and files of its folder.
  using Tensors = std::map<std::string, SpelledTensor>;
  Recipe edited(const std::string& name, const std::string& to,
                const std::function<void(Tensors&)>& edit) const {
    const Recipe source = fixture(name);
    Tensors tensors;
    for (const TensorInfo& t : source.index().tensors()) {
      tensors[t.name] = {t.name, t.dtype, t.shape, bytes_of(source.index(), t)};
    }
    edit(tensors);
    fs::create_directories(path(to));
    fs::copy_file(source.index().directory() + "/config.json", path(to) + "/config.json");
    checkpoint::CheckpointWriter writer(path(to), 1 << 30);
    for (auto& [key, t] : tensors) EXPECT_TRUE(writer.add(key, t.dtype, t.shape, t.bytes));
    EXPECT_TRUE(writer.finish());
    return open(to);
  }
  Recipe open(const std::string& name) const {
    auto recipe = recipe::read_recipe(path(name));
    EXPECT_TRUE(recipe) << recipe.error().message();
    return std::move(*recipe);
  }
  ConvertReport convert(const Recipe& source, const std::string& to, const ConvertOptions& options,
                        int threads = 2) const {
    ThreadPool pool(threads);
    auto report = convert_checkpoint(source, path(to), options, pool, {});
    EXPECT_TRUE(report) << report.error().message();
    return report ? std::move(*report) : ConvertReport{};
  }
  Error refused(const Recipe& source, const ConvertOptions& options) const {
    ThreadPool pool(1);
    const auto report = convert_checkpoint(source, path("refused"), options, pool, {});
    EXPECT_FALSE(report);
    EXPECT_FALSE(fs::exists(path("refused")));
    return report ? Error(Code::kInternal, "") : report.error();
  }
  Json config(const std::string& name) const {
    return *read_json_file(path(name) + "/config.json");
  }
  std::map<std::string, std::string> files(const std::string& name) const {
    std::map<std::string, std::string> out;
    for (const auto& entry : fs::directory_iterator(path(name))) {
      out[entry.path().filename().string()] = *read_text_file(entry.path().string());
    }
    return out;
  }

 private:
  fs::path folder_;
};

bool is_expert(Role r) {
  return r == Role::kExpertGate || r == Role::kExpertUp || r == Role::kExpertDown;
}
bool is_other(Role r) {
  return r == Role::kQ || r == Role::kK || r == Role::kV || r == Role::kO ||
         r == Role::kDenseGate || r == Role::kDenseUp || r == Role::kDenseDown ||
         r == Role::kSharedGate || r == Role::kSharedUp || r == Role::kSharedDown ||
         r == Role::kMtpProjection;
}

/// What the quantizers make of a weight, called here directly. `partner`: gate for up, up for gate.
QuantizedMatrix expected(const Recipe& source, const WeightKey& key, ConvertTarget target,
                         bool divisor) {
  const Weight& weight = *source.find(key);
  const std::vector<float> values = values_of(source, weight);
  const int64_t rows = weight.meta.rows, cols = weight.meta.cols;
  switch (target) {
    case ConvertTarget::kNvfp4: {
      float amax = *formats::finite_amax(values, "w");
      if (key.role != Role::kExpertDown) {
        WeightKey other = key;
        other.role = key.role == Role::kExpertGate ? Role::kExpertUp : Role::kExpertGate;
        amax = std::max(amax, *formats::finite_amax(values_of(source, *source.find(other)), "w"));
      }
      if (divisor) amax = amax_with_divisor(amax);
      return *formats::quantize_nvfp4(values, rows, cols, "w", amax);
    }
    case ConvertTarget::kMxfp4: return *formats::quantize_mxfp4(values, rows, cols, "w");
    case ConvertTarget::kMxfp8: return *formats::quantize_mxfp8(values, rows, cols, "w");
    case ConvertTarget::kNf3: return *formats::quantize_nf3(values, rows, cols, "w");
    default: break;
  }
  if (target == ConvertTarget::kKeep) return planes_of(source, weight);
  QuantizedMatrix out;
  out.meta.format = FormatId::kBf16;
  for (const float value : values) {
    const auto two = std::bit_cast<std::array<std::byte, 2>>(formats::encode_bf16(value));
    out.codes.insert(out.codes.end(), two.begin(), two.end());
  }
  return out;
}

void expect_converted(const Recipe& source, const Recipe& result, const ConvertOptions& options,
                      bool divisor) {
  ASSERT_EQ(result.weights().size(), source.weights().size());
  for (const auto& [key, weight] : source.weights()) {
    SCOPED_TRACE(recipe::key_text(key));
    ConvertTarget target = ConvertTarget::kKeep;
    if (is_expert(key.role)) target = options.experts;
    if (is_other(key.role)) target = options.others;
    if (key.role == Role::kHead) target = options.head;
    const Weight* got = result.find(key);
    ASSERT_NE(got, nullptr);
    const QuantizedMatrix want = expected(source, key, target, divisor);
    const QuantizedMatrix have = planes_of(result, *got);
    ASSERT_EQ(have.meta.format, want.meta.format);
    ASSERT_EQ(have.codes, want.codes);
    ASSERT_EQ(have.scales, want.scales);
    ASSERT_EQ(std::bit_cast<uint32_t>(have.meta.global), std::bit_cast<uint32_t>(want.meta.global));
    ASSERT_EQ(have.meta.nf3_levels, want.meta.nf3_levels);
    ASSERT_EQ(have.meta.nf3_bias_log2, want.meta.nf3_bias_log2);
    ASSERT_EQ(got->name, weight.name);
  }
}

TEST_F(ConvertTest, EveryTargetHoldsWhatTheQuantizersMake) {
  using T = ConvertTarget;
  const struct {
    const char* name;
    const char* fixture;
    ConvertOptions options;
    const char* dialect;  // of the report
    const char* algo;     // what the config says
  } kCases[] = {
      {"nvfp4", "glm4_moe", {T::kNvfp4}, "modelopt", "W4A16_NVFP4"},
      {"nvfp4_mxfp8", "glm4_moe", {T::kNvfp4, T::kMxfp8}, "modelopt", "MIXED_PRECISION"},
      {"nvfp4_mxfp8_head",
       "glm4_moe_mtp",
       {T::kNvfp4, T::kMxfp8, T::kMxfp8},
       "modelopt",
       "MIXED_PRECISION"},
      {"mxfp8_all", "glm4_moe_mtp", {T::kMxfp8, T::kMxfp8, T::kMxfp8}, "modelopt", "MXFP8"},
      {"mxfp8_dense_only", "glm4_moe", {T::kKeep, T::kMxfp8}, "modelopt", "MXFP8"},
      {"nvfp4_ct",
       "glm4_moe",
       {T::kNvfp4, T::kKeep, T::kKeep, ConvertDialect::kCompressedTensors},
       "compressed-tensors",
       "nvfp4-pack-quantized"},
      {"nvfp4_mxfp8_ct",
       "glm4_moe_mtp",
       {T::kNvfp4, T::kMxfp8, T::kKeep, ConvertDialect::kCompressedTensors},
       "compressed-tensors",
       "mixed-precision"},
      {"mxfp4", "glm4_moe", {T::kMxfp4}, "compressed-tensors", "mxfp4-pack-quantized"},
      {"mxfp4_mxfp8", "glm4_moe", {T::kMxfp4, T::kMxfp8}, "compressed-tensors", "mixed-precision"},
      {"nf3", "glm4_moe", {T::kNf3}, "hybrid", "nvfp4_nf3_hybrid"},
      {"nf3_mxfp8", "glm4_moe_mtp", {T::kNf3, T::kMxfp8}, "hybrid", "nvfp4_nf3_hybrid"},
      {"nf3_mxfp8_head", "glm4_moe", {T::kNf3, T::kMxfp8, T::kMxfp8}, "hybrid", "nvfp4_nf3_hybrid"},
      {"bf16_of_mxfp4",
       "glm4_moe-mxfp4-ct",
       {T::kBf16},
       "compressed-tensors",
       "mxfp4-pack-quantized"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const Recipe source = fixture(c.fixture);
    const ConvertReport report = convert(source, c.name, c.options);
    EXPECT_EQ(report.dialect, c.dialect);
    const Recipe result = open(c.name);
    EXPECT_THAT(result.notices(), IsEmpty()) << result.notices()[0];
    expect_converted(source, result, c.options,
                     std::string_view(c.dialect) == "compressed-tensors");
    const Json quant = config(c.name)["quantization_config"];
    const char* key = quant.contains("quant_algo") ? "quant_algo" : "format";
    EXPECT_EQ(quant.value(key, quant["quant_method"]), c.algo);
    EXPECT_EQ(fs::exists(path(c.name) + "/hf_quant_config.json"), quant.contains("quant_algo"));
    EXPECT_EQ(report.written_bytes, result.index().total_bytes());
  }
}

TEST_F(ConvertTest, WritesTheTensorsOfEachDialect) {
  const Recipe source = fixture("glm4_moe");
  ConvertOptions options;
  options.experts = ConvertTarget::kNvfp4;
  options.others = ConvertTarget::kMxfp8;
  convert(source, "modelopt", options);
  options.dialect = ConvertDialect::kCompressedTensors;
  convert(source, "ct", options);
  convert(source, "nf3", {ConvertTarget::kNf3});
  const std::string expert = "model.layers.1.mlp.experts.0.up_proj.";
  const std::string dense = "model.layers.0.self_attn.q_proj.";
  const struct {
    const char* folder;
    std::string tensor;
    const char* form;
  } kTensors[] = {
      {"modelopt", expert + "weight", "U8 [128, 64]"},
      {"modelopt", expert + "weight_scale", "F8_E4M3 [128, 8]"},
      {"modelopt", expert + "weight_scale_2", "F32 []"},
      {"modelopt", dense + "weight", "F8_E4M3 [128, 128]"},
      {"modelopt", dense + "weight_scale", "U8 [128, 4]"},
      {"modelopt", dense + "bias", "BF16 [128]"},
      {"ct", expert + "weight_packed", "U8 [128, 64]"},
      {"ct", expert + "weight_scale", "F8_E4M3 [128, 8]"},
      {"ct", expert + "weight_global_scale", "F32 [1]"},
      {"ct", dense + "weight", "F8_E4M3 [128, 128]"},
      {"nf3", expert + "nf3_packed", "U8 [128, 48]"},
      {"nf3", expert + "nf3_scale", "U8 [128, 4]"},
      {"nf3", dense + "weight", "BF16 [128, 128]"},
  };
  for (const auto& c : kTensors) {
    SCOPED_TRACE(c.folder + (" " + c.tensor));
    const auto index = CheckpointIndex::open(path(c.folder));
    const TensorInfo* tensor = index->find(c.tensor);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(cat(formats::dtype_name(tensor->dtype), " ", checkpoint::shape_text(tensor->shape)),
              c.form);
  }
  const Json layers = config("modelopt")["quantization_config"]["quantized_layers"];
  EXPECT_EQ(layers["model.layers.1.mlp.experts"]["group_size"], 16);
  EXPECT_EQ(layers["model.layers.0.self_attn.q_proj"]["quant_algo"], "MXFP8");
  const Json hf = *read_json_file(path("modelopt") + "/hf_quant_config.json");
  EXPECT_EQ(hf["quantization"]["quantized_layers"], layers);
  const Json hybrid = config("nf3")["quantization_config"];
  EXPECT_EQ(hybrid["hybrid_bit_map"], (Json{{"1", Json(8, 3)}, {"2", Json(8, 3)}}));
  EXPECT_EQ(hybrid["nf3_levels"][1], -0.60546875);
}

TEST_F(ConvertTest, BytesDependOnSourceAndOptionsAlone) {
  const Recipe source = fixture("glm4_moe");
  ConvertOptions options;
  options.experts = ConvertTarget::kNvfp4;
  options.others = ConvertTarget::kMxfp8;
  options.max_shard_bytes = 100'000;
  convert(source, "a", options, 1);
  convert(source, "b", options, 4);
  EXPECT_EQ(files("a"), files("b"));
  EXPECT_GT(CheckpointIndex::open(path("a"))->shards().size(), 3u);
}

TEST_F(ConvertTest, KeepIsByteEqual) {
  for (const char* name : {"glm4_moe", "glm4_moe-nvfp4-modelopt", "glm4_moe-nvfp4-ct"}) {
    SCOPED_TRACE(name);
    const Recipe source = fixture(name);
    const ConvertReport report = convert(source, name, {});
    EXPECT_EQ(report.dialect, "");
    const auto result = CheckpointIndex::open(path(name));
    ASSERT_EQ(result->tensors().size(), source.index().tensors().size());
    for (const TensorInfo& tensor : source.index().tensors()) {
      SCOPED_TRACE(tensor.name);
      const TensorInfo* copy = result->find(tensor.name);
      ASSERT_NE(copy, nullptr);
      EXPECT_EQ(copy->dtype, tensor.dtype);
      EXPECT_EQ(copy->shape, tensor.shape);
      EXPECT_EQ(bytes_of(*result, *copy), bytes_of(source.index(), tensor));
    }
    EXPECT_EQ(files(name)["config.json"],
              *read_text_file(source.index().directory() + "/config.json"));
    EXPECT_EQ(files(name).contains("hf_quant_config.json"),
              std::string_view(name) == "glm4_moe-nvfp4-modelopt");
  }
}

TEST_F(ConvertTest, QuantizedSourcesKeepTheirPlanesUnderEitherDialect) {
  const struct {
    const char* fixture;
    ConvertOptions options;
    const char* dialect;
    bool input_scales;
  } kCases[] = {
      {"glm4_moe-nvfp4-modelopt",
       {ConvertTarget::kNvfp4, {}, ConvertTarget::kMxfp8},
       "modelopt",
       true},
      {"glm4_moe-nvfp4-ct",
       {ConvertTarget::kKeep, {}, ConvertTarget::kMxfp8},
       "compressed-tensors",
       true},
      {"glm4_moe-nvfp4-ct", {{}, {}, {}, ConvertDialect::kModelOpt}, "modelopt", false},
      {"glm4_moe-mxfp4-ct",
       {ConvertTarget::kMxfp4, {}, ConvertTarget::kMxfp8},
       "compressed-tensors",
       false},
  };
  int number = 0;
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.fixture);
    const std::string to = cat("kept", number++);
    const Recipe source = fixture(c.fixture);
    const ConvertReport report = convert(source, to, c.options);
    EXPECT_EQ(report.dialect, c.dialect);
    const Recipe result = open(to);
    for (const std::string& notice : result.notices()) EXPECT_THAT(notice, HasSubstr("input_"));
    for (const auto& [key, weight] : source.weights()) {
      SCOPED_TRACE(recipe::key_text(key));
      if (key.role == Role::kHead && c.options.head == ConvertTarget::kMxfp8) continue;
      const Weight& got = *result.find(key);
      const QuantizedMatrix want = planes_of(source, weight), have = planes_of(result, got);
      EXPECT_EQ(have.codes, want.codes);
      EXPECT_EQ(have.scales, want.scales);
      EXPECT_EQ(have.meta.global, want.meta.global);
      EXPECT_EQ(got.has_input_scale, c.input_scales && weight.has_input_scale);
    }
  }
}

TEST_F(ConvertTest, SecondRoundingHasToBeAskedFor) {
  const Recipe source = fixture("glm4_moe-mxfp4-ct");
  ConvertOptions options;
  options.experts = ConvertTarget::kNvfp4;
  const Error error = refused(source, options);
  EXPECT_EQ(error.code(), Code::kUnsupported);
  EXPECT_THAT(error.message(), AllOf(HasSubstr("mxfp4 to nvfp4"), HasSubstr("requantize")));
  options.requantize = true;
  // The dense layers keep MXFP4, which only compressed-tensors can hold.
  const ConvertReport report = convert(source, "twice", options);
  EXPECT_EQ(report.dialect, "compressed-tensors");
  EXPECT_THAT(report.notices, Contains(HasSubstr("rounded a second time")));
  expect_converted(source, open("twice"), options, true);
}

TEST_F(ConvertTest, KeptGlobalThatNoDivisorExpressesIsRefused) {
  const Recipe source = fixture("glm4_moe-nvfp4-modelopt");
  const auto cannot = [](const auto& entry) {
    return entry.second.meta.format == FormatId::kNvfp4 && !divisor_of(entry.second.meta.global);
  };
  ASSERT_TRUE(std::any_of(source.weights().begin(), source.weights().end(), cannot));
  const Error error = refused(source, {{}, {}, {}, ConvertDialect::kCompressedTensors});
  EXPECT_EQ(error.code(), Code::kUnsupported);
  EXPECT_THAT(error.message(), HasSubstr("reciprocal of no FP32 number"));
}

TEST_F(ConvertTest, RefusesBeforeWriting) {
  using T = ConvertTarget;
  const Recipe source = fixture("glm4_moe");
  const struct {
    ConvertOptions options;
    Code code;
    const char* mention;
  } kCases[] = {
      {{T::kMxfp4, {}, {}, ConvertDialect::kModelOpt},
       Code::kUnsupported,
       "modelopt has no form for mxfp4"},
      {{T::kNf3, {}, {}, ConvertDialect::kCompressedTensors}, Code::kUnsupported, "hybrid holds"},
      {{T::kMxfp8, {}, {}, ConvertDialect::kHybrid}, Code::kUnsupported, "modelopt or compressed"},
      {{{}, T::kNvfp4}, Code::kInvalidArgument, "others"},
      {{{}, {}, T::kBf16}, Code::kInvalidArgument, "head"},
      {{T::kNvfp4, {}, {}, {}, true, false, 0}, Code::kInvalidArgument, "shard size"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.mention);
    const Error error = refused(source, c.options);
    EXPECT_EQ(error.code(), c.code);
    EXPECT_THAT(error.message(), HasSubstr(c.mention));
  }
  fs::create_directories(path("there"));
  ThreadPool pool(1);
  const auto there = convert_checkpoint(source, path("there"), {}, pool, {});
  ASSERT_FALSE(there);
  EXPECT_EQ(there.error().code(), Code::kInvalidArgument);
}

TEST_F(ConvertTest, MtpCopiesAreDroppedOnlyIfEqual) {
  const Recipe source = edited("glm4_moe_mtp", "source", [](Tensors& tensors) {
    SpelledTensor& embed = tensors["model.layers.2.embed_tokens.weight"];
    embed = tensors["model.embed_tokens.weight"];
    SpelledTensor& head = tensors["model.layers.2.shared_head.head.weight"];
    head = tensors["lm_head.weight"];
    head.bytes.back() ^= std::byte{1};
  });
  ASSERT_NE(source.find({2, Role::kMtpEmbedding}), nullptr);
  for (const bool drop : {true, false}) {
    SCOPED_TRACE(drop);
    const std::string to = drop ? "drop" : "keep";
    ConvertOptions options;
    options.experts = ConvertTarget::kNvfp4;
    options.drop_mtp_copies = drop;
    const ConvertReport report = convert(source, to, options);
    const Recipe result = open(to);
    EXPECT_EQ(result.find({2, Role::kMtpEmbedding}) == nullptr, drop);
    EXPECT_NE(result.find({2, Role::kMtpHead}), nullptr);
    EXPECT_EQ(result.find({2, Role::kExpertDown, 0})->meta.format, FormatId::kNvfp4);
    EXPECT_THAT(report.notices, SizeIs(drop ? 2 : 0));
    if (!drop) continue;
    EXPECT_THAT(report.notices,
                Contains(HasSubstr("dropped 'model.layers.2.embed_tokens.weight'")));
    EXPECT_THAT(report.notices,
                Contains(HasSubstr("kept 'model.layers.2.shared_head.head.weight'")));
  }
}

TEST_F(ConvertTest, SmallFilesComeAlong) {
  const Recipe source = edited("glm4_moe", "source", [](Tensors&) {});
  const char* kCopied[] = {
      "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
      "merges.txt",     "tokenizer.model"};
  const char* kLeft[] = {"README.md", "consolidated.safetensors.index.json.bak", ".hidden.json"};
  for (const char* name : kCopied) std::ofstream(path("source") + "/" + name) << "{}";
  for (const char* name : kLeft) std::ofstream(path("source") + "/" + name) << "{}";
  convert(source, "result", {ConvertTarget::kNvfp4});
  const auto result = files("result");
  for (const char* name : kCopied) EXPECT_TRUE(result.contains(name)) << name;
  EXPECT_THAT(result, SizeIs(std::size(kCopied) + 3));  // config, hf_quant_config, model
}

TEST_F(ConvertTest, NonFiniteSourceLeavesNothingBehind) {
  const Recipe source = edited("glm4_moe", "source", [](Tensors& tensors) {
    Bytes& bytes = tensors["model.layers.2.mlp.experts.3.up_proj.weight"].bytes;
    bytes[20] = std::byte{0xC0};
    bytes[21] = std::byte{0x7F};
  });
  for (const ConvertTarget target : {ConvertTarget::kNvfp4, ConvertTarget::kMxfp8}) {
    const Error error = refused(source, {target});
    EXPECT_EQ(error.code(), Code::kCorruptInput);
    EXPECT_THAT(error.message(),
                AllOf(HasSubstr("model.layers.2.mlp.experts.3.up_proj"), HasSubstr("10")));
  }
  for (const auto& entry : fs::directory_iterator(path(""))) {
    EXPECT_EQ(entry.path().filename(), "source");
  }
}

TEST_F(ConvertTest, KilledRunLeavesNothingThatLoads) {
  const Recipe source = fixture("glm4_moe");
  ConvertOptions options;
  options.experts = ConvertTarget::kNvfp4;
  options.max_shard_bytes = 100'000;
  for (const double part : {0.0, 0.5, 1.0}) {
    SCOPED_TRACE(part);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ThreadPool pool(1);
      const auto report =
          convert_checkpoint(source, path("killed"), options, pool, [part](const auto& p) {
            if (static_cast<double>(p.source_bytes_done) >=
                part * static_cast<double>(p.source_bytes_total)) {
              ::raise(SIGKILL);
            }
          });
      ::_exit(report ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    EXPECT_FALSE(fs::exists(path("killed")));
    int leftovers = 0;
    for (const auto& entry : fs::directory_iterator(path(""))) {
      ++leftovers;
      EXPECT_THAT(entry.path().filename().string(), HasSubstr("killed.partial-"));
      EXPECT_FALSE(CheckpointIndex::open(entry.path().string()));
      fs::remove_all(entry.path());
    }
    EXPECT_EQ(leftovers, 1);
  }
  convert(source, "killed", options);  // and the name is free for the next run
  EXPECT_EQ(open("killed").weights().size(), source.weights().size());
}

TEST(ConvertDivisor, RaisedAmaxHasOneAndStaysClose) {
  EXPECT_EQ(divisor_of(0.25f), 4.0f);
  int moved = 0;
  for (uint32_t i = 0; i < 20000; ++i) {
    const float amax = std::bit_cast<float>((i * 2654435761u) % 0x7F000000u & 0xFFFF0000u);
    const float raised = amax_with_divisor(amax);
    const float floor = std::max(amax, 1e-8f);
    const auto divisor = divisor_of(raised / 2688.0f);
    ASSERT_TRUE(divisor) << amax;
    ASSERT_EQ(std::bit_cast<uint32_t>(1.0f / *divisor), std::bit_cast<uint32_t>(raised / 2688.0f));
    ASSERT_GE(raised, floor);
    ASSERT_LE(std::bit_cast<uint32_t>(raised) - std::bit_cast<uint32_t>(floor), 16u) << amax;
    moved += raised != floor;
  }
  EXPECT_GT(moved, 0);
}

TEST(ConvertNames, AreThoseOfTheCommand) {
  EXPECT_EQ(convert_target_from_name("nf3"), ConvertTarget::kNf3);
  EXPECT_EQ(convert_target_from_name("NF3"), std::nullopt);
  EXPECT_EQ(convert_dialect_from_name("compressed-tensors"), ConvertDialect::kCompressedTensors);
  EXPECT_EQ(convert_dialect_from_name(""), std::nullopt);
}

}  // namespace
}  // namespace nibble::load
