// Filters: what may stand behind "|".
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "text/jinja_lexer.h"
#include "text/jinja_runtime.h"
#include "text/jinja_strings.h"
#include "text/unicode.h"

namespace nibble::text::jinja {
namespace {

using Filter = Result<Value> (*)(Runtime&, const Value&, const Arguments&);

Result<Value> filter_trim(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(const std::string text, runtime.text_of(input));
  const Value chars = arguments.get(0, "chars");
  if (chars.is_undefined() || chars.is_none()) {
    return runtime.text(std::string(strip_space(text, true, true)));
  }
  NIBBLE_TRY(const std::string_view listed, need_string(chars, "trim"));
  NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(listed.size() + text.size()) / 16));
  return runtime.text(std::string(strip_chars(text, listed, true, true)));
}

// As transformers sets it up: json.dumps with ensure_ascii off.
Result<Value> filter_tojson(Runtime& runtime, const Value& input, const Arguments& arguments) {
  JsonStyle style;
  style.ascii = truthy(arguments.get(0, "ensure_ascii"));
  const Value indent = arguments.get(1, "indent");
  if (indent.is_integral()) {
    style.indent = static_cast<int>(std::clamp<int64_t>(indent.as_int(), 0, 64));
    style.item_separator = ",";
  } else if (!indent.is_undefined() && !indent.is_none()) {
    return Error(Code::kUnsupported, "tojson with an indent that is no number");
  }
  const Value separators = arguments.get(2, "separators");
  if (separators.is_sequence() && separators.as_list().items.size() == 2) {
    NIBBLE_TRY(style.item_separator, need_string(separators.as_list().items[0], "separators"));
    NIBBLE_TRY(style.key_separator, need_string(separators.as_list().items[1], "separators"));
  }
  style.sort_keys = truthy(arguments.get(3, "sort_keys"));
  std::string out;
  NIBBLE_TRY(append_json(input, style, out));
  NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(out.size()) / 64));
  return runtime.text(std::move(out));
}

Result<Value> filter_length(Runtime&, const Value& input, const Arguments&) {
  switch (input.kind()) {
    case Kind::kUndefined: return Value::integer(0);
    case Kind::kString:
      return Value::integer(static_cast<int64_t>(count_code_points(input.as_string())));
    case Kind::kList:
    case Kind::kTuple: return Value::integer(static_cast<int64_t>(input.as_list().items.size()));
    case Kind::kDict: return Value::integer(static_cast<int64_t>(input.as_dict().items.size()));
    default: return template_error(cat("object of type '", type_name(input), "' has no length"));
  }
}

template <std::string (*change)(std::string_view)>
Result<Value> filter_text(Runtime& runtime, const Value& input, const Arguments&) {
  NIBBLE_TRY(const std::string text, runtime.text_of(input));
  return runtime.text(change(text));
}

Result<Value> filter_string(Runtime& runtime, const Value& input, const Arguments&) {
  if (input.is_string()) return input;
  NIBBLE_TRY(std::string text, runtime.text_of(input));
  return runtime.text(std::move(text));
}

// item.a.b or item.0, for attribute arguments.
Result<Value> attribute_of(Runtime& runtime, const Value& item, const Value& attribute) {
  if (attribute.is_integral()) return get_item(runtime, item, attribute);
  NIBBLE_TRY(std::string_view path, need_string(attribute, "attribute"));
  Value now = item;
  while (true) {
    const size_t dot = path.find('.');
    const std::string part(path.substr(0, dot));
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    Value key;
    if (number) {
      key = Value::integer(std::strtoll(part.c_str(), nullptr, 10));
    } else {
      NIBBLE_TRY(key, runtime.text(part));
    }
    NIBBLE_TRY(now, get_item(runtime, now, key));
    if (dot == std::string_view::npos) return now;
    path.remove_prefix(dot + 1);
  }
}

Result<Value> filter_join(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(input));
  std::string separator;
  if (arguments.has(0, "d")) {
    NIBBLE_TRY(separator, runtime.text_of(arguments.get(0, "d")));
  }
  const bool by_attribute = arguments.has(1, "attribute");
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) {
      runtime.heap.charge(static_cast<int64_t>(separator.size()));
      out += separator;
    }
    Value item = items[i];
    if (by_attribute) {
      NIBBLE_TRY(item, attribute_of(runtime, item, arguments.get(1, "attribute")));
    }
    NIBBLE_TRY(const std::string text, runtime.text_of(item));
    out += text;
  }
  return runtime.text(std::move(out));
}

