#include "base/json.h"

#include <cmath>

#include "base/file.h"

namespace nibble {
namespace {

// Nested input costs the parser stack; real files stay below a hundred levels.
constexpr int kMaxDepth = 256;

Error wrong_type(const std::string& key, std::string_view expected, const Json& found) {
  return Error(Code::kCorruptInput, cat("key '", key, "': expected ", expected, ", found ",
                                        json_dump(found).substr(0, 60)));
}

template <typename J>
Result<J> parse(std::string_view text, std::string_view name) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) {
        return Error(Code::kCorruptInput, cat(name, ": JSON nests deeper than ", kMaxDepth));
      }
    }
    if (c == ']' || c == '}') --depth;
  }
  try {
    return J::parse(text);
  } catch (const nlohmann::json::exception& e) {
    return Error(Code::kCorruptInput, cat(name, ": ", e.what()));
  }
}

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view name) {
  return parse<Json>(text, name);
}

Result<OrderedJson> parse_ordered_json(std::string_view text, std::string_view name) {
  return parse<OrderedJson>(text, name);
}

Result<Json> read_json_file(const std::string& path) {
  NIBBLE_TRY(const std::string text, read_text_file(path));
  return parse_json(text, path);
}

const Json* json_find(const Json& object, const std::string& key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return nullptr;
  return &*it;
}

Result<int64_t> json_int(const Json& object, const std::string& key) {
  const Json* value = json_find(object, key);
  if (value == nullptr) return Error(Code::kNotFound, cat("key '", key, "' is missing"));
  if (value->is_number_unsigned()) {
    const uint64_t raw = value->get<uint64_t>();
    if (raw > static_cast<uint64_t>(INT64_MAX)) return wrong_type(key, "a 64-bit integer", *value);
    return static_cast<int64_t>(raw);
  }
  if (value->is_number_integer()) return value->get<int64_t>();
  if (value->is_number_float()) {
    const double number = value->get<double>();
    if (number == std::floor(number) && std::abs(number) < 9e15)
      return static_cast<int64_t>(number);
  }
  return wrong_type(key, "an integer", *value);
}

Result<int64_t> json_int(const Json& object, const std::string& key, int64_t fallback) {
  if (json_find(object, key) == nullptr) return fallback;
  return json_int(object, key);
}

Result<double> json_number(const Json& object, const std::string& key, double fallback) {
  const Json* value = json_find(object, key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) return wrong_type(key, "a number", *value);
  return value->get<double>();
}

Result<bool> json_bool(const Json& object, const std::string& key, bool fallback) {
  const Json* value = json_find(object, key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return wrong_type(key, "true or false", *value);
  return value->get<bool>();
}

Result<std::string> json_string(const Json& object, const std::string& key) {
  const Json* value = json_find(object, key);
  if (value == nullptr) return Error(Code::kNotFound, cat("key '", key, "' is missing"));
  if (!value->is_string()) return wrong_type(key, "a string", *value);
  return value->get<std::string>();
}

Result<std::string> json_string(const Json& object, const std::string& key,
                                std::string_view fallback) {
  if (json_find(object, key) == nullptr) return std::string(fallback);
  return json_string(object, key);
}

std::string json_dump(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace nibble
