// Methods of strings, lists, dicts and loops, and the global functions.
#include <algorithm>
#include <array>
#include <ctime>

#include "text/jinja_lexer.h"
#include "text/jinja_runtime.h"
#include "text/jinja_strings.h"
#include "text/unicode.h"

namespace nibble::text::jinja {
namespace {

// All methods that Python has, so that `value.name` finds the method where Python would.
constexpr std::array<std::string_view, 47> kStringMethods = {
    "capitalize",   "casefold",    "center",    "count",      "encode",       "endswith",
    "expandtabs",   "find",        "format",    "format_map", "index",        "isalnum",
    "isalpha",      "isascii",     "isdecimal", "isdigit",    "isidentifier", "islower",
    "isnumeric",    "isprintable", "isspace",   "istitle",    "isupper",      "join",
    "ljust",        "lower",       "lstrip",    "maketrans",  "partition",    "removeprefix",
    "removesuffix", "replace",     "rfind",     "rindex",     "rjust",        "rpartition",
    "rsplit",       "rstrip",      "split",     "splitlines", "startswith",   "strip",
    "swapcase",     "title",       "translate", "upper",      "zfill"};
constexpr std::array<std::string_view, 11> kDictMethods = {
    "clear", "copy",    "fromkeys",   "get",    "items", "keys",
    "pop",   "popitem", "setdefault", "update", "values"};
constexpr std::array<std::string_view, 11> kListMethods = {"append", "clear",   "copy",   "count",
                                                           "extend", "index",   "insert", "pop",
                                                           "remove", "reverse", "sort"};

template <size_t N>
bool listed(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Error unsupported(const Value& self, std::string_view name) {
  return Error(Code::kUnsupported, cat("method '", name, "' of '", type_name(self), "'"));
}

Result<Value> list_of(Runtime& runtime, const std::vector<std::string_view>& parts) {
  std::vector<Value> items;
  for (const std::string_view part : parts) {
    NIBBLE_TRY(const Value item, runtime.text(std::string(part)));
    items.push_back(item);
  }
  return runtime.heap.list(std::move(items));
}

// split and rsplit.
Result<Value> split(Runtime& runtime, std::string_view text, const Arguments& arguments,
                    bool from_right) {
  const Value separator = arguments.get(0, "sep");
  int64_t limit = -1;
  if (arguments.has(1, "maxsplit")) {
    NIBBLE_TRY(limit, need_int(arguments.get(1, "maxsplit"), "maxsplit"));
  }
  std::vector<std::string_view> parts;
  if (separator.is_undefined() || separator.is_none()) {
    if (from_right && limit >= 0) {
      return Error(Code::kUnsupported, "rsplit by whitespace with a limit");
    }
    text = strip_space(text, true, false);
    while (!text.empty()) {
      if (limit == 0) {
        parts.push_back(text);
        break;
      }
      --limit;
      size_t end = 0;
      size_t next = 0;
      while (end < text.size() && !python_space(next_code_point(text, next))) end = next;
      parts.push_back(text.substr(0, end));
      text = strip_space(text.substr(end), true, false);
    }
    return list_of(runtime, parts);
  }
  NIBBLE_TRY(const std::string_view by, need_string(separator, "split"));
  if (by.empty()) return template_error("split: empty separator");
  while (limit != 0) {
    const size_t at = from_right ? text.rfind(by) : text.find(by);
    if (at == std::string_view::npos) break;
    if (from_right) {
      parts.push_back(text.substr(at + by.size()));
      text = text.substr(0, at);
    } else {
      parts.push_back(text.substr(0, at));
      text = text.substr(at + by.size());
    }
    --limit;
  }
  parts.push_back(text);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return list_of(runtime, parts);
}

Result<Value> starts_or_ends(std::string_view text, const Arguments& arguments, bool start) {
  if (arguments.positional.size() > 1) {
    return Error(Code::kUnsupported, "startswith and endswith with positions");
  }
  const auto matches = [&](std::string_view what) {
    return start ? text.starts_with(what) : text.ends_with(what);
  };
  const Value what = arguments.get(0, "prefix");
  if (what.kind() == Kind::kTuple) {
    for (const Value& item : what.as_list().items) {
      NIBBLE_TRY(const std::string_view part, need_string(item, "startswith"));
      if (matches(part)) return Value::boolean(true);
    }
    return Value::boolean(false);
  }
  NIBBLE_TRY(const std::string_view part, need_string(what, start ? "startswith" : "endswith"));
  return Value::boolean(matches(part));
}

bool all_characters(std::string_view text, bool (*holds)(char32_t)) {
  for (size_t pos = 0; pos < text.size();) {
    if (!holds(next_code_point(text, pos))) return false;
  }
  return !text.empty();
}

// isupper and islower: there are cased letters, and all are of that case.
bool has_case(std::string_view text, bool upper) {
  bool some = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = next_code_point(text, pos);
    if (upper ? is_lower(c) : is_upper(c)) return false;
    some = some || (upper ? is_upper(c) : is_lower(c));
  }
  return some;
}

Result<Value> string_test(std::string_view text, std::string_view name) {
  if (name == "isspace") return Value::boolean(all_characters(text, python_space));
  if (name == "isalpha") return Value::boolean(all_characters(text, is_letter));
  if (name == "isdigit" || name == "isnumeric" || name == "isdecimal") {
    return Value::boolean(all_characters(text, is_numeric));
  }
  if (name == "isalnum") {
    return Value::boolean(
        all_characters(text, [](char32_t c) { return is_letter(c) || is_numeric(c); }));
  }
  if (name == "isupper") return Value::boolean(has_case(text, true));
  if (name == "islower") return Value::boolean(has_case(text, false));
  return Error(Code::kUnsupported, cat("method '", name, "' of 'str'"));
}

// find, rfind, index, count: positions are in characters.
Result<Value> string_search(std::string_view text, std::string_view name,
                            const Arguments& arguments) {
  if (arguments.positional.size() != 1)
    return Error(Code::kUnsupported, cat(name, " with positions"));
  NIBBLE_TRY(const std::string_view what, need_string(arguments.positional[0], name));
  if (name == "count") {
    if (what.empty()) return Value::integer(static_cast<int64_t>(count_code_points(text)) + 1);
    int64_t count = 0;
    for (size_t at = text.find(what); at != std::string_view::npos;
         at = text.find(what, at + what.size())) {
      ++count;
    }
    return Value::integer(count);
  }
  const size_t at = name[0] == 'r' ? text.rfind(what) : text.find(what);
  if (at == std::string_view::npos) {
    if (name == "find" || name == "rfind") return Value::integer(-1);
    return template_error("substring not found");
  }
  return Value::integer(static_cast<int64_t>(count_code_points(text.substr(0, at))));
}

Result<Value> string_replace(Runtime& runtime, std::string_view text, const Arguments& arguments) {
  NIBBLE_TRY(const std::string_view from, need_string(arguments.get(0, "old"), "replace"));
  NIBBLE_TRY(const std::string_view to, need_string(arguments.get(1, "new"), "replace"));
  int64_t limit = -1;
  if (arguments.has(2, "count")) {
    NIBBLE_TRY(limit, need_int(arguments.get(2, "count"), "replace count"));
  }
  // The longest result that can come: each byte gives way to `to`.
  const auto most = static_cast<int64_t>((text.size() + 1) / std::max<size_t>(from.size(), 1) + 1) *
                    static_cast<int64_t>(to.size());
  if (!runtime.heap.afford(most)) {
    return Error(Code::kResourceExhausted, "the template makes too much data");
  }
  NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(text.size()) / 64));
  return runtime.text(replace_text(text, from, to, limit));
}

