// The header of one safetensors file: hostile bytes to named ranges that are proved to tile the
// file's data part. simdjson's DOM checks the JSON (strict numbers, no NaN, UTF-8) and keeps
// duplicate keys, so that they can be refused here.
// Source: safetensors README, format section; spec: containers, section 1.
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/json.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/json_text.h"

namespace nibble::checkpoint {
namespace {

namespace dom = simdjson::dom;

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::string_view kMetadataKey = "__metadata__";

/// Every refusal: the spec's name first, so that tests and users can rely on it.
template <typename... Parts>
Error fault(std::string_view name, const Parts&... parts) {
  return Error(Code::kCorruptInput, cat(name, ": ", parts...));
}

/// An entry whose range is not yet proved. begin and end count from the data part.
struct Entry {
  TensorInfo tensor;
  uint64_t begin = 0, end = 0;
};

Result<std::vector<uint64_t>> natural_numbers(std::string_view error_name, std::string_view tensor,
                                              dom::element value) {
  dom::array array;
  if (value.get(array) != simdjson::SUCCESS) {
    return fault(error_name, "tensor ", shown(tensor), ": expected an array of integers, found ",
                 shown(simdjson::minify(value)));
  }
  std::vector<uint64_t> out;
  out.reserve(array.size());
  for (const dom::element item : array) {
    uint64_t number = 0;
    if (item.get(number) != simdjson::SUCCESS) {
      return fault(error_name, "tensor ", shown(tensor),
                   ": expected a non-negative integer at position ", out.size(), ", found ",
                   shown(simdjson::minify(item)));
    }
    out.push_back(number);
  }
  return out;
}

struct EntryFields {
  dom::element dtype, shape, offsets;
};

Result<EntryFields> entry_fields(std::string_view name, dom::element value) {
  constexpr std::array<std::string_view, 3> kKeys = {"dtype", "shape", "data_offsets"};
  EntryFields fields;
  const std::array<dom::element*, 3> slots = {&fields.dtype, &fields.shape, &fields.offsets};
  std::array<bool, 3> seen = {};
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) {
    return fault("entry_fields", "tensor ", shown(name), ": expected an object, found ",
                 shown(simdjson::minify(value)));
  }
  for (const dom::key_value_pair field : object) {
    const size_t k =
        static_cast<size_t>(std::find(kKeys.begin(), kKeys.end(), field.key) - kKeys.begin());
    if (k == kKeys.size()) {
      return fault("entry_fields", "tensor ", shown(name), " has the unknown field ",
                   shown(field.key), ", expected exactly dtype, shape and data_offsets");
    }
    if (seen[k]) {
      return fault("duplicate_key", "tensor ", shown(name), " has two fields ", shown(field.key));
    }
    seen[k] = true;
    *slots[k] = field.value;
  }
  for (size_t k = 0; k < kKeys.size(); ++k) {
    if (!seen[k]) {
      return fault("entry_fields", "tensor ", shown(name), " lacks the field '", kKeys[k], "'");
    }
  }
  return fields;
}

Result<Entry> parse_entry(std::string_view name, dom::element value) {
  NIBBLE_TRY(const EntryFields fields, entry_fields(name, value));
  Entry entry;
  entry.tensor.name = name;

  std::string_view dtype_text;
  std::optional<formats::DType> dtype;
  if (fields.dtype.get(dtype_text) == simdjson::SUCCESS) {
    dtype = formats::dtype_from_name(dtype_text);
  }
  if (!dtype) {
    return fault("dtype_unknown", "tensor ", shown(name),
                 ": expected a safetensors type such as \"BF16\", found ",
                 shown(simdjson::minify(fields.dtype)));
  }
  entry.tensor.dtype = *dtype;

  NIBBLE_TRY(const std::vector<uint64_t> shape, natural_numbers("shape", name, fields.shape));
  entry.tensor.shape.reserve(shape.size());
  for (const uint64_t extent : shape) {
    if (extent > static_cast<uint64_t>(INT64_MAX)) {
      return fault("shape_overflow", "tensor ", shown(name), ": extent ", extent,
                   " is above 2^63 - 1");
    }
    entry.tensor.shape.push_back(static_cast<int64_t>(extent));
  }
  NIBBLE_TRY(entry.tensor.bytes, stored_bytes(name, *dtype, entry.tensor.shape));

  NIBBLE_TRY(const std::vector<uint64_t> offsets, natural_numbers("offsets", name, fields.offsets));
  if (offsets.size() != 2) {
    return fault("offsets", "tensor ", shown(name), ": expected [begin, end], found ",
                 offsets.size(), " numbers");
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  if (entry.begin > entry.end) {
    return fault("offsets", "tensor ", shown(name), ": begin ", entry.begin, " is after end ",
                 entry.end);
  }
  return entry;
}

Result<void> parse_metadata(dom::element value, Header& header) {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS) {
    return fault("metadata_type", "__metadata__: expected an object, found ",
                 shown(simdjson::minify(value)));
  }
  std::vector<std::string_view> keys;
  for (const dom::key_value_pair field : object) {
    std::string_view text;
    if (field.value.get(text) != simdjson::SUCCESS) {
      return fault("metadata_type", "__metadata__ key ", shown(field.key),
                   ": expected text, found ", shown(simdjson::minify(field.value)));
    }
    keys.push_back(field.key);
    header.metadata.emplace_back(field.key, text);
  }
  if (const auto twice = duplicate_of(std::move(keys))) {
    return fault("duplicate_key", "__metadata__ has two keys ", shown(*twice));
  }
  return {};
}

/// Proves that the entries, in order of offset, tile [0, data_bytes) exactly.
Result<void> check_ranges(std::vector<Entry>& entries, uint64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.tensor.name) < std::tie(b.begin, b.end, b.tensor.name);
  });
  uint64_t at = 0;
  for (const Entry& entry : entries) {
    const std::string& name = entry.tensor.name;
    if (entry.begin != at) {
      return fault("offsets_not_contiguous", "tensor ", shown(name), " begins at byte ",
                   entry.begin, " of the data, expected ", at);
    }
    if (entry.end - entry.begin != static_cast<uint64_t>(entry.tensor.bytes)) {
      return fault("size_mismatch", "tensor ", shown(name), ": ",
                   formats::dtype_name(entry.tensor.dtype), " ", shape_text(entry.tensor.shape),
                   " needs ", entry.tensor.bytes, " bytes, data_offsets hold ",
                   entry.end - entry.begin);
    }
    if (entry.end > data_bytes) {
      return fault("data_past_end", "tensor ", shown(name), " ends at byte ", entry.end,
                   " of the data, the file holds ", data_bytes);
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return fault("trailing_bytes", data_bytes - at, " bytes after the last tensor, expected none");
  }
  return {};
}

