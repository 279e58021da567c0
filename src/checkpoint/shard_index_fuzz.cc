// Arbitrary bytes as an index JSON: refused, or shard names that stay inside their folder.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "base/check.h"
#include "checkpoint/shard_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble::checkpoint;
  const auto index = parse_shard_index(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!index) {
    NIBBLE_CHECK(index.error().message().starts_with("index: "), index.error().message());
    return 0;
  }
  for (const std::string& shard : index->shards) {
    const std::filesystem::path path(shard);
    NIBBLE_CHECK(!shard.empty() && path.is_relative() && *path.begin() != "..", shard);
    NIBBLE_CHECK(path.lexically_normal() == path, shard);
  }
  for (const ShardIndex::Entry& entry : index->entries) {
    NIBBLE_CHECK(entry.shard >= 0 && static_cast<size_t>(entry.shard) < index->shards.size());
  }
  NIBBLE_CHECK(std::adjacent_find(index->entries.begin(), index->entries.end(),
                                  [](const auto& a, const auto& b) {
                                    return a.tensor >= b.tensor;
                                  }) == index->entries.end());
  return 0;
}
