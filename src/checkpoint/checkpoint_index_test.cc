#include "checkpoint/checkpoint_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/shard_index.h"

namespace nibble::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// A folder that is removed at the end of the test.
class TempFolder {
 public:
  TempFolder() {
    static int count = 0;
    path_ = fs::path(::testing::TempDir()) /
            ("checkpoint_index_test-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
    fs::create_directories(path_);
  }
  ~TempFolder() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

/// A file of U8 tensors of one element each; the element is the first letter of `content`.
void write_shard(const std::string& path, const std::vector<std::string>& names,
                 char content = 'x') {
  std::string header = "{";
  for (size_t i = 0; i < names.size(); ++i) {
    header += (i > 0 ? ",\"" : "\"") + names[i] +
              R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" + std::to_string(i) + "," +
              std::to_string(i + 1) + "]}";
  }
  header += "}";
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << file << header << std::string(names.size(), content);
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::vector<std::string> names_of(const CheckpointIndex& index) {
  std::vector<std::string> names;
  for (const TensorInfo& tensor : index.tensors()) names.push_back(tensor.name);
  return names;
}

TEST(CheckpointIndex, ReadsEveryShardWithoutAnIndex) {
  const TempFolder folder;
  write_shard(folder / "model-00002-of-00002.safetensors", {"c", "a"}, '2');
  write_shard(folder / "model-00001-of-00002.safetensors", {"b"}, '1');
  write_text(folder / "config.json", "{}");
  write_text(folder / "._model.safetensors", "left by another tool");
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder.path());
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_THAT(names_of(*index), ElementsAre("a", "b", "c"));
  EXPECT_FALSE(index->has_index());
  EXPECT_EQ(index->total_bytes(), 3);
  EXPECT_EQ(index->find("d"), nullptr);
  const TensorInfo* b = index->find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(index->shards()[static_cast<size_t>(b->shard)], "model-00001-of-00002.safetensors");
  std::byte byte{};
  ASSERT_TRUE(index->read(*b, 0, {&byte, 1}));
  EXPECT_EQ(byte, std::byte{'1'});
  ASSERT_TRUE(index->read(*b, 1, {}));
}

TEST(CheckpointIndex, OpensOneFile) {
  const TempFolder folder;
  write_shard(folder / "model.safetensors", {"a"});
  write_shard(folder / "reference.safetensors", {"a"});
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder / "model.safetensors");
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_EQ(index->directory(), folder.path());
  EXPECT_THAT(index->shards(), ElementsAre("model.safetensors"));
}

TEST(CheckpointIndex, NameInTwoFilesNamesBoth) {
  const TempFolder folder;
  write_shard(folder / "x.safetensors", {"a", "b"});
  write_shard(folder / "y.safetensors", {"b", "c"});
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder.path());
  ASSERT_FALSE(index);
  EXPECT_THAT(index.error().message(),
              AllOf(StartsWith("index: "), HasSubstr("'b'"), HasSubstr("x.safetensors"),
                    HasSubstr("y.safetensors")));
}

TEST(CheckpointIndex, IndexWinsAndTheRestAreOrphans) {
  const TempFolder folder;
  write_shard(folder / "1.safetensors", {"a", "b", "surplus"}, '1');
  write_shard(folder / "sub/2.safetensors", {"b", "c"}, '2');
  write_shard(folder / "unnamed.safetensors", {"a", "d"}, '3');
  write_text(folder / "broken.safetensors", "no header");
  write_text(folder / "model.safetensors.index.json",
             R"({"metadata":{"total_size":3},"weight_map":{"a":"./1.safetensors",)"
             R"("b":"sub//2.safetensors","c":"sub/2.safetensors"}})");
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder.path());
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_TRUE(index->has_index());
  EXPECT_THAT(names_of(*index), ElementsAre("a", "b", "c"));
  EXPECT_THAT(index->shards(), ElementsAre("1.safetensors", "sub/2.safetensors"));
  std::byte byte{};
  ASSERT_TRUE(index->read(*index->find("b"), 0, {&byte, 1}));
  EXPECT_EQ(byte, std::byte{'2'});
  EXPECT_THAT(index->orphans(), ElementsAre("b (1.safetensors)", "surplus (1.safetensors)",
                                            StartsWith("unreadable file (broken.safetensors): "),
                                            "a (unnamed.safetensors)", "d (unnamed.safetensors)"));
}

