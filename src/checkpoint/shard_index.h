// The index JSON of a sharded checkpoint: which tensor lies in which shard file. A function on
// bytes, so that it can be fuzzed; what is on disk is `CheckpointIndex`'s part.
// Source: spec: containers, section 1 (index).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble::checkpoint {

struct ShardIndex {
  struct Entry {
    std::string tensor;
    int32_t shard = 0;  // index into shards
  };
  std::vector<Entry> entries;       // sorted by tensor, no name twice
  std::vector<std::string> shards;  // sorted, normalised ("./a" is "a"), no name twice
};

/// Errors: kCorruptInput starting with "index: ".
Result<ShardIndex> parse_shard_index(std::string_view json);

/// The shard name in normal form, relative and inside its folder as text; what symbolic links do is
/// not looked at. Errors: kCorruptInput "index: ..." for an empty or absolute name, a `..` or a
/// NUL.
Result<std::string> normal_shard_name(std::string_view name);

}  // namespace nibble::checkpoint
