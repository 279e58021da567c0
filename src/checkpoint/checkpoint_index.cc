#include "checkpoint/checkpoint_index.h"

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "base/json.h"
#include "checkpoint/json_text.h"
#include "checkpoint/shard_index.h"

namespace nibble::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kShardSuffix = ".safetensors";
// Alone and without an index it holds the whole model, as Hugging Face libraries write it.
constexpr std::string_view kWholeModelFile = "model.safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr int64_t kIndexBytesLimit = 1LL << 30;

template <typename... Parts>
Error fault(const Parts&... parts) {
  return Error(Code::kCorruptInput, cat("index: ", parts...));
}

bool ends_with(const std::string& text, std::string_view suffix) {
  return std::string_view(text).ends_with(suffix);
}

struct Listing {
  std::vector<std::string> shards, indexes;  // file names, sorted
};

Result<Listing> list_directory(const std::string& directory) {
  std::error_code code;
  fs::directory_iterator it(directory, code);
  if (code) {
    return Error(code == std::errc::no_such_file_or_directory ? Code::kNotFound : Code::kIo,
                 cat("cannot read directory '", directory, "': ", code.message()));
  }
  Listing listing;
  for (; it != fs::directory_iterator(); it.increment(code)) {
    const std::string name = it->path().filename().string();
    // Hidden files are leftovers of other tools (".nfs...", "._model.safetensors").
    if (name.starts_with('.')) continue;
    if (ends_with(name, kShardSuffix)) listing.shards.push_back(name);
    if (ends_with(name, kIndexSuffix)) listing.indexes.push_back(name);
  }
  if (code) return Error(Code::kIo, cat("cannot read '", directory, "': ", code.message()));
  if (file_exists(directory + "/model-kquant.index.json")) {
    listing.indexes.push_back("model-kquant.index.json");
  }
  std::sort(listing.shards.begin(), listing.shards.end());
  std::sort(listing.indexes.begin(), listing.indexes.end());
  return listing;
}

/// The name of the index to use, or empty if there is none.
Result<std::string> choose_index(const std::vector<std::string>& indexes) {
  for (const char* preferred : {"model.safetensors.index.json", "model-kquant.index.json"}) {
    if (std::find(indexes.begin(), indexes.end(), preferred) != indexes.end()) {
      return std::string(preferred);
    }
  }
  if (indexes.empty()) return std::string();
  if (indexes.size() > 1) {
    return fault("expected one index file, found ", indexes.size(), ": '", indexes[0], "', '",
                 indexes[1], "'");
  }
  return indexes[0];
}

/// Refuses a shard whose folder leaves `root` through a symbolic link. The last component may be a
/// link to any file: a Hugging Face cache keeps every shard as a link into its blobs folder, and
/// such a link says no more about the index than a plain file would. Names come from the index, an
/// untrusted text; links come from whoever made the folder.
Result<void> check_folder(const fs::path& root, const std::string& shard) {
  const fs::path folder = fs::path(shard).parent_path();
  if (folder.empty()) return {};
  std::error_code code;
  const fs::path real = fs::canonical(root / folder, code);
  if (code) return {};  // the shard is missing, and open_files says so
  const fs::path real_root = fs::canonical(root, code);
  if (code) return Error(Code::kIo, cat("cannot resolve '", root.string(), "'"));
  const auto [end, ignored] =
      std::mismatch(real_root.begin(), real_root.end(), real.begin(), real.end());
  if (end != real_root.end()) {
    return fault("shard ", shown(shard), ": its folder is a link to '", real.string(),
                 "', outside the checkpoint");
  }
  return {};
}