Result<Value> string_method(Runtime& runtime, const Value& self, std::string_view name,
                            const Arguments& arguments) {
  const std::string_view text = self.as_string();
  NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(text.size()) / 64));
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const bool left = name != "rstrip";
    const bool right = name != "lstrip";
    const Value chars = arguments.get(0, "chars");
    if (chars.is_undefined() || chars.is_none()) {
      return runtime.text(std::string(strip_space(text, left, right)));
    }
    NIBBLE_TRY(const std::string_view listed_chars, need_string(chars, name));
    NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(listed_chars.size())));
    return runtime.text(std::string(strip_chars(text, listed_chars, left, right)));
  }
  if (name == "split" || name == "rsplit") return split(runtime, text, arguments, name == "rsplit");
  if (name == "startswith" || name == "endswith") {
    return starts_or_ends(text, arguments, name == "startswith");
  }
  if (name == "replace") return string_replace(runtime, text, arguments);
  if (name == "upper") return runtime.text(to_upper(text));
  if (name == "lower" || name == "casefold") return runtime.text(to_lower(text));
  if (name == "title") return runtime.text(to_title(text));
  if (name == "capitalize") return runtime.text(to_capitalized(text));
  if (name == "splitlines") return list_of(runtime, split_lines(text));
  if (name == "removeprefix" || name == "removesuffix") {
    NIBBLE_TRY(const std::string_view part, need_string(arguments.get(0, ""), name));
    std::string_view rest = text;
    if (name == "removeprefix" && rest.starts_with(part)) rest.remove_prefix(part.size());
    if (name == "removesuffix" && rest.ends_with(part)) rest.remove_suffix(part.size());
    return runtime.text(std::string(rest));
  }
  if (name == "join") {
    Arguments joined;
    joined.positional.push_back(self);
    return apply_filter(runtime, "join", arguments.get(0, ""), joined);
  }
  if (name == "find" || name == "rfind" || name == "index" || name == "count") {
    return string_search(text, name, arguments);
  }
  return string_test(text, name);
}

