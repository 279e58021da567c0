// Reads the test vectors (vectors.json and the safetensors files beside it) for tests of any
// folder. Trusted input only: a broken or missing file throws, which GoogleTest reports as a
// failure. The product's own reader is `checkpoint`; this one shares no code with it, so it can
// test it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nibble::testing {

using VectorJson = nlohmann::json;

/// Folder named by the environment variable, else `tests/data/<name>` of the source tree.
inline std::string data_dir(const char* variable, const char* name) {
  const char* given = std::getenv(variable);
  if (given != nullptr && *given != '\0') return given;
  return std::string(NIBBLE_SOURCE_DIR) + "/tests/data/" + name;
}
inline std::string vectors_dir() { return data_dir("NIBBLE_VECTORS", "vectors"); }
inline std::string fixtures_dir() { return data_dir("NIBBLE_FIXTURES", "fixtures"); }

inline std::vector<std::byte> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

/// One stored tensor: its safetensors dtype name ("F8_E4M3"), shape in elements, raw bytes.
struct Blob {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  int64_t elems() const {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    return n;
  }
  /// The bytes as numbers of type T; the byte count must be a multiple of sizeof(T).
  template <typename T>
  std::vector<T> as() const {
    if (bytes.size() % sizeof(T) != 0) throw std::runtime_error("blob is not whole elements");
    std::vector<T> out(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
};

/// One safetensors file, read whole; enough for files that are known to be good.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path) : path_(path), bytes_(read_bytes(path)) {
    uint64_t header = 0;
    if (bytes_.size() < 8) throw std::runtime_error(path + " is too short");
    std::memcpy(&header, bytes_.data(), 8);
    data_ = 8 + static_cast<size_t>(header);
    const char* text = reinterpret_cast<const char*>(bytes_.data());
    header_ = VectorJson::parse(text + 8, text + data_);
    header_.erase("__metadata__");
  }
  /// Name to {dtype, shape, data_offsets}, without __metadata__.
  const VectorJson& header() const { return header_; }
  bool has(const std::string& name) const { return header_.contains(name); }
  Blob get(const std::string& name) const {
    if (!has(name)) throw std::runtime_error(path_ + " has no tensor " + name);
    const VectorJson& entry = header_.at(name);
    Blob blob;
    blob.dtype = entry.at("dtype").get<std::string>();
    blob.shape = entry.at("shape").get<std::vector<int64_t>>();
    const auto range = entry.at("data_offsets").get<std::vector<size_t>>();
    if (range.at(1) < range.at(0) || range[1] > bytes_.size() - data_) {
      throw std::runtime_error(path_ + ": range of " + name);
    }
    blob.bytes.resize(range[1] - range[0]);
    if (!blob.bytes.empty()) {
      std::memcpy(blob.bytes.data(), bytes_.data() + data_ + range[0], blob.bytes.size());
    }
    return blob;
  }

 private:
  std::string path_;
  std::vector<std::byte> bytes_;
  size_t data_ = 0;
  VectorJson header_;
};

/// One entry of vectors.json, with its tensors.
struct Case {
  std::string id, op;
  VectorJson params;  // an object, empty where the case has none
  VectorJson entry;   // the whole case as it stands in vectors.json
  std::string error;  // the refusal that the case expects; empty if it must succeed
  std::shared_ptr<const TensorFile> file;  // null where the case has no tensors

  bool has(const std::string& side, const std::string& role) const {
    return entry.contains(side) && entry.at(side).contains(role);
  }
  bool has_in(const std::string& role) const { return has("in", role); }
  bool has_out(const std::string& role) const { return has("out", role); }
  Blob in(const std::string& role) const { return tensor("in", role); }
  Blob out(const std::string& role) const { return tensor("out", role); }

 private:
  Blob tensor(const std::string& side, const std::string& role) const {
    if (!has(side, role) || file == nullptr) {
      throw std::runtime_error(id + " has no " + side + "." + role);
    }
    return file->get(entry.at(side).at(role).get<std::string>());
  }
};

/// Every case of a vectors folder, grouped by op in the order of vectors.json.
class VectorSet {
 public:
  static VectorSet load(const std::string& dir = vectors_dir()) {
    VectorSet set;
    set.dir_ = dir;
    const std::vector<std::byte> bytes = read_bytes(dir + "/vectors.json");
    const char* text = reinterpret_cast<const char*>(bytes.data());
    set.index_ = VectorJson::parse(text, text + bytes.size());
    std::map<std::string, std::shared_ptr<const TensorFile>> files;
    for (const VectorJson& entry : set.index_.at("cases")) {
      Case c;
      c.id = entry.at("id").get<std::string>();
      c.op = entry.at("op").get<std::string>();
      c.params = entry.value("params", VectorJson::object());
      c.error = entry.value("error", std::string());
      if (entry.contains("file")) {
        std::shared_ptr<const TensorFile>& file = files[entry.at("file").get<std::string>()];
        if (file == nullptr) {
          file = std::make_shared<TensorFile>(dir + "/" + entry.at("file").get<std::string>());
        }
        c.file = file;
      }
      c.entry = entry;
      set.cases_[c.op].push_back(std::move(c));
    }
    return set;
  }
  const std::string& dir() const { return dir_; }
  /// The whole of vectors.json.
  const VectorJson& index() const { return index_; }
  /// Cases of one op; empty if the set has none, which a test should refuse.
  const std::vector<Case>& cases(const std::string& op) const {
    static const std::vector<Case> none;
    const auto found = cases_.find(op);
    return found == cases_.end() ? none : found->second;
  }

 private:
  std::string dir_;
  VectorJson index_;
  std::map<std::string, std::vector<Case>> cases_;
};

}  // namespace nibble::testing
