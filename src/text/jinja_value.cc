#include "text/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/json.h"
#include "text/unicode.h"

namespace nibble::text::jinja {
namespace {

constexpr int kMaxPrintDepth = 64;  // deeper values print as ..., and cannot be JSON
constexpr int kMaxSteps = 1'000'000;

void append_hex(char32_t value, int digits, std::string& out) {
  constexpr char kHex[] = "0123456789abcdef";
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += kHex[(value >> shift) & 15];
}

void append_json_string(std::string_view text, bool ascii, std::string& out) {
  out += '"';
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = pos;
    const char32_t c = next_code_point(text, pos);
    switch (c) {
      case '"': out += "\\\""; continue;
      case '\\': out += "\\\\"; continue;
      case '\n': out += "\\n"; continue;
      case '\r': out += "\\r"; continue;
      case '\t': out += "\\t"; continue;
      case '\b': out += "\\b"; continue;
      case '\f': out += "\\f"; continue;
      default: break;
    }
    if (c < 0x20 || (ascii && c >= 0x7F && c < 0x10000)) {
      if (c == 0x7F) {
        out += static_cast<char>(c);
        continue;
      }
      out += "\\u";
      append_hex(c, 4, out);
    } else if (ascii && c >= 0x10000) {
      out += "\\u";
      append_hex(0xD800 + ((c - 0x10000) >> 10), 4, out);
      out += "\\u";
      append_hex(0xDC00 + ((c - 0x10000) & 0x3FF), 4, out);
    } else {
      out += text.substr(begin, pos - begin);
    }
  }
  out += '"';
}

void append_string_repr(std::string_view text, std::string& out) {
  const bool double_quotes =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = double_quotes ? '"' : '\'';
  out += quote;
  for (size_t pos = 0; pos < text.size();) {
    const size_t begin = pos;
    const char32_t c = next_code_point(text, pos);
    if (c == '\\' || c == static_cast<char32_t>(quote)) {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c)) {
      out += text.substr(begin, pos - begin);
    } else if (c < 0x100) {
      out += "\\x";
      append_hex(c, 2, out);
    } else {
      out += c < 0x10000 ? "\\u" : "\\U";
      append_hex(c, c < 0x10000 ? 4 : 8, out);
    }
  }
  out += quote;
}

void json_line(const JsonStyle& style, int depth, std::string& out) {
  if (style.indent < 0) return;
  out += '\n';
  out.append(static_cast<size_t>(style.indent) * static_cast<size_t>(depth), ' ');
}

Result<std::string> json_key(const Value& key) {
  if (key.is_string()) return key.as_string();
  if (key.kind() == Kind::kBool) return std::string(key.as_int() != 0 ? "true" : "false");
  if (key.is_none()) return std::string("null");
  if (key.is_integral()) return std::to_string(key.as_int());
  if (key.is_number()) return float_text(key.as_double());
  return template_error("a dict key that JSON cannot hold");
}

Result<void> append_json_dict(const DictData& dict, const JsonStyle& style, std::string& out,
                              int depth) {
  std::vector<std::pair<std::string, Value>> items;
  for (const auto& [key, value] : dict.items) {
    NIBBLE_TRY(std::string name, json_key(key));
    items.emplace_back(std::move(name), value);
  }
  if (style.sort_keys) {
    std::stable_sort(items.begin(), items.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  out += '{';
  bool first = true;
  for (const auto& [key, value] : items) {
    if (!first) out += style.item_separator;
    first = false;
    json_line(style, depth + 1, out);
    append_json_string(key, style.ascii, out);
    out += style.key_separator;
    NIBBLE_TRY(append_json(value, style, out, depth + 1));
  }
  if (!first) json_line(style, depth, out);
  out += '}';
  return {};
}

}  // namespace

Error template_error(std::string message) {
  return Error(Code::kInvalidArgument, std::move(message));
}

std::string DictData::key_text(const Value& key) {
  switch (key.kind()) {
    case Kind::kString: return std::string(1, 's').append(key.as_string());
    case Kind::kBool:
    case Kind::kInt: return cat('i', key.as_int());
    case Kind::kFloat: return cat('f', float_text(key.as_double()));
    case Kind::kNone: return "n";
    default: return {};
  }
}

const Value* DictData::find(std::string_view key) const {
  const auto it = index.find(std::string(1, 's').append(key));
  return it == index.end() ? nullptr : &items[it->second].second;
}

const Value* DictData::find(const Value& key) const {
  const auto it = index.find(key_text(key));
  return it == index.end() ? nullptr : &items[it->second].second;
}

void DictData::set(const Value& key, const Value& value) {
  const auto [it, is_new] = index.emplace(key_text(key), items.size());
  if (is_new) {
    items.emplace_back(key, value);
  } else {
    items[it->second].second = value;
  }
}

Value from_json(const OrderedJson& json, Heap& heap) {
  switch (json.type()) {
    case OrderedJson::value_t::null: return Value::none();
    case OrderedJson::value_t::boolean: return Value::boolean(json.get<bool>());
    case OrderedJson::value_t::number_integer: return Value::integer(json.get<int64_t>());
    case OrderedJson::value_t::number_unsigned: {
      const auto number = json.get<uint64_t>();
      if (number > static_cast<uint64_t>(INT64_MAX)) return Value::number(json.get<double>());
      return Value::integer(static_cast<int64_t>(number));
    }
    case OrderedJson::value_t::number_float: return Value::number(json.get<double>());
    case OrderedJson::value_t::string:
      return heap.string(to_valid_utf8(json.get_ref<const std::string&>()));
    case OrderedJson::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const OrderedJson& item : json) items.push_back(from_json(item, heap));
      return heap.list(std::move(items));
    }
    case OrderedJson::value_t::object: {
      DictData& dict = heap.dict();
      for (const auto& [key, value] : json.items()) {
        dict.set(heap.string(to_valid_utf8(key)), from_json(value, heap));
      }
      return Value::dict(&dict);
    }
    default: return {};
  }
}