Result<Value> dict_method(Runtime& runtime, const Value& self, std::string_view name,
                          const Arguments& arguments) {
  const DictData& dict = self.as_dict();
  if (name == "get") {
    if (const Value* found = dict.find(arguments.get(0, "key"))) return *found;
    const Value fallback = arguments.get(1, "default");
    return arguments.has(1, "default") ? fallback : Value::none();
  }
  if (name == "items") return apply_filter(runtime, "items", self, {});
  if (name == "keys") return apply_filter(runtime, "list", self, {});
  if (name == "values") {
    std::vector<Value> values;
    for (const auto& [key, value] : dict.items) values.push_back(value);
    NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(values.size())));
    return runtime.heap.list(std::move(values));
  }
  if (name == "copy") return self;  // nothing can change it
  return unsupported(self, name);
}

Result<Value> list_method(Runtime& runtime, const Value& self, std::string_view name,
                          const Arguments& arguments) {
  const auto& items = self.as_list().items;
  if (name == "copy") return self;
  if (name != "index" && name != "count") return unsupported(self, name);
  const Value what = arguments.get(0, "value");
  int64_t count = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    NIBBLE_TRY(runtime.spend(1));
    if (!equal(items[i], what)) continue;
    if (name == "index") return Value::integer(static_cast<int64_t>(i));
    ++count;
  }
  if (name == "index") return template_error("value is not in list");
  return Value::integer(count);
}

Result<Value> make_range(Runtime& runtime, const Arguments& arguments) {
  int64_t bounds[3] = {0, 0, 1};
  const size_t count = arguments.positional.size();
  if (count < 1 || count > 3) return template_error("range takes 1 to 3 arguments");
  for (size_t i = 0; i < count; ++i) {
    NIBBLE_TRY(bounds[i], need_int(arguments.positional[i], "range"));
  }
  if (count == 1) std::swap(bounds[0], bounds[1]);
  const int64_t step = bounds[2];
  if (step == 0) return template_error("range step cannot be zero");
  std::vector<Value> items;
  for (int64_t i = bounds[0]; step > 0 ? i < bounds[1] : i > bounds[1];) {
    NIBBLE_TRY(runtime.spend(1));
    items.push_back(Value::integer(i));
    if (items.size() > 1'000'000) {
      return Error(Code::kResourceExhausted, "range of more than a million numbers");
    }
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return runtime.heap.list(std::move(items));
}

Result<Value> make_dict(Runtime& runtime, const Arguments& arguments, Kind kind) {
  DictData& dict = runtime.heap.dict();
  for (const Value& from : arguments.positional) {
    if (!from.is_dict()) return template_error("dict: expected a dict and named values");
    for (const auto& [key, value] : from.as_dict().items) {
      NIBBLE_TRY(runtime.spend(1));
      runtime.heap.charge(96);
      dict.set(key, value);
    }
  }
  for (const auto& [name, value] : arguments.named) {
    NIBBLE_TRY(const Value key, runtime.text(name));
    dict.set(key, value);
  }
  return Value::dict(&dict, kind);
}

// The local time now, as the reference's strftime_now does.
Result<Value> strftime_now(Runtime& runtime, const Arguments& arguments) {
  NIBBLE_TRY(const std::string_view format,
             need_string(arguments.get(0, "format"), "strftime_now"));
  if (format.size() > 256) return template_error("strftime_now: the format is too long");
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char buffer[4096];
  const std::string terminated(format);
  const size_t size = std::strftime(buffer, sizeof(buffer), terminated.c_str(), &local);
  return runtime.text(std::string(buffer, size));
}

}  // namespace

bool has_method(const Value& self, std::string_view name) {
  switch (self.kind()) {
    case Kind::kString: return listed(kStringMethods, name);
    case Kind::kDict: return listed(kDictMethods, name);
    case Kind::kList: return listed(kListMethods, name);
    case Kind::kTuple: return name == "index" || name == "count";
    case Kind::kLoop: return name == "cycle" || name == "changed";
    default: return false;
  }
}

Result<Value> call_method(Runtime& runtime, const Value& self, std::string_view name,
                          const Arguments& arguments) {
  switch (self.kind()) {
    case Kind::kString: return string_method(runtime, self, name, arguments);
    case Kind::kDict: return dict_method(runtime, self, name, arguments);
    case Kind::kList:
    case Kind::kTuple: return list_method(runtime, self, name, arguments);
    case Kind::kLoop:
      if (name == "cycle" && !arguments.positional.empty()) {
        return arguments.positional[self.as_loop().index % arguments.positional.size()];
      }
      return unsupported(self, name);
    default: return unsupported(self, name);
  }
}

bool is_function(std::string_view name) {
  return name == "range" || name == "namespace" || name == "dict" || name == "raise_exception" ||
         name == "strftime_now";
}

Result<Value> call_function(Runtime& runtime, std::string_view name, const Arguments& arguments) {
  if (name == "range") return make_range(runtime, arguments);
  if (name == "namespace") return make_dict(runtime, arguments, Kind::kNamespace);
  if (name == "dict") return make_dict(runtime, arguments, Kind::kDict);
  if (name == "strftime_now") return strftime_now(runtime, arguments);
  NIBBLE_TRY(const std::string message, runtime.text_of(arguments.get(0, "message")));
  return template_error(message);
}

}  // namespace nibble::text::jinja
