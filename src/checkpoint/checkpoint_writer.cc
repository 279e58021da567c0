#include "checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <tuple>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/json_text.h"

namespace nibble::checkpoint {
namespace {

std::string json_text(const std::string& text) { return json_dump(Json(text)); }

std::string final_name(int shard, int shards) {
  if (shards == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", shard, shards);
  return name;
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string directory, int64_t max_shard_bytes)
    : directory_(std::move(directory)), max_shard_bytes_(max_shard_bytes) {
  NIBBLE_CHECK(max_shard_bytes > 0, max_shard_bytes);
}

std::string CheckpointWriter::unfinished_name(int shard) const {
  return cat(directory_, "/shard-", shard, ".unfinished");
}

Result<void> CheckpointWriter::add(std::string name, formats::DType dtype,
                                   std::vector<int64_t> shape, std::vector<std::byte> bytes) {
  const auto refuse = [&name](const auto&... parts) {
    return Error(Code::kInvalidArgument, cat("tensor ", shown(name), ": ", parts...));
  };
  if (!valid_utf8(name)) return refuse("the name is not valid UTF-8");
  if (name == "__metadata__") return refuse("the name is reserved by the file format");
  for (const int64_t extent : shape) {
    if (extent < 0) return refuse("negative extent in shape ", shape_text(shape));
  }
  const Result<int64_t> expected = stored_bytes(name, dtype, shape);
  if (!expected) return Error(Code::kInvalidArgument, expected.error().message());
  if (static_cast<int64_t>(bytes.size()) != *expected) {
    return refuse(formats::dtype_name(dtype), " ", shape_text(shape), " takes ", *expected,
                  " bytes, got ", bytes.size());
  }
  if (names_.contains(name)) return refuse("added twice");
  if (!pending_.empty() && *expected > max_shard_bytes_ - buffered_bytes_) {
    NIBBLE_TRY(write_shard());
  }
  names_.insert(name);
  buffered_bytes_ += *expected;
  total_bytes_ += *expected;
  pending_.push_back({std::move(name), dtype, std::move(shape), std::move(bytes)});
  return {};
}

Result<void> CheckpointWriter::flush_shard() {
  if (pending_.empty()) return {};
  return write_shard();
}

Result<void> CheckpointWriter::write_shard() {
  std::sort(pending_.begin(), pending_.end(), [](const Pending& a, const Pending& b) {
    const int bits_a = formats::dtype_bits(a.dtype), bits_b = formats::dtype_bits(b.dtype);
    return std::tie(bits_b, a.name) < std::tie(bits_a, b.name);
  });
  std::string header = R"({"__metadata__":{"format":"pt"})";
  size_t at = 0;
  for (const Pending& tensor : pending_) {
    const size_t end = at + tensor.bytes.size();
    header += cat(",", json_text(tensor.name), R"(:{"dtype":")", formats::dtype_name(tensor.dtype),
                  R"(","shape":)", json_dump(Json(tensor.shape)), R"(,"data_offsets":[)", at, ",",
                  end, "]}");
    at = end;
  }
  header += '}';
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>((header.size() >> (8 * i)) & 0xFF);

  ++shards_;
  NIBBLE_TRY(FileWriter writer, FileWriter::create(unfinished_name(shards_)));
  NIBBLE_TRY(writer.append(std::as_bytes(std::span(length))));
  NIBBLE_TRY(writer.append(std::as_bytes(std::span(header))));
  for (Pending& tensor : pending_) {
    NIBBLE_TRY(writer.append(tensor.bytes));
    tensor.bytes = {};
    written_.emplace_back(std::move(tensor.name), shards_);
  }
  NIBBLE_TRY(writer.finish());
  pending_.clear();
  buffered_bytes_ = 0;
  return {};
}

Result<void> CheckpointWriter::finish() {
  // Without any tensor one empty shard is written, so that the folder still reads as a checkpoint.
  if (!pending_.empty() || shards_ == 0) NIBBLE_TRY(write_shard());
  if (shards_ > 1) {
    std::sort(written_.begin(), written_.end());
    std::string index = cat("{\n  \"metadata\": {\n    \"total_size\": ", total_bytes_,
                            "\n  },\n  \"weight_map\": {");
    const char* separator = "\n";
    for (const auto& [name, shard] : written_) {
      index += cat(separator, "    ", json_text(name), ": \"", final_name(shard, shards_), "\"");
      separator = ",\n";
    }
    index += "\n  }\n}\n";
    NIBBLE_TRY(write_file_atomic(directory_ + "/model.safetensors.index.json", index));
  }
  for (int shard = 1; shard <= shards_; ++shard) {
    const std::string to = cat(directory_, "/", final_name(shard, shards_));
    std::error_code code;
    std::filesystem::rename(unfinished_name(shard), to, code);
    if (code) return Error(Code::kIo, cat("cannot rename to '", to, "': ", code.message()));
  }
  return {};
}

}  // namespace nibble::checkpoint