Result<Header> parse_json(std::string_view json, int64_t data_begin, uint64_t data_bytes) {
  if (!valid_utf8(json)) return fault("header_utf8", "the header is not valid UTF-8");
  if (json.empty() || json.front() != '{') {
    return fault("header_start", "expected '{' as first byte of the header, found ",
                 shown(json.substr(0, 1)));
  }
  dom::parser parser;
  dom::element root;
  // The copy that simdjson makes (realloc) gives it the padding it reads past the end.
  if (const auto code = parser.parse(json.data(), json.size(), true).get(root)) {
    return fault("header_json", simdjson::error_message(code));
  }
  dom::object object;
  if (root.get(object) != simdjson::SUCCESS) return fault("header_json", "expected an object");

  Header header;
  header.data_begin = data_begin;
  std::vector<std::string_view> keys;
  std::vector<Entry> entries;
  for (const dom::key_value_pair field : object) {
    keys.push_back(field.key);
    if (field.key == kMetadataKey) {
      NIBBLE_TRY(parse_metadata(field.value, header));
      continue;
    }
    NIBBLE_TRY(Entry entry, parse_entry(field.key, field.value));
    entries.push_back(std::move(entry));
  }
  if (const auto twice = duplicate_of(std::move(keys))) {
    return fault("duplicate_key", "two entries are named ", shown(*twice));
  }
  NIBBLE_TRY(check_ranges(entries, data_bytes));
  header.tensors.reserve(entries.size());
  for (Entry& entry : entries) {
    entry.tensor.offset = data_begin + static_cast<int64_t>(entry.begin);
    header.tensors.push_back(std::move(entry.tensor));
  }
  return header;
}