Result<std::vector<File>> open_files(const std::string& directory,
                                     const std::vector<std::string>& shards) {
  std::vector<File> files;
  std::vector<std::string> missing;
  for (const std::string& shard : shards) {
    NIBBLE_TRY(check_folder(directory, shard));
    Result<File> file = File::open(directory + "/" + shard);
    if (file) {
      files.push_back(std::move(*file));
    } else if (file.error().code() == Code::kNotFound) {
      missing.push_back(shard);
    } else {
      return file.error().with_context("index");
    }
  }
  if (!missing.empty()) {
    std::string names;
    for (size_t i = 0; i < std::min<size_t>(missing.size(), 5); ++i) {
      names += cat(i == 0 ? "" : ", ", shown(missing[i]));
    }
    return fault(missing.size(), " of ", shards.size(), " shards are missing in '", directory,
                 "': ", names, missing.size() > 5 ? ", ..." : "");
  }
  return files;
}

/// Every tensor of these files, sorted by name, then shard.
Result<std::vector<TensorInfo>> read_headers(const std::vector<File>& files) {
  std::vector<TensorInfo> tensors;
  for (size_t i = 0; i < files.size(); ++i) {
    NIBBLE_TRY(Header header, read_header(files[i]));
    for (TensorInfo& tensor : header.tensors) {
      tensor.shard = static_cast<int32_t>(i);
      tensors.push_back(std::move(tensor));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.name, a.shard) < std::tie(b.name, b.shard);
  });
  return tensors;
}

struct Assigned {
  std::vector<TensorInfo> tensors;
  std::vector<std::string> orphans;
};

/// Keeps what the index names where the index says; both lists are sorted by name.
Result<Assigned> assign(std::vector<TensorInfo> stored, const ShardIndex& index) {
  Assigned out;
  out.tensors.reserve(index.entries.size());
  const ShardIndex::Entry* missing = nullptr;
  int64_t missing_count = 0;
  size_t at = 0;
  const auto orphan = [&](const TensorInfo& tensor) {
    out.orphans.push_back(
        cat(tensor.name, " (", index.shards[static_cast<size_t>(tensor.shard)], ")"));
  };
  for (const ShardIndex::Entry& entry : index.entries) {
    bool found = false;
    for (; at < stored.size() && stored[at].name <= entry.tensor; ++at) {
      if (stored[at].name == entry.tensor && stored[at].shard == entry.shard) {
        out.tensors.push_back(std::move(stored[at]));
        found = true;
      } else {
        orphan(stored[at]);
      }
    }
    if (!found && missing_count++ == 0) missing = &entry;
  }
  for (; at < stored.size(); ++at) orphan(stored[at]);
  if (missing != nullptr) {
    return fault("tensor ", shown(missing->tensor), " is not in its shard '",
                 index.shards[static_cast<size_t>(missing->shard)], "' (", missing_count,
                 " such tensors)");
  }
  return out;
}

/// Lines for tensors of shard files that the index does not name at all.
void add_unnamed_shards(const std::string& directory, const std::vector<std::string>& present,
                        const std::vector<std::string>& named, std::vector<std::string>& orphans) {
  for (const std::string& shard : present) {
    if (std::binary_search(named.begin(), named.end(), shard)) continue;
    const Result<File> file = File::open(directory + "/" + shard);
    const Result<Header> header = file ? read_header(*file) : Result<Header>(file.error());
    if (!header) {
      orphans.push_back(cat("unreadable file (", shard, "): ", header.error().message()));
      continue;
    }
    for (const TensorInfo& tensor : header->tensors) {
      orphans.push_back(cat(tensor.name, " (", shard, ")"));
    }
  }
}

}  // namespace

