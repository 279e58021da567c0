// Tests: what may stand behind "is".
#include "text/jinja_runtime.h"
#include "text/jinja_strings.h"
#include "text/unicode.h"

namespace nibble::text::jinja {
namespace {

bool iterable(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict: return true;
    default: return false;
  }
}

Result<bool> number_test(std::string_view name, const Value& input, const Arguments& arguments) {
  NIBBLE_TRY(const int64_t number, need_int(input, name));
  int64_t by = 2;
  if (name == "divisibleby") {
    NIBBLE_TRY(by, need_int(arguments.get(0, "num"), name));
    if (by == 0) return template_error("division by zero");
    if (by == -1) return true;
  }
  return (number % by == 0) == (name != "odd");
}

Result<bool> order_test(std::string_view name, const Value& input, const Value& other) {
  NIBBLE_TRY(const int order, compare(input, other));
  if (name == "lt" || name == "lessthan" || name == "<") return order < 0;
  if (name == "gt" || name == "greaterthan" || name == ">") return order > 0;
  if (name == "le" || name == "<=") return order <= 0;
  return order >= 0;
}

bool same_as(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.is_none() || a.is_undefined()) return true;
  if (a.is_number() || a.is_string()) return equal(a, b);
  return a.identity() == b.identity();
}

}  // namespace

Result<bool> apply_test(Runtime& runtime, std::string_view name, const Value& input,
                        const Arguments& arguments) {
  const Kind kind = input.kind();
  if (name == "defined") return kind != Kind::kUndefined;
  if (name == "undefined") return kind == Kind::kUndefined;
  if (name == "none") return kind == Kind::kNone;
  if (name == "string") return kind == Kind::kString;
  if (name == "mapping") return kind == Kind::kDict;
  if (name == "sequence") return iterable(input);
  if (name == "iterable") return iterable(input) || kind == Kind::kLoop;
  if (name == "number") return input.is_number();
  if (name == "integer") return kind == Kind::kInt;
  if (name == "float") return kind == Kind::kFloat;
  if (name == "boolean") return kind == Kind::kBool;
  if (name == "true") return kind == Kind::kBool && input.as_int() != 0;
  if (name == "false") return kind == Kind::kBool && input.as_int() == 0;
  if (name == "callable") return kind == Kind::kCallable;
  if (name == "sameas") return same_as(input, arguments.get(0, "other"));
  if (name == "in") return contains(runtime, arguments.get(0, "seq"), input);
  if (name == "odd" || name == "even" || name == "divisibleby") {
    return number_test(name, input, arguments);
  }
  const Value other = arguments.get(0, "b");
  if (name == "eq" || name == "equalto" || name == "==") return equal(input, other);
  if (name == "ne" || name == "!=") return !equal(input, other);
  for (const std::string_view order :
       {"lt", "lessthan", "<", "gt", "greaterthan", ">", "le", "<=", "ge", ">="}) {
    if (name == order) return order_test(name, input, other);
  }
  if (name == "lower" || name == "upper") {
    NIBBLE_TRY(const std::string text, runtime.text_of(input));
    bool cased = false;
    for (size_t pos = 0; pos < text.size();) {
      const char32_t c = next_code_point(text, pos);
      if (name == "lower" ? is_upper(c) : is_lower(c)) return false;
      cased = cased || is_upper(c) || is_lower(c);
    }
    return cased;
  }
  return Error(Code::kUnsupported, cat("test '", name, "'"));
}

}  // namespace nibble::text::jinja
