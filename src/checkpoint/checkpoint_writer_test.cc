#include "checkpoint/checkpoint_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "base/json.h"
#include "support/vector_file.h"

namespace nibble::checkpoint {
namespace {

namespace fs = std::filesystem;
using formats::DType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CheckpointWriterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / ("writer_test-" + std::to_string(::getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string folder() const { return folder_.string(); }
  std::string text(const std::string& name) const {
    return *read_text_file((folder_ / name).string());
  }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  fs::path folder_;
};

std::vector<std::byte> filled(size_t count, int value) {
  return std::vector<std::byte>(count, static_cast<std::byte>(value));
}

TEST_F(CheckpointWriterTest, OneShardHasTheSpecsBytes) {
  CheckpointWriter writer(folder(), 1 << 20);
  ASSERT_TRUE(writer.add("b", DType::kU8, {2, 1}, filled(2, 'b')));
  ASSERT_TRUE(writer.add("a\"\n\xC3\xA9", DType::kF8E4M3, {1}, filled(1, 'a')));
  ASSERT_TRUE(writer.add("four", DType::kF4, {2}, filled(1, '4')));
  ASSERT_TRUE(writer.add("s", DType::kF32, {}, filled(4, 's')));
  ASSERT_TRUE(writer.add("e", DType::kBf16, {0, 7}, {}));
  EXPECT_EQ(writer.buffered_bytes(), 8);
  ASSERT_TRUE(writer.finish());
  EXPECT_EQ(writer.total_bytes(), 8);
  std::string header = R"({"__metadata__":{"format":"pt"},)"
                       R"("s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                       R"("e":{"dtype":"BF16","shape":[0,7],"data_offsets":[4,4]},)"
                       "\"a\\\"\\n\xC3\xA9\":"
                       R"({"dtype":"F8_E4M3","shape":[1],"data_offsets":[4,5]},)"
                       R"("b":{"dtype":"U8","shape":[2,1],"data_offsets":[5,7]},)"
                       R"("four":{"dtype":"F4","shape":[2],"data_offsets":[7,8]}})";
  while (header.size() % 8 != 0) header += ' ';
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size() & 0xFF);
  length[1] = static_cast<char>(header.size() >> 8);
  EXPECT_EQ(text("model.safetensors"), length + header + "ssssabb4");
  EXPECT_THAT(files(), ElementsAre("model.safetensors"));
}

TEST_F(CheckpointWriterTest, ShardsStayUnderTheLimitAndReadBack) {
  CheckpointWriter writer(folder(), 10);
  const std::vector<std::pair<std::string, size_t>> tensors = {
      {"t3", 4}, {"t1", 6}, {"t2", 1}, {"large", 25}, {"t0", 3}, {"empty", 0}};
  for (const auto& [name, size] : tensors) {
    ASSERT_TRUE(writer.add(name, DType::kU8, {static_cast<int64_t>(size)},
                           filled(size, static_cast<int>(size))));
    EXPECT_LE(writer.buffered_bytes(), 25);
  }
  // An unfinished folder must not read as a checkpoint.
  EXPECT_FALSE(CheckpointIndex::open(folder()));
  ASSERT_TRUE(writer.finish());
  EXPECT_THAT(files(),
              ElementsAre("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                          "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                          "model.safetensors.index.json"));
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder());
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_TRUE(index->has_index());
  EXPECT_EQ(index->tensors().size(), tensors.size());
  EXPECT_TRUE(index->orphans().empty());
  EXPECT_EQ(index->total_bytes(), 39);
  for (const auto& [name, size] : tensors) {
    SCOPED_TRACE(name);
    const TensorInfo* tensor = index->find(name);
    ASSERT_NE(tensor, nullptr);
    std::vector<std::byte> bytes(size);
    ASSERT_TRUE(index->read(*tensor, 0, bytes));
    EXPECT_EQ(bytes, filled(size, static_cast<int>(size)));
  }
  const Result<Json> json = parse_json(text("model.safetensors.index.json"), "index");
  ASSERT_TRUE(json);
  EXPECT_EQ((*json)["metadata"]["total_size"], 39);
  EXPECT_EQ((*json)["weight_map"]["large"], "model-00003-of-00004.safetensors");
}

TEST_F(CheckpointWriterTest, FlushEndsAShard) {
  CheckpointWriter writer(folder(), 1000);
  ASSERT_TRUE(writer.flush_shard());  // nothing to write
  ASSERT_TRUE(writer.add("a", DType::kU8, {1}, filled(1, 1)));
  ASSERT_TRUE(writer.flush_shard());
  EXPECT_EQ(writer.buffered_bytes(), 0);
  ASSERT_TRUE(writer.add("b", DType::kU8, {1}, filled(1, 1)));
  ASSERT_TRUE(writer.finish());
  EXPECT_EQ(CheckpointIndex::open(folder())->shards().size(), 2u);
}

TEST_F(CheckpointWriterTest, NothingAddedIsAnEmptyCheckpoint) {
  CheckpointWriter writer(folder(), 1000);
  ASSERT_TRUE(writer.finish());
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder());
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_TRUE(index->tensors().empty());
}