TEST(CheckpointIndex, AWholeModelFileNeedsNoIndex) {
  const TempFolder folder;
  write_shard(folder / "model.safetensors", {"a", "b"}, '1');
  write_shard(folder / "reference.safetensors", {"c"}, '2');
  const Result<CheckpointIndex> index = CheckpointIndex::open(folder.path());
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_THAT(names_of(*index), ElementsAre("a", "b"));
  EXPECT_THAT(index->orphans(), ElementsAre("c (reference.safetensors)"));
  EXPECT_EQ(index->total_bytes(), 2);
  write_shard(folder / "other.safetensors", {"b"}, '3');
  const Result<CheckpointIndex> twice = CheckpointIndex::open(folder.path());
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().message(), ::testing::HasSubstr("other.safetensors"));
}

TEST(CheckpointIndex, ChoosesTheIndexFile) {
  const TempFolder folder;
  const auto index_of = [](const std::string& tensor) {
    return R"({"weight_map":{")" + tensor + R"(":"s.safetensors"}})";
  };
  write_shard(folder / "s.safetensors", {"model", "kquant", "x", "y"});
  write_text(folder / "x.safetensors.index.json", index_of("x"));
  EXPECT_THAT(names_of(*CheckpointIndex::open(folder.path())), ElementsAre("x"));
  write_text(folder / "y.safetensors.index.json", index_of("y"));
  const Result<CheckpointIndex> two = CheckpointIndex::open(folder.path());
  ASSERT_FALSE(two);
  EXPECT_THAT(two.error().message(), StartsWith("index: expected one index file, found 2"));
  write_text(folder / "model-kquant.index.json", index_of("kquant"));
  EXPECT_THAT(names_of(*CheckpointIndex::open(folder.path())), ElementsAre("kquant"));
  write_text(folder / "model.safetensors.index.json", index_of("model"));
  EXPECT_THAT(names_of(*CheckpointIndex::open(folder.path())), ElementsAre("model"));
}

TEST(CheckpointIndex, RefusesBadIndexes) {
  const struct {
    const char* name;
    const char* json;
    const char* mention;
  } kCases[] = {
      {"not JSON", "{", ""},
      {"a list", "[]", "object"},
      {"no weight_map", R"({"metadata":{}})", "weight_map"},
      {"weight_map list", R"({"weight_map":[]})", "object"},
      {"two weight_maps", R"({"weight_map":{},"weight_map":{}})", "weight_map"},
      {"shard number", R"({"weight_map":{"a":1}})", "'a'"},
      {"tensor twice", R"({"weight_map":{"a":"1.safetensors","a":"1.safetensors"}})", "'a' twice"},
      {"NaN", R"({"metadata":NaN,"weight_map":{}})", ""},
      {"not UTF-8", "{\"weight_map\":{\"\xFF\":\"1.safetensors\"}}", ""},
      {"shard missing", R"({"weight_map":{"a":"1.safetensors","b":"9.safetensors"}})",
       "1 of 2 shards are missing"},
      {"tensor missing", R"({"weight_map":{"a":"1.safetensors","q":"1.safetensors"}})", "'q'"},
      {"tensor in another shard", R"({"weight_map":{"a":"2.safetensors"}})", "2.safetensors"},
      {"parent", R"({"weight_map":{"a":"../1.safetensors"}})", "'..'"},
      {"parent inside", R"({"weight_map":{"a":"sub/../1.safetensors"}})", "'..'"},
      {"absolute", R"({"weight_map":{"a":"/etc/passwd"}})", "absolute"},
      {"empty name", R"({"weight_map":{"a":""}})", "empty"},
      {"a folder", R"({"weight_map":{"a":"sub/"}})", "folder"},
      {"the folder itself", R"({"weight_map":{"a":"."}})", "folder"},
      {"NUL", R"({"weight_map":{"a":"1.safetensors\u0000.txt"}})", "NUL"},
      {"a folder with a shard's name", R"({"weight_map":{"a":"sub"}})", "not a regular file"},
      {"folder linked outside", R"({"weight_map":{"a":"out/1.safetensors"}})", "outside"},
  };
  const TempFolder outside;
  write_shard(outside / "1.safetensors", {"a"});
  const TempFolder folder;
  write_shard(folder / "1.safetensors", {"a"});
  write_shard(folder / "2.safetensors", {"b"});
  fs::create_directories(folder / "sub");
  fs::create_directory_symlink(outside.path(), folder / "out");
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    write_text(folder / "model.safetensors.index.json", c.json);
    const Result<CheckpointIndex> index = CheckpointIndex::open(folder.path());
    ASSERT_FALSE(index);
    EXPECT_THAT(index.error().message(), AllOf(StartsWith("index: "), HasSubstr(c.mention)));
  }
}

