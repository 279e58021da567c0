#include "checkpoint/shard_index.h"

#include <simdjson.h>

#include <algorithm>
#include <filesystem>

#include "base/json.h"
#include "checkpoint/json_text.h"

namespace nibble::checkpoint {
namespace {

namespace dom = simdjson::dom;

template <typename... Parts>
Error fault(const Parts&... parts) {
  return Error(Code::kCorruptInput, cat("index: ", parts...));
}

/// Entries as views into the parser's text, in file order.
struct RawEntry {
  std::string_view tensor, shard;
};

Result<std::vector<RawEntry>> raw_entries(dom::element weight_map) {
  dom::object object;
  if (weight_map.get(object) != simdjson::SUCCESS) {
    return fault("weight_map: expected an object, found ", shown(simdjson::minify(weight_map)));
  }
  std::vector<RawEntry> raw;
  for (const dom::key_value_pair field : object) {
    std::string_view shard;
    if (field.value.get(shard) != simdjson::SUCCESS) {
      return fault("weight_map of tensor ", shown(field.key), ": expected a file name, found ",
                   shown(simdjson::minify(field.value)));
    }
    raw.push_back({field.key, shard});
  }
  std::sort(raw.begin(), raw.end(),
            [](const RawEntry& a, const RawEntry& b) { return a.tensor < b.tensor; });
  const auto twice =
      std::adjacent_find(raw.begin(), raw.end(),
                         [](const RawEntry& a, const RawEntry& b) { return a.tensor == b.tensor; });
  if (twice != raw.end()) return fault("weight_map names tensor ", shown(twice->tensor), " twice");
  return raw;
}

int32_t position(const std::vector<std::string>& sorted, const std::string& name) {
  return static_cast<int32_t>(std::lower_bound(sorted.begin(), sorted.end(), name) -
                              sorted.begin());
}

Result<ShardIndex> build(const std::vector<RawEntry>& raw) {
  // Few spellings for many tensors: each is normalised once.
  std::vector<std::string_view> spellings;
  for (const RawEntry& entry : raw) {
    if (spellings.empty() || spellings.back() != entry.shard) spellings.push_back(entry.shard);
  }
  std::sort(spellings.begin(), spellings.end());
  spellings.erase(std::unique(spellings.begin(), spellings.end()), spellings.end());

  ShardIndex index;
  std::vector<std::string> normal;
  for (const std::string_view spelling : spellings) {
    NIBBLE_TRY(std::string name, normal_shard_name(spelling));
    normal.push_back(std::move(name));
  }
  index.shards = normal;
  std::sort(index.shards.begin(), index.shards.end());
  index.shards.erase(std::unique(index.shards.begin(), index.shards.end()), index.shards.end());

  std::vector<int32_t> shard_of(spellings.size());
  for (size_t i = 0; i < normal.size(); ++i) shard_of[i] = position(index.shards, normal[i]);
  index.entries.reserve(raw.size());
  for (const RawEntry& entry : raw) {
    const auto spelling = std::lower_bound(spellings.begin(), spellings.end(), entry.shard);
    index.entries.push_back(
        {std::string(entry.tensor), shard_of[static_cast<size_t>(spelling - spellings.begin())]});
  }
  return index;
}

}  // namespace

Result<std::string> normal_shard_name(std::string_view name) {
  if (name.empty()) return fault("a shard has an empty file name");
  if (name.find('\0') != std::string_view::npos) {
    return fault("shard ", shown(name), ": the name holds a NUL byte");
  }
  const std::filesystem::path path{std::string(name)};
  if (path.is_absolute()) {
    return fault("shard ", shown(name), ": expected a name inside the folder, found an absolute ",
                 "path");
  }
  for (const std::filesystem::path& part : path) {
    if (part == "..") return fault("shard ", shown(name), ": '..' leaves the folder");
  }
  const std::filesystem::path normal = path.lexically_normal();
  if (!normal.has_filename() || normal == ".") {
    return fault("shard ", shown(name), ": expected a file name, found a folder");
  }
  return normal.string();
}

Result<ShardIndex> parse_shard_index(std::string_view json) {
  dom::parser parser;
  dom::element root;
  if (const auto code = parser.parse(json.data(), json.size(), true).get(root)) {
    return fault(simdjson::error_message(code));
  }
  dom::object object;
  if (root.get(object) != simdjson::SUCCESS) return fault("expected a JSON object");
  std::vector<std::string_view> keys;
  std::optional<dom::element> weight_map;
  for (const dom::key_value_pair field : object) {
    keys.push_back(field.key);
    if (field.key == "weight_map") weight_map = field.value;
  }
  if (const auto twice = duplicate_of(std::move(keys))) {
    return fault("two keys ", shown(*twice));
  }
  if (!weight_map) return fault("the key 'weight_map' is missing");
  NIBBLE_TRY(const std::vector<RawEntry> raw, raw_entries(*weight_map));
  return build(raw);
}

}  // namespace nibble::checkpoint