TEST_F(CheckpointWriterTest, RefusesWhatAReaderWouldRefuse) {
  const struct {
    const char* name;
    std::string tensor;
    DType dtype;
    std::vector<int64_t> shape;
    size_t bytes;
    const char* mention;
  } kCases[] = {
      {"twice", "a", DType::kU8, {1}, 1, "twice"},
      {"twice, in a written shard", "flushed", DType::kU8, {1}, 1, "twice"},
      {"too few bytes", "b", DType::kF32, {2}, 7, "takes 8 bytes, got 7"},
      {"negative extent", "b", DType::kU8, {-1, -1}, 1, "[-1, -1]"},
      {"half a byte", "b", DType::kF4, {1}, 1, "whole bytes"},
      {"overflow", "b", DType::kU8, {1LL << 40, 1LL << 40}, 0, "64 bits"},
      {"not UTF-8", "\xFF", DType::kU8, {1}, 1, "UTF-8"},
      {"reserved", "__metadata__", DType::kU8, {1}, 1, "reserved"},
  };
  CheckpointWriter writer(folder(), 1000);
  ASSERT_TRUE(writer.add("flushed", DType::kU8, {1}, filled(1, 1)));
  ASSERT_TRUE(writer.flush_shard());
  ASSERT_TRUE(writer.add("a", DType::kU8, {1}, filled(1, 1)));
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const Result<void> added = writer.add(c.tensor, c.dtype, c.shape, filled(c.bytes, 0));
    ASSERT_FALSE(added);
    EXPECT_EQ(added.error().code(), Code::kInvalidArgument);
    EXPECT_THAT(added.error().message(), HasSubstr(c.mention));
  }
  EXPECT_EQ(writer.total_bytes(), 2);
}

TEST_F(CheckpointWriterTest, FolderThatIsGoneIsAnError) {
  CheckpointWriter writer(folder() + "/absent", 1000);
  ASSERT_TRUE(writer.add("a", DType::kU8, {1}, filled(1, 1)));
  EXPECT_FALSE(writer.finish());
}

TEST_F(CheckpointWriterTest, RewritesAFixtureTensorForTensor) {
  const Result<CheckpointIndex> source =
      CheckpointIndex::open(nibble::testing::fixtures_dir() + "/glm4_moe/model.safetensors");
  ASSERT_TRUE(source) << source.error().message();
  CheckpointWriter writer(folder(), 100'000);
  for (const TensorInfo& tensor : source->tensors()) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
    ASSERT_TRUE(source->read(tensor, 0, bytes));
    ASSERT_TRUE(writer.add(tensor.name, tensor.dtype, tensor.shape, std::move(bytes)));
  }
  ASSERT_TRUE(writer.finish());
  const Result<CheckpointIndex> copy = CheckpointIndex::open(folder());
  ASSERT_TRUE(copy) << copy.error().message();
  ASSERT_EQ(copy->tensors().size(), source->tensors().size());
  EXPECT_GT(copy->shards().size(), 1u);
  for (size_t i = 0; i < copy->tensors().size(); ++i) {
    const TensorInfo& from = source->tensors()[i];
    const TensorInfo& to = copy->tensors()[i];
    SCOPED_TRACE(from.name);
    EXPECT_EQ(to.name, from.name);
    EXPECT_EQ(to.dtype, from.dtype);
    EXPECT_EQ(to.shape, from.shape);
    std::vector<std::byte> a(static_cast<size_t>(from.bytes)), b(a.size());
    ASSERT_TRUE(source->read(from, 0, a));
    ASSERT_TRUE(copy->read(to, 0, b));
    EXPECT_EQ(a, b);
  }
}

}  // namespace
}  // namespace nibble::checkpoint