std::string_view type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return "Undefined";
    case Kind::kNone: return "NoneType";
    case Kind::kBool: return "bool";
    case Kind::kInt: return "int";
    case Kind::kFloat: return "float";
    case Kind::kString: return "str";
    case Kind::kList: return "list";
    case Kind::kTuple: return "tuple";
    case Kind::kDict: return "dict";
    case Kind::kNamespace: return "Namespace";
    case Kind::kCallable: return "function";
    case Kind::kLoop: return "LoopContext";
  }
  return "value";
}

bool truthy(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return false;
    case Kind::kBool:
    case Kind::kInt: return value.as_int() != 0;
    case Kind::kFloat: return value.as_double() != 0;
    case Kind::kString: return !value.as_string().empty();
    case Kind::kList:
    case Kind::kTuple: return !value.as_list().items.empty();
    case Kind::kDict: return !value.as_dict().items.empty();
    case Kind::kNamespace:
    case Kind::kCallable:
    case Kind::kLoop: return true;
  }
  return false;
}

namespace {

bool equal_parts(const Value& a, const Value& b, int depth, int& steps) {
  if (depth > kMaxPrintDepth || --steps < 0) return false;
  if (a.is_integral() && b.is_integral()) return a.as_int() == b.as_int();
  if (a.is_number() && b.is_number()) return a.as_double() == b.as_double();
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return true;
    case Kind::kString: return a.as_string() == b.as_string();
    case Kind::kList:
    case Kind::kTuple: {
      const auto& left = a.as_list().items;
      const auto& right = b.as_list().items;
      if (left.size() != right.size()) return false;
      for (size_t i = 0; i < left.size(); ++i) {
        if (!equal_parts(left[i], right[i], depth + 1, steps)) return false;
      }
      return true;
    }
    case Kind::kDict: {
      if (a.as_dict().items.size() != b.as_dict().items.size()) return false;
      for (const auto& [key, value] : a.as_dict().items) {
        const Value* other = b.as_dict().find(key);
        if (other == nullptr || !equal_parts(value, *other, depth + 1, steps)) return false;
      }
      return true;
    }
    default: return a.identity() == b.identity();
  }
}

Result<int> compare_parts(const Value& a, const Value& b, int depth, int& steps) {
  if (--steps < 0) return template_error("values too large to order");
  if (a.is_integral() && b.is_integral()) {
    return a.as_int() < b.as_int() ? -1 : a.as_int() > b.as_int() ? 1 : 0;
  }
  if (a.is_number() && b.is_number()) {
    return a.as_double() < b.as_double() ? -1 : a.as_double() > b.as_double() ? 1 : 0;
  }
  if (a.is_string() && b.is_string()) {
    const int order = a.as_string().compare(b.as_string());
    return order < 0 ? -1 : order > 0 ? 1 : 0;
  }
  if (a.is_sequence() && a.kind() == b.kind() && depth < kMaxPrintDepth) {
    const auto& left = a.as_list().items;
    const auto& right = b.as_list().items;
    for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
      NIBBLE_TRY(const int order, compare_parts(left[i], right[i], depth + 1, steps));
      if (order != 0) return order;
    }
    return left.size() < right.size() ? -1 : left.size() > right.size() ? 1 : 0;
  }
  return template_error(cat("cannot order '", type_name(a), "' and '", type_name(b), "'"));
}

}  // namespace

