// JSON for small files (config, tokenizer, request bodies). The one place that knows that the
// library underneath (nlohmann-json) can throw; nothing leaves here but Result.
// Safetensors headers and shard indexes are parsed by `checkpoint` with simdjson instead.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/json_fwd.h"
#include "base/result.h"

namespace nibble {

/// Errors: kCorruptInput with `name`, byte offset and reason. Duplicate keys keep the last value.
Result<Json> parse_json(std::string_view text, std::string_view name);
Result<OrderedJson> parse_ordered_json(std::string_view text, std::string_view name);
Result<Json> read_json_file(const std::string& path);

/// Typed look-ups. Missing or null: the fallback (or kNotFound); wrong type or range: kCorruptInput
/// naming the key, what was expected and what was found.
Result<int64_t> json_int(const Json& object, const std::string& key);
Result<int64_t> json_int(const Json& object, const std::string& key, int64_t fallback);
Result<double> json_number(const Json& object, const std::string& key, double fallback);
Result<bool> json_bool(const Json& object, const std::string& key, bool fallback);
Result<std::string> json_string(const Json& object, const std::string& key);
Result<std::string> json_string(const Json& object, const std::string& key,
                                std::string_view fallback);
/// The member if present and not null, else nullptr. `object` may be of any type.
const Json* json_find(const Json& object, const std::string& key);
/// Text of a value; invalid UTF-8 is replaced, so it never throws.
std::string json_dump(const Json& value, int indent = -1);

}  // namespace nibble