Result<Value> filter_default(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const bool falsy_too = truthy(arguments.get(1, "boolean"));
  if (!input.is_undefined() && (!falsy_too || truthy(input))) return input;
  if (!arguments.has(0, "default_value")) return runtime.text("");
  return arguments.get(0, "default_value");
}

Result<Value> filter_list(Runtime& runtime, const Value& input, const Arguments&) {
  NIBBLE_TRY(std::vector<Value> items, runtime.items_of(input));
  return runtime.heap.list(std::move(items));
}

Result<Value> filter_items(Runtime& runtime, const Value& input, const Arguments&) {
  std::vector<Value> pairs;
  if (!input.is_undefined()) {
    if (!input.is_dict()) return template_error("items: can only get pairs of a dict");
    for (const auto& [key, value] : input.as_dict().items) {
      NIBBLE_TRY(runtime.spend(1));
      pairs.push_back(runtime.heap.list({key, value}, Kind::kTuple));
    }
  }
  return runtime.heap.list(std::move(pairs));
}

Result<Value> filter_first(Runtime& runtime, const Value& input, const Arguments&) {
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(input));
  if (items.empty()) return runtime.heap.undefined("no first item, sequence was empty");
  return items.front();
}

Result<Value> filter_last(Runtime& runtime, const Value& input, const Arguments&) {
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(input));
  if (items.empty()) return runtime.heap.undefined("no last item, sequence was empty");
  return items.back();
}

Result<Value> filter_replace(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(std::string text, runtime.text_of(input));
  NIBBLE_TRY(const Value self, runtime.text(std::move(text)));
  Arguments changed = arguments;
  for (Value& argument : changed.positional) {
    if (argument.is_integral() || argument.is_string()) continue;
    NIBBLE_TRY(std::string spelled, runtime.text_of(argument));
    NIBBLE_TRY(argument, runtime.text(std::move(spelled)));
  }
  return call_method(runtime, self, "replace", changed);
}

Result<Value> filter_map(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(input));
  std::vector<Value> out;
  const bool by_attribute = arguments.positional.empty() && arguments.has(0, "attribute");
  std::string_view filter;
  Arguments rest;
  if (!by_attribute) {
    NIBBLE_TRY(filter, need_string(arguments.get(0, ""), "map"));
    rest.positional.assign(arguments.positional.begin() + 1, arguments.positional.end());
    rest.named = arguments.named;
  }
  for (const Value& item : items) {
    NIBBLE_TRY(runtime.spend(1));
    Value mapped;
    if (by_attribute) {
      NIBBLE_TRY(mapped, attribute_of(runtime, item, arguments.get(0, "attribute")));
      if (mapped.is_undefined() && arguments.has(9, "default")) {
        mapped = arguments.get(9, "default");
      }
    } else {
      NIBBLE_TRY(mapped, apply_filter(runtime, filter, item, rest));
    }
    out.push_back(mapped);
  }
  return runtime.heap.list(std::move(out));
}

// select, reject, selectattr, rejectattr.
Result<Value> keep_if(Runtime& runtime, const Value& input, const Arguments& arguments, bool keep,
                      bool by_attribute) {
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(input));
  const size_t test_at = by_attribute ? 1 : 0;
  if (by_attribute && arguments.positional.empty()) {
    return template_error("selectattr and rejectattr need an attribute");
  }
  std::string_view test;
  Arguments rest;
  if (arguments.positional.size() > test_at) {
    NIBBLE_TRY(test, need_string(arguments.positional[test_at], "name of a test"));
    rest.positional.assign(arguments.positional.begin() + static_cast<std::ptrdiff_t>(test_at) + 1,
                           arguments.positional.end());
  }
  std::vector<Value> out;
  for (const Value& item : items) {
    NIBBLE_TRY(runtime.spend(1));
    Value subject = item;
    if (by_attribute) {
      NIBBLE_TRY(subject, attribute_of(runtime, item, arguments.positional[0]));
    }
    bool holds = truthy(subject);
    if (!test.empty()) {
      NIBBLE_TRY(holds, apply_test(runtime, test, subject, rest));
    }
    if (holds == keep) out.push_back(item);
  }
  return runtime.heap.list(std::move(out));
}
template <bool keep, bool by_attribute>
Result<Value> filter_keep(Runtime& runtime, const Value& input, const Arguments& arguments) {
  return keep_if(runtime, input, arguments, keep, by_attribute);
}