/// Checks the eight length bytes and gives the header's length.
Result<uint64_t> header_length(std::string_view prefix, int64_t file_size) {
  if (file_size < 8 || prefix.size() < 8) {
    return fault("file_too_short", "expected at least 8 bytes, found ", file_size);
  }
  uint64_t length = 0;
  for (size_t i = 0; i < 8; ++i) {
    length |= static_cast<uint64_t>(static_cast<unsigned char>(prefix[i])) << (8 * i);
  }
  if (length > kMaxHeaderBytes) {
    return fault("header_too_large", "the header claims ", length, " bytes, the limit is ",
                 kMaxHeaderBytes);
  }
  if (8 + length > static_cast<uint64_t>(file_size)) {
    return fault("header_past_end", "the header claims ", length, " bytes, the file has ",
                 file_size - 8, " after its length");
  }
  return length;
}

}  // namespace

Result<int64_t> stored_bytes(std::string_view name, formats::DType dtype,
                             std::span<const int64_t> shape) {
  int64_t bits = formats::dtype_bits(dtype);
  // In the file's order, so that a zero extent saves only the products after it.
  int64_t count = 1;
  bool overflow = false;
  for (const int64_t extent : shape) {
    overflow = overflow || __builtin_mul_overflow(count, extent, &count);
  }
  if (overflow || __builtin_mul_overflow(bits, count, &bits)) {
    return fault("shape_overflow", "tensor ", shown(name), ": the bits of ",
                 formats::dtype_name(dtype), " ", shape_text(shape), " do not fit 64 bits");
  }
  if (bits % 8 != 0) {
    return fault("sub_byte", "tensor ", shown(name), ": ", formats::dtype_name(dtype), " ",
                 shape_text(shape), " has ", bits, " bits, expected whole bytes");
  }
  return bits / 8;
}

int64_t element_count(const TensorInfo& tensor) {
  int64_t count = 1;
  for (const int64_t extent : tensor.shape) count *= extent;
  return count;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

Result<Header> parse_header(std::string_view prefix, int64_t file_size) {
  NIBBLE_TRY(const uint64_t length, header_length(prefix, file_size));
  if (prefix.size() < 8 + length) {
    return fault("header_past_end", "the header claims ", length, " bytes, only ",
                 prefix.size() - 8, " were read");
  }
  return parse_json(prefix.substr(8, length), static_cast<int64_t>(8 + length),
                    static_cast<uint64_t>(file_size) - 8 - length);
}

Result<Header> read_header(const File& file) {
  const auto in_file = [&file](const Error& error) {  // behind, to keep the error's name first
    return Error(error.code(), cat(error.message(), " (in '", file.path(), "')"));
  };
  std::string prefix(static_cast<size_t>(std::min<int64_t>(file.size(), 8)), '\0');
  NIBBLE_TRY(file.read_at(0, std::as_writable_bytes(std::span(prefix))));
  const Result<uint64_t> length = header_length(prefix, file.size());
  if (!length) return in_file(length.error());
  prefix.resize(8 + *length);
  NIBBLE_TRY(file.read_at(8, std::as_writable_bytes(std::span(prefix)).subspan(8)));
  Result<Header> header = parse_header(prefix, file.size());
  if (!header) return in_file(header.error());
  return header;
}

bool valid_utf8(std::string_view text) { return simdjson::validate_utf8(text.data(), text.size()); }

std::optional<std::string_view> duplicate_of(std::vector<std::string_view> keys) {
  // Sorted, not hashed: a hostile file cannot make this quadratic.
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice == keys.end()) return std::nullopt;
  return *twice;
}

std::string shown(std::string_view text) {
  constexpr size_t kLimit = 200;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kLimit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  if (text.size() > kLimit) out += "...";
  return out + "'";
}

}  // namespace nibble::checkpoint
