// Reads every #include of src/ against the table of levels: a folder includes only smaller numbers,
// never up, never sideways.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace {

const std::map<std::string, int> kLevels = {
    {"cli", 9},    {"server", 8},  {"runtime", 7}, {"model", 6},  {"load", 5},       {"plan", 4},
    {"recipe", 3}, {"kernels", 3}, {"comm", 3},    {"tensor", 2}, {"checkpoint", 2}, {"formats", 1},
    {"codec", 1},  {"device", 1},  {"text", 1},    {"base", 0}};

TEST(IncludeLevels, EveryIncludePointsDown) {
  const std::filesystem::path root = std::filesystem::path(NIBBLE_SOURCE_DIR) / "src";
  int includes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    const std::string ext = entry.path().extension().string();
    if (ext != ".h" && ext != ".cc" && ext != ".cu" && ext != ".cuh") continue;
    const std::string folder = entry.path().lexically_relative(root).begin()->string();
    ASSERT_TRUE(kLevels.count(folder)) << "folder without a level: " << folder;
    std::ifstream file(entry.path());
    std::string line;
    while (std::getline(file, line)) {
      if (line.rfind("#include \"", 0) != 0) continue;
      const std::string target = line.substr(10, line.find('"', 10) - 10);
      const std::string to = target.substr(0, target.find('/'));
      if (to == "support") continue;  // test data reader, tests only
      ASSERT_TRUE(kLevels.count(to)) << entry.path() << ": " << line;
      ++includes;
      EXPECT_TRUE(to == folder || kLevels.at(to) < kLevels.at(folder))
          << entry.path() << " (" << folder << ") includes " << target;
    }
  }
  EXPECT_GT(includes, 100);
}

}  // namespace
