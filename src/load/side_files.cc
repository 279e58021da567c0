#include "load/side_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "base/file.h"

namespace nibble::load {
namespace {

constexpr std::array<std::string_view, 4> kSuffixes = {".json", ".jinja", ".txt", ".model"};
constexpr std::array<std::string_view, 5> kRewritten = {"config.json", "hf_quant_config.json",
                                                        "kquant_config.json", "manifest.json",
                                                        "build-contract.json"};

bool is_side_file(const std::string& name) {
  if (name.starts_with('.') || name.ends_with(".index.json")) return false;
  if (std::find(kRewritten.begin(), kRewritten.end(), name) != kRewritten.end()) return false;
  return std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&name](std::string_view suffix) { return name.ends_with(suffix); });
}

}  // namespace

Result<void> copy_small_file(const std::string& from, const std::string& to) {
  if (!file_exists(from)) return {};
  NIBBLE_TRY(const std::string text, read_text_file(from, kSideFileBytesLimit));
  return write_file_atomic(to, text);
}

Result<void> copy_side_files(const std::string& from, const std::string& to) {
  namespace fs = std::filesystem;
  std::vector<std::string> names;
  std::error_code code;
  for (fs::directory_iterator it(from, code); !code && it != fs::directory_iterator();
       it.increment(code)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    if (is_side_file(name) && it->is_regular_file(ignored)) names.push_back(name);
  }
  if (code) return Error(Code::kIo, cat("cannot read the source folder: ", code.message()));
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    NIBBLE_TRY(copy_small_file(cat(from, "/", name), cat(to, "/", name)));
  }
  return {};
}

}  // namespace nibble::load
