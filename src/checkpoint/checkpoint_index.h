// Every stored tensor of a checkpoint directory as a range already proved to lie inside its file,
// so nobody above checks again. Headers only: no tensor byte is read here. Gives names no meaning.
// Source: safetensors README (format section); spec: containers, section 1.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "formats/dtype.h"

namespace nibble::checkpoint {

struct TensorInfo {
  std::string name;
  formats::DType dtype = formats::DType::kU8;
  std::vector<int64_t> shape;  // [] is a scalar
  int32_t shard = 0;           // index into CheckpointIndex::shards()
  int64_t offset = 0;          // of the first byte, from the start of the file; any alignment
  int64_t bytes = 0;
};

/// Product of the extents; 1 for a scalar. Proved not to overflow.
int64_t element_count(const TensorInfo& tensor);
/// Bytes of a tensor of this type and shape. Errors: kCorruptInput starting with "shape_overflow: "
/// or "sub_byte: " and naming `name`. Extents must not be negative.
Result<int64_t> stored_bytes(std::string_view name, formats::DType dtype,
                             std::span<const int64_t> shape);
/// "[4096, 2048]"
std::string shape_text(std::span<const int64_t> shape);

struct Header {
  std::vector<TensorInfo> tensors;  // in order of offset
  std::vector<std::pair<std::string, std::string>> metadata;
  int64_t data_begin = 0;
};

/// Parses the first bytes of a safetensors file. `prefix` holds at least the 8 length bytes and the
/// header. Errors: kCorruptInput whose message starts with the spec's error name, for example
/// "offsets_not_contiguous: tensor 'a' ...". Never reads outside `prefix`.
Result<Header> parse_header(std::string_view prefix, int64_t file_size);
/// Reads and parses the header of one file.
Result<Header> read_header(const File& file);

class CheckpointIndex {
 public:
  /// Opens a directory: `model.safetensors.index.json` (or `model-kquant.index.json`, or the only
  /// `*.safetensors.index.json`) if there is one, else every `*.safetensors` in it. Also takes a
  /// path to one .safetensors file. Shards of an index may lie in a subfolder, never outside.
  /// Errors: kCorruptInput starting with "index: " for a missing shard, a tensor that its shard
  /// lacks, an escaping path; without an index a name in two shards names both files.
  static Result<CheckpointIndex> open(const std::string& path);
  /// Opens exactly these shard files (relative to `directory`), for containers with own manifests.
  static Result<CheckpointIndex> open_shards(const std::string& directory,
                                             std::vector<std::string> shards);

  const std::string& directory() const { return directory_; }
  /// Sorted by name.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  /// Null if absent. O(log n).
  const TensorInfo* find(std::string_view name) const;
  const std::vector<std::string>& shards() const { return shard_names_; }
  const File& file(int32_t shard) const { return (*files_)[static_cast<size_t>(shard)]; }
  bool has_index() const { return has_index_; }
  /// Tensors that lie in a shard but that the index assigns elsewhere or does not name:
  /// "name (shard)" lines. They are not in tensors().
  std::span<const std::string> orphans() const { return orphans_; }
  int64_t total_bytes() const { return total_bytes_; }

  /// Reads bytes [begin, begin + out.size()) of a tensor. Thread-safe.
  Result<void> read(const TensorInfo& tensor, int64_t begin, std::span<std::byte> out) const;

 private:
  /// Without an index, other files beside a `model.safetensors` are no part of the model.
  void keep_whole_model_file();

  std::string directory_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::string> shard_names_;
  std::shared_ptr<const std::vector<File>> files_;
  std::vector<std::string> orphans_;
  bool has_index_ = false;
  int64_t total_bytes_ = 0;
};

}  // namespace nibble::checkpoint