TEST(CheckpointIndex, FollowsLinkedFilesAndFoldersThatStayInside) {
  const TempFolder cache;
  write_shard(cache / "blobs/0123abc", {"a"});
  write_shard(cache / "snapshots/main/real/2.safetensors", {"b"});
  const std::string snapshot = cache / "snapshots/main";
  fs::create_symlink("../../blobs/0123abc", snapshot + "/model-1.safetensors");
  fs::create_directory_symlink("real", snapshot + "/linked");
  write_text(snapshot + "/model.safetensors.index.json",
             R"({"weight_map":{"a":"model-1.safetensors","b":"linked/2.safetensors"}})");
  const Result<CheckpointIndex> index = CheckpointIndex::open(snapshot);
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_THAT(names_of(*index), ElementsAre("a", "b"));
  // The snapshot folder itself may be reached through a link.
  fs::create_directory_symlink("snapshots/main", cache / "current");
  EXPECT_TRUE(CheckpointIndex::open(cache / "current"));
}

TEST(CheckpointIndex, OpenShardsTakesExactlyTheseFiles) {
  const TempFolder folder;
  write_shard(folder / "tensors/1.safetensors", {"a"});
  write_shard(folder / "tensors/2.safetensors", {"b"});
  const auto index = CheckpointIndex::open_shards(folder.path(), {"tensors/2.safetensors"});
  ASSERT_TRUE(index) << index.error().message();
  EXPECT_THAT(names_of(*index), ElementsAre("b"));
  EXPECT_FALSE(CheckpointIndex::open_shards(folder / "tensors", {"../tensors/1.safetensors"}));
}

TEST(CheckpointIndex, MissingPathsAndHeadersNameTheFile) {
  const TempFolder folder;
  const auto empty = CheckpointIndex::open(folder.path());
  ASSERT_FALSE(empty);
  EXPECT_EQ(empty.error().code(), Code::kNotFound);
  EXPECT_THAT(empty.error().message(), HasSubstr("no *.safetensors"));
  for (const char* name : {"absent", "absent.safetensors"}) {
    const auto absent = CheckpointIndex::open(folder / name);
    ASSERT_FALSE(absent);
    EXPECT_EQ(absent.error().code(), Code::kNotFound);
    EXPECT_THAT(absent.error().message(), HasSubstr(folder / name));
  }
  write_text(folder / "bad.safetensors", "short");
  const auto bad = CheckpointIndex::open(folder.path());
  ASSERT_FALSE(bad);
  EXPECT_THAT(bad.error().message(),
              AllOf(StartsWith("file_too_short: "), HasSubstr("bad.safetensors")));
}

}  // namespace
}  // namespace nibble::checkpoint