bool equal(const Value& a, const Value& b) {
  int steps = kMaxSteps;
  return equal_parts(a, b, 0, steps);
}

Result<int> compare(const Value& a, const Value& b) {
  int steps = kMaxSteps;
  return compare_parts(a, b, 0, steps);
}

std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), number, std::chars_format::scientific).ptr;
  const std::string shortest(buffer, end);
  const size_t e = shortest.find('e');
  const int exponent = std::atoi(shortest.c_str() + e + 1);
  if (exponent >= -4 && exponent < 16) {
    const auto fixed =
        std::to_chars(buffer, buffer + sizeof(buffer), number, std::chars_format::fixed).ptr;
    std::string text(buffer, fixed);
    if (text.find('.') == std::string::npos) text += ".0";
    return text;
  }
  return shortest;  // to_chars writes the exponent as Python does: a sign and two digits or more
}

void append_text(const Value& value, std::string& out) {
  if (value.is_string()) {
    out += value.as_string();
  } else if (!value.is_undefined()) {
    append_repr(value, out);
  }
}

void append_repr(const Value& value, std::string& out, int depth) {
  if (out.size() > kMaxTextBytes) return;
  if (depth > kMaxPrintDepth) {
    out += "...";
    return;
  }
  switch (value.kind()) {
    case Kind::kUndefined: out += "Undefined"; return;
    case Kind::kNone: out += "None"; return;
    case Kind::kBool: out += value.as_int() != 0 ? "True" : "False"; return;
    case Kind::kInt: out += std::to_string(value.as_int()); return;
    case Kind::kFloat: out += float_text(value.as_double()); return;
    case Kind::kString: append_string_repr(value.as_string(), out); return;
    case Kind::kList:
    case Kind::kTuple: {
      const bool tuple = value.kind() == Kind::kTuple;
      const auto& items = value.as_list().items;
      out += tuple ? '(' : '[';
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) out += ", ";
        append_repr(items[i], out, depth + 1);
      }
      if (tuple && items.size() == 1) out += ',';
      out += tuple ? ')' : ']';
      return;
    }
    case Kind::kDict: {
      out += '{';
      bool first = true;
      for (const auto& [key, item] : value.as_dict().items) {
        if (!first) out += ", ";
        first = false;
        append_repr(key, out, depth + 1);
        out += ": ";
        append_repr(item, out, depth + 1);
      }
      out += '}';
      return;
    }
    case Kind::kNamespace: out += "<Namespace>"; return;
    case Kind::kCallable: out += cat("<function '", value.as_callable().name, "'>"); return;
    case Kind::kLoop: out += "<LoopContext>"; return;
  }
}

Result<void> append_json(const Value& value, const JsonStyle& style, std::string& out, int depth) {
  if (depth > kMaxPrintDepth || out.size() > kMaxTextBytes) {
    return template_error("tojson: nested too deep or too long");
  }
  switch (value.kind()) {
    case Kind::kNone: out += "null"; return {};
    case Kind::kBool: out += value.as_int() != 0 ? "true" : "false"; return {};
    case Kind::kInt: out += std::to_string(value.as_int()); return {};
    case Kind::kFloat: {
      const double number = value.as_double();
      if (std::isfinite(number)) {
        out += float_text(number);
      } else {
        out += std::isnan(number) ? "NaN" : number < 0 ? "-Infinity" : "Infinity";
      }
      return {};
    }
    case Kind::kString: append_json_string(value.as_string(), style.ascii, out); return {};
    case Kind::kList:
    case Kind::kTuple: {
      const auto& items = value.as_list().items;
      out += '[';
      for (size_t i = 0; i < items.size(); ++i) {
        if (i > 0) out += style.item_separator;
        json_line(style, depth + 1, out);
        NIBBLE_TRY(append_json(items[i], style, out, depth + 1));
      }
      if (!items.empty()) json_line(style, depth, out);
      out += ']';
      return {};
    }
    case Kind::kDict: return append_json_dict(value.as_dict(), style, out, depth);
    default:
      return template_error(
          cat("object of type '", type_name(value), "' is not JSON serializable"));
  }
}

}  // namespace nibble::text::jinja