Result<Value> filter_int(Runtime& runtime, const Value& input, const Arguments& arguments) {
  const Value fallback =
      arguments.has(0, "default") ? arguments.get(0, "default") : Value::integer(0);
  if (input.is_integral()) return Value::integer(input.as_int());
  double number = 0;
  if (input.is_number()) {
    number = input.as_double();
  } else {
    NIBBLE_TRY(const std::string text, runtime.text_of(input));
    const std::string trimmed(strip_space(text, true, true));
    int64_t whole = 0;
    const char* begin = trimmed.c_str() + (trimmed.starts_with('+') ? 1 : 0);
    const auto parsed = std::from_chars(begin, trimmed.c_str() + trimmed.size(), whole);
    if (parsed.ec == std::errc() && *parsed.ptr == '\0') return Value::integer(whole);
    char* end = nullptr;
    number = std::strtod(trimmed.c_str(), &end);
    if (trimmed.empty() || *end != '\0') return fallback;
  }
  if (!std::isfinite(number) || std::abs(number) >= 9.2e18) return fallback;
  return Value::integer(static_cast<int64_t>(number));
}

Result<Value> filter_float(Runtime& runtime, const Value& input, const Arguments& arguments) {
  if (input.is_number()) return Value::number(input.as_double());
  NIBBLE_TRY(const std::string text, runtime.text_of(input));
  const std::string trimmed(strip_space(text, true, true));
  char* end = nullptr;
  const double number = std::strtod(trimmed.c_str(), &end);
  if (!trimmed.empty() && *end == '\0') return Value::number(number);
  return arguments.has(0, "default") ? arguments.get(0, "default") : Value::number(0.0);
}

Result<Value> filter_abs(Runtime&, const Value& input, const Arguments&) {
  if (input.is_integral() && input.as_int() != INT64_MIN) {
    return Value::integer(std::abs(input.as_int()));
  }
  if (input.kind() == Kind::kFloat) return Value::number(std::abs(input.as_double()));
  return template_error("abs: not a number");
}

Result<Value> filter_reverse(Runtime& runtime, const Value& input, const Arguments&) {
  NIBBLE_TRY(std::vector<Value> items, runtime.items_of(input));
  std::reverse(items.begin(), items.end());
  if (!input.is_string()) return runtime.heap.list(std::move(items));
  std::string text;
  for (const Value& item : items) text += item.as_string();
  return runtime.text(std::move(text));
}

// What sort, unique, min and max compare: an attribute, and strings without case.
Result<Value> sort_key(Runtime& runtime, const Value& item, const Value& attribute,
                       bool case_sensitive) {
  Value key = item;
  if (!attribute.is_undefined() && !attribute.is_none()) {
    NIBBLE_TRY(key, attribute_of(runtime, item, attribute));
  }
  if (key.is_string() && !case_sensitive) return runtime.text(to_lower(key.as_string()));
  return key;
}

Result<std::vector<std::pair<Value, Value>>> keyed(Runtime& runtime, std::vector<Value> items,
                                                   const Value& attribute, bool case_sensitive) {
  std::vector<std::pair<Value, Value>> out;
  for (const Value& item : items) {
    NIBBLE_TRY(const Value key, sort_key(runtime, item, attribute, case_sensitive));
    const bool orderable = key.is_number() ? !std::isnan(key.as_double()) : key.is_string();
    if (!orderable || (!out.empty() && out[0].first.is_number() != key.is_number())) {
      return Error(Code::kUnsupported, "ordering values that are not all numbers or all strings");
    }
    out.emplace_back(key, item);
  }
  return out;
}

bool key_less(const std::pair<Value, Value>& a, const std::pair<Value, Value>& b) {
  if (a.first.is_string()) return a.first.as_string() < b.first.as_string();
  if (a.first.is_integral() && b.first.is_integral()) return a.first.as_int() < b.first.as_int();
  return a.first.as_double() < b.first.as_double();
}

Result<Value> filter_sort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(std::vector<Value> items, runtime.items_of(input));
  NIBBLE_TRY(auto pairs, keyed(runtime, std::move(items), arguments.get(2, "attribute"),
                               truthy(arguments.get(1, "case_sensitive"))));
  NIBBLE_TRY(runtime.spend(static_cast<int64_t>(pairs.size()) * 8));
  if (truthy(arguments.get(0, "reverse"))) {
    std::stable_sort(pairs.begin(), pairs.end(),
                     [](const auto& a, const auto& b) { return key_less(b, a); });
  } else {
    std::stable_sort(pairs.begin(), pairs.end(), key_less);
  }
  std::vector<Value> out;
  for (const auto& [key, item] : pairs) out.push_back(item);
  return runtime.heap.list(std::move(out));
}

