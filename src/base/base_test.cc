#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <numeric>

#include "base/file.h"
#include "base/json.h"
#include "base/result.h"
#include "base/thread_pool.h"

namespace nibble {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) return Error(Code::kInvalidArgument, cat(n, " is odd"));
  return n / 2;
}

Result<int> quarter(int n) {
  NIBBLE_TRY(const int h, half(n));
  NIBBLE_TRY(const int q, half(h), cat("half of ", n));
  return q;
}

TEST(Result, TryPassesValuesAndAddsOneContext) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(7).error().message(), "7 is odd");
  EXPECT_EQ(quarter(6).error().message(), "half of 6: 3 is odd");
  EXPECT_EQ(quarter(6).error().code(), Code::kInvalidArgument);
}

TEST(Cat, PrintsBytesAsNumbers) { EXPECT_EQ(cat(uint8_t{65}, ' ', 1.5), "65 1.5"); }

TEST(ThreadPool, RunsEveryTaskOnceOnDistinctWorkers) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (const int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(tasks));
      std::vector<std::atomic<int>> busy(static_cast<size_t>(threads));
      std::atomic<int> clashes{0};
      pool.parallel_for(tasks, [&](int64_t task, int worker) {
        if (busy[static_cast<size_t>(worker)].fetch_add(1) != 0) ++clashes;
        ++hits[static_cast<size_t>(task)];
        busy[static_cast<size_t>(worker)].fetch_sub(1);
      });
      EXPECT_EQ(clashes, 0);
      for (const auto& hit : hits) EXPECT_EQ(hit, 1);
    }
  }
}

TEST(ThreadPool, SurvivesManyShortSectionsAndSleep) {
  ThreadPool pool(2);
  int64_t total = 0;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 2000; ++i) {
      std::atomic<int64_t> sum{0};
      pool.parallel_for(3, [&](int64_t task, int) { sum += task; });
      total += sum;
    }
    ::usleep(20000);  // longer than the spin: the worker sleeps and must wake
  }
  EXPECT_EQ(total, 3 * 2000 * 3);
}

class TempDir : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = ::testing::TempDir() + cat("nibble_base_", ::getpid());
    std::filesystem::create_directories(path_);
  }
  void TearDown() override { std::filesystem::remove_all(path_); }
  std::string path_;
};

TEST_F(TempDir, FilesReadBackAndNameWhatIsMissing) {
  const std::string name = path_ + "/a.txt";
  ASSERT_TRUE(write_file_atomic(name, "hello"));
  EXPECT_EQ(*read_text_file(name), "hello");
  const Result<File> file = File::open(name);
  ASSERT_TRUE(file);
  std::byte buffer[4];
  const Result<void> past = file->read_at(3, buffer);
  ASSERT_FALSE(past);
  EXPECT_EQ(past.error().code(), Code::kCorruptInput);
  EXPECT_EQ(File::open(path_ + "/none").error().code(), Code::kNotFound);
  EXPECT_EQ(File::open(path_).error().code(), Code::kInvalidArgument);
  EXPECT_FALSE(read_text_file(name, 4));
}

TEST_F(TempDir, StagedDirectoryAppearsOnlyOnCommit) {
  const std::string target = path_ + "/out";
  {
    Result<StagedDirectory> staged = StagedDirectory::create(target);
    ASSERT_TRUE(staged);
    ASSERT_TRUE(write_file_atomic(staged->path() + "/x", "1"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(path_));
  Result<StagedDirectory> staged = StagedDirectory::create(target + "/");
  ASSERT_TRUE(staged);
  ASSERT_TRUE(write_file_atomic(staged->path() + "/x", "1"));
  ASSERT_TRUE(staged->commit());
  EXPECT_EQ(*read_text_file(target + "/x"), "1");
  EXPECT_EQ(StagedDirectory::create(target).error().code(), Code::kInvalidArgument);
}

TEST(JsonFile, NamesKeyAndTypes) {
  const Json json = *parse_json(R"({"a": 3, "b": "x", "c": null, "d": 2.0, "e": 1e30})", "t");
  EXPECT_EQ(*json_int(json, "a"), 3);
  EXPECT_EQ(*json_int(json, "d"), 2);
  EXPECT_EQ(*json_int(json, "c", 7), 7);
  EXPECT_EQ(json_int(json, "c").error().code(), Code::kNotFound);
  EXPECT_EQ(json_int(json, "b").error().message(), "key 'b': expected an integer, found \"x\"");
  EXPECT_FALSE(json_int(json, "e"));
  EXPECT_FALSE(json_bool(json, "a", true));
  EXPECT_FALSE(parse_json("{", "t"));
  EXPECT_FALSE(parse_json(std::string(100000, '['), "t"));
}

TEST(Rss, IsMeasured) {
  EXPECT_GT(current_rss_bytes(), 1 << 20);
  EXPECT_GE(peak_rss_bytes(), current_rss_bytes());
}

}  // namespace
}  // namespace nibble