Result<CheckpointIndex> CheckpointIndex::open(const std::string& path) {
  if (!directory_exists(path)) {
    const fs::path file(path);
    if (!ends_with(path, kShardSuffix)) {
      return Error(Code::kNotFound,
                   cat("'", path, "': expected a checkpoint folder or a .safetensors file"));
    }
    NIBBLE_TRY(const File probe, File::open(path));  // its error says what is wrong with the path
    const std::string parent = file.parent_path().string();
    return open_shards(parent.empty() ? "." : parent, {file.filename().string()});
  }
  NIBBLE_TRY(const Listing listing, list_directory(path));
  NIBBLE_TRY(const std::string index_name, choose_index(listing.indexes));
  if (index_name.empty()) {
    if (listing.shards.empty()) {
      return Error(Code::kNotFound, cat("'", path, "' holds no *.safetensors file and no index"));
    }
    NIBBLE_TRY(CheckpointIndex all, open_shards(path, listing.shards));
    all.keep_whole_model_file();
    return all;
  }
  NIBBLE_TRY(const std::string json, read_text_file(path + "/" + index_name, kIndexBytesLimit));
  NIBBLE_TRY(ShardIndex index, parse_shard_index(json));
  NIBBLE_TRY(std::vector<File> files, open_files(path, index.shards));
  NIBBLE_TRY(std::vector<TensorInfo> stored, read_headers(files));
  NIBBLE_TRY(Assigned assigned, assign(std::move(stored), index));

  CheckpointIndex out;
  out.directory_ = path;
  out.tensors_ = std::move(assigned.tensors);
  out.orphans_ = std::move(assigned.orphans);
  add_unnamed_shards(path, listing.shards, index.shards, out.orphans_);
  out.shard_names_ = std::move(index.shards);
  out.files_ = std::make_shared<const std::vector<File>>(std::move(files));
  out.has_index_ = true;
  for (const TensorInfo& tensor : out.tensors_) out.total_bytes_ += tensor.bytes;
  return out;
}

Result<CheckpointIndex> CheckpointIndex::open_shards(const std::string& directory,
                                                     std::vector<std::string> shards) {
  for (std::string& shard : shards) {
    NIBBLE_TRY(shard, normal_shard_name(shard));
  }
  NIBBLE_TRY(std::vector<File> files, open_files(directory, shards));
  NIBBLE_TRY(std::vector<TensorInfo> tensors, read_headers(files));
  const auto twice =
      std::adjacent_find(tensors.begin(), tensors.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  if (twice != tensors.end()) {
    return fault("tensor ", shown(twice->name), " lies in two files, '",
                 shards[static_cast<size_t>(twice->shard)], "' and '",
                 shards[static_cast<size_t>((twice + 1)->shard)], "', and no index says which");
  }
  CheckpointIndex out;
  out.directory_ = directory;
  out.tensors_ = std::move(tensors);
  out.shard_names_ = std::move(shards);
  out.files_ = std::make_shared<const std::vector<File>>(std::move(files));
  for (const TensorInfo& tensor : out.tensors_) out.total_bytes_ += tensor.bytes;
  return out;
}

void CheckpointIndex::keep_whole_model_file() {
  const auto whole = std::find(shard_names_.begin(), shard_names_.end(), kWholeModelFile);
  if (whole == shard_names_.end() || shard_names_.size() == 1) return;
  const auto shard = static_cast<int32_t>(whole - shard_names_.begin());
  std::vector<TensorInfo> kept;
  total_bytes_ = 0;
  for (TensorInfo& tensor : tensors_) {
    if (tensor.shard == shard) {
      total_bytes_ += tensor.bytes;
      kept.push_back(std::move(tensor));
    } else {
      orphans_.push_back(
          cat(tensor.name, " (", shard_names_[static_cast<size_t>(tensor.shard)], ")"));
    }
  }
  tensors_ = std::move(kept);
}

const TensorInfo* CheckpointIndex::find(std::string_view name) const {
  const auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const TensorInfo& t, std::string_view n) { return t.name < n; });
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

Result<void> CheckpointIndex::read(const TensorInfo& tensor, int64_t begin,
                                   std::span<std::byte> out) const {
  const auto bytes = static_cast<int64_t>(out.size());
  NIBBLE_CHECK(begin >= 0 && begin <= tensor.bytes && bytes <= tensor.bytes - begin, "tensor '",
               tensor.name, "' of ", tensor.bytes, " bytes, asked for ", bytes, " from ", begin);
  const Result<void> done = file(tensor.shard).read_at(tensor.offset + begin, out);
  if (!done) return done.error().with_context(cat("tensor ", shown(tensor.name)));
  return {};
}

}  // namespace nibble::checkpoint