Result<Value> filter_dictsort(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(const Value pairs, filter_items(runtime, input, {}));
  Arguments by_key;
  by_key.named.emplace_back("attribute", Value::integer(0));
  by_key.named.emplace_back("case_sensitive", arguments.get(0, "case_sensitive"));
  by_key.named.emplace_back("reverse", arguments.get(2, "reverse"));
  if (arguments.has(1, "by")) {
    NIBBLE_TRY(const std::string_view by, need_string(arguments.get(1, "by"), "dictsort"));
    if (by == "value") by_key.named[0].second = Value::integer(1);
  }
  return filter_sort(runtime, pairs, by_key);
}

Result<Value> filter_unique(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(input));
  DictData& seen = runtime.heap.dict();
  std::vector<Value> out;
  for (const Value& item : items) {
    NIBBLE_TRY(const Value key, sort_key(runtime, item, arguments.get(1, "attribute"),
                                         truthy(arguments.get(0, "case_sensitive"))));
    if (DictData::key_text(key).empty()) return template_error("unique: unhashable values");
    if (seen.find(key) != nullptr) continue;
    runtime.heap.charge(96);
    seen.set(key, item);
    out.push_back(item);
  }
  return runtime.heap.list(std::move(out));
}

template <bool largest>
Result<Value> filter_extreme(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(std::vector<Value> items, runtime.items_of(input));
  if (items.empty()) return runtime.heap.undefined("no item, sequence was empty");
  NIBBLE_TRY(const auto pairs, keyed(runtime, std::move(items), arguments.get(1, "attribute"),
                                     truthy(arguments.get(0, "case_sensitive"))));
  const auto best = largest ? std::max_element(pairs.begin(), pairs.end(), key_less)
                            : std::min_element(pairs.begin(), pairs.end(), key_less);
  return best->second;
}

Result<Value> filter_indent(Runtime& runtime, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(std::string text, runtime.text_of(input));
  std::string indention = "    ";
  const Value width = arguments.get(0, "width");
  if (width.is_string()) {
    indention = width.as_string();
  } else if (!width.is_undefined()) {
    NIBBLE_TRY(const int64_t columns, need_int(width, "indent"));
    indention.assign(static_cast<size_t>(std::clamp<int64_t>(columns, 0, 256)), ' ');
  }
  const bool first = truthy(arguments.get(1, "first"));
  const bool blank = truthy(arguments.get(2, "blank"));
  text += '\n';
  const std::vector<std::string_view> lines = split_lines(text);
  if (!runtime.heap.afford(static_cast<int64_t>(lines.size() * (indention.size() + 1)))) {
    return Error(Code::kResourceExhausted, "the template makes too much data");
  }
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i == 0 ? first : blank || !lines[i].empty()) out += indention;
    out += lines[i];
  }
  return runtime.text(std::move(out));
}

Result<Value> filter_safe(Runtime&, const Value& input, const Arguments&) { return input; }

struct Entry {
  std::string_view name;
  Filter filter;
};
constexpr Entry kFilters[] = {
    {"trim", filter_trim},
    {"tojson", filter_tojson},
    {"length", filter_length},
    {"count", filter_length},
    {"upper", filter_text<to_upper>},
    {"lower", filter_text<to_lower>},
    {"capitalize", filter_text<to_capitalized>},
    {"title", filter_text<to_title_words>},
    {"string", filter_string},
    {"join", filter_join},
    {"default", filter_default},
    {"d", filter_default},
    {"list", filter_list},
    {"items", filter_items},
    {"first", filter_first},
    {"last", filter_last},
    {"replace", filter_replace},
    {"map", filter_map},
    {"select", filter_keep<true, false>},
    {"reject", filter_keep<false, false>},
    {"selectattr", filter_keep<true, true>},
    {"rejectattr", filter_keep<false, true>},
    {"int", filter_int},
    {"float", filter_float},
    {"abs", filter_abs},
    {"reverse", filter_reverse},
    {"sort", filter_sort},
    {"dictsort", filter_dictsort},
    {"unique", filter_unique},
    {"min", filter_extreme<false>},
    {"max", filter_extreme<true>},
    {"indent", filter_indent},
    {"safe", filter_safe},
};

}  // namespace

Result<Value> apply_filter(Runtime& runtime, std::string_view name, const Value& input,
                           const Arguments& arguments) {
  NIBBLE_TRY(runtime.spend(1));
  for (const Entry& entry : kFilters) {
    if (entry.name == name) return entry.filter(runtime, input, arguments);
  }
  return Error(Code::kUnsupported, cat("filter '", name, "'"));
}

}  // namespace nibble::text::jinja
