// Writes a sharded safetensors directory in bounded memory: at most one shard's tensors are held.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "checkpoint/checkpoint_index.h"

namespace nibble::checkpoint {

/// Tensors are added in any order and buffered until a shard is full (or flush_shard); within a
/// shard they are ordered by descending element size, then name; headers are padded to 8 bytes.
/// One shard is called model.safetensors, several model-00001-of-0000N.safetensors plus the index.
/// Until finish() they carry names that CheckpointIndex does not open, and the index is written
/// before the first rename: a folder of a writer that was killed never reads as a whole checkpoint.
class CheckpointWriter {
 public:
  /// `directory` exists (a StagedDirectory's path). metadata {"format": "pt"} is written.
  /// max_shard_bytes > 0 counts tensor bytes; a larger tensor gets a shard of its own.
  CheckpointWriter(std::string directory, int64_t max_shard_bytes);

  /// Errors: kInvalidArgument for a duplicate name or a byte count that disagrees with dtype and
  /// shape; kIo.
  Result<void> add(std::string name, formats::DType dtype, std::vector<int64_t> shape,
                   std::vector<std::byte> bytes);
  /// Writes what is buffered as a shard.
  Result<void> flush_shard();
  /// Flushes, renames shards to their final names and writes the index. Call once.
  Result<void> finish();

  int64_t total_bytes() const { return total_bytes_; }
  int64_t buffered_bytes() const { return buffered_bytes_; }

 private:
  struct Pending {
    std::string name;
    formats::DType dtype;
    std::vector<int64_t> shape;
    std::vector<std::byte> bytes;
  };
  std::string directory_;
  int64_t max_shard_bytes_;
  std::string unfinished_name(int shard) const;
  Result<void> write_shard();

  std::vector<Pending> pending_;
  std::set<std::string, std::less<>> names_;
  std::vector<std::pair<std::string, int>> written_;  // tensor name, shard number
  int shards_ = 0;
  int64_t total_bytes_ = 0, buffered_bytes_ = 0;
};

}  // namespace nibble::checkpoint
