#include "text/jinja_arithmetic.h"

#include <algorithm>
#include <cmath>

namespace nibble::text::jinja {
namespace {

Error overflow() { return template_error("integer result does not fit 64 bits"); }

Result<Value> integer_power(int64_t base, int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) return template_error("0 to a negative power");
    return Value::number(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  int64_t result = 1;
  while (exponent > 0) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result)) return overflow();
    exponent >>= 1;
    if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) return overflow();
  }
  return Value::integer(result);
}

Result<Value> integers(std::string_view op, int64_t a, int64_t b) {
  int64_t result = 0;
  if (op == "+") {
    if (__builtin_add_overflow(a, b, &result)) return overflow();
    return Value::integer(result);
  }
  if (op == "-") {
    if (__builtin_sub_overflow(a, b, &result)) return overflow();
    return Value::integer(result);
  }
  if (op == "*") {
    if (__builtin_mul_overflow(a, b, &result)) return overflow();
    return Value::integer(result);
  }
  if (op == "**") return integer_power(a, b);
  if (b == 0) return template_error("division by zero");
  if (op == "/") return Value::number(static_cast<double>(a) / static_cast<double>(b));
  if (a == INT64_MIN && b == -1) return op == "%" ? Value::integer(0) : Result<Value>(overflow());
  int64_t quotient = a / b;
  if (a % b != 0 && (a < 0) != (b < 0)) --quotient;  // towards minus infinity
  return Value::integer(op == "//" ? quotient : a - quotient * b);
}

Result<Value> floats(std::string_view op, double a, double b) {
  if (op == "+") return Value::number(a + b);
  if (op == "-") return Value::number(a - b);
  if (op == "*") return Value::number(a * b);
  if (op == "**") return Value::number(std::pow(a, b));
  if (b == 0) return template_error("division by zero");
  if (op == "/") return Value::number(a / b);
  if (op == "//") return Value::number(std::floor(a / b));
  double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  return Value::number(rest);
}

// text * n and list * n
Result<Value> repeat(Runtime& runtime, const Value& value, int64_t times) {
  times = std::max<int64_t>(times, 0);
  const size_t size =
      value.is_string() ? value.as_string().size() : value.as_list().items.size() * sizeof(Value);
  int64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<int64_t>(size), times, &bytes) ||
      !runtime.heap.afford(bytes)) {
    return Error(Code::kResourceExhausted, "the template makes too much data");
  }
  NIBBLE_TRY(runtime.spend(1 + bytes / 64));
  if (size == 0) times = 0;
  if (value.is_string()) {
    std::string out;
    out.reserve(static_cast<size_t>(bytes));
    for (int64_t i = 0; i < times; ++i) out += value.as_string();
    return runtime.text(std::move(out));
  }
  std::vector<Value> items;
  const auto& part = value.as_list().items;
  for (int64_t i = 0; i < times; ++i) items.insert(items.end(), part.begin(), part.end());
  return runtime.heap.list(std::move(items), value.kind());
}

}  // namespace

Result<Value> arithmetic(Runtime& runtime, std::string_view op, const Value& left,
                         const Value& right) {
  if (left.is_undefined()) return template_error(std::string(left.undefined_name()));
  if (right.is_undefined()) return template_error(std::string(right.undefined_name()));
  if (left.is_integral() && right.is_integral()) {
    return integers(op, left.as_int(), right.as_int());
  }
  if (left.is_number() && right.is_number()) {
    return floats(op, left.as_double(), right.as_double());
  }
  if (op == "+" && left.is_string() && right.is_string()) {
    const size_t size = left.as_string().size() + right.as_string().size();
    if (!runtime.heap.afford(static_cast<int64_t>(size))) {
      return Error(Code::kResourceExhausted, "the template makes too much data");
    }
    return runtime.text(left.as_string() + right.as_string());
  }
  if (op == "+" && left.is_sequence() && left.kind() == right.kind()) {
    std::vector<Value> items = left.as_list().items;
    const auto& more = right.as_list().items;
    items.insert(items.end(), more.begin(), more.end());
    NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(items.size())));
    return runtime.heap.list(std::move(items), left.kind());
  }
  const auto repeatable = [](const Value& v) { return v.is_string() || v.is_sequence(); };
  if (op == "*" && repeatable(left) && right.is_integral()) {
    return repeat(runtime, left, right.as_int());
  }
  if (op == "*" && repeatable(right) && left.is_integral()) {
    return repeat(runtime, right, left.as_int());
  }
  if (op == "%" && left.is_string()) return Error(Code::kUnsupported, "% formatting of strings");
  return template_error(cat("unsupported operand types for ", op, ": '", type_name(left), "' and '",
                            type_name(right), "'"));
}

Result<Value> negate(const Value& value) {
  if (value.is_undefined()) return template_error(std::string(value.undefined_name()));
  if (value.is_integral()) {
    if (value.as_int() == INT64_MIN) return overflow();
    return Value::integer(-value.as_int());
  }
  if (value.is_number()) return Value::number(-value.as_double());
  return template_error(cat("bad operand for unary -: '", type_name(value), "'"));
}

Result<Value> slice(Runtime& runtime, const Value& value, const Value& start, const Value& stop,
                    const Value& step) {
  if (!value.is_string() && !value.is_sequence()) {
    if (value.is_undefined()) return template_error(std::string(value.undefined_name()));
    return template_error(cat("'", type_name(value), "' object cannot be sliced"));
  }
  NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(value));
  const auto size = static_cast<int64_t>(items.size());
  int64_t by = 1;
  if (!step.is_none()) {
    NIBBLE_TRY(by, need_int(step, "slice step"));
  }
  if (by == 0 || by == INT64_MIN) return template_error("slice step cannot be zero");
  // Python's clamping: into [0, size] going up, into [-1, size - 1] going down.
  const auto clamp = [&](int64_t index) {
    if (index < 0) index = index < -size ? -1 : index + size;
    if (by > 0) return std::clamp<int64_t>(index, 0, size);
    return std::clamp<int64_t>(index, -1, size - 1);
  };
  int64_t from = by > 0 ? 0 : size - 1;
  int64_t to = by > 0 ? size : -1;
  if (!start.is_none()) {
    NIBBLE_TRY(const int64_t raw, need_int(start, "slice start"));
    from = clamp(raw);
  }
  if (!stop.is_none()) {
    NIBBLE_TRY(const int64_t raw, need_int(stop, "slice stop"));
    to = clamp(raw);
  }
  std::vector<Value> kept;
  for (int64_t i = from; by > 0 ? i < to : i > to;) {
    kept.push_back(items[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, by, &i)) break;
  }
  if (!value.is_string()) return runtime.heap.list(std::move(kept), value.kind());
  std::string text;
  for (const Value& c : kept) text += c.as_string();
  return runtime.text(std::move(text));
}

}  // namespace nibble::text::jinja
