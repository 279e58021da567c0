// Result<T>: a value, or an Error that names the thing, what was expected and what was found.
// Member names follow std::expected (C++23), to become it later. Nothing here throws.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/cat.h"
#include "base/check.h"

namespace nibble {

/// Few canonical codes that survive to the wire: the server maps them to HTTP, the CLI to an exit
/// code, each in one switch.
enum class Code {
  kInvalidArgument,    // the caller's request is wrong
  kNotFound,           // a named thing does not exist
  kCorruptInput,       // a file or stream breaks its format
  kUnsupported,        // valid, but this build or host cannot do it
  kResourceExhausted,  // memory, pages or another budget
  kIo,                 // the operating system refused
  kCancelled,
  kUnavailable,  // try again later
  kDeviceLost,
  kInternal,
};

std::string_view code_name(Code code);

class Error {
 public:
  Error(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  /// The same error with "context: " in front. Each layer adds at most one.
  Error with_context(std::string_view context) const {
    return Error(code_, cat(context, ": ", message_));
  }

 private:
  Code code_;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: as expected
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }
  T& value() & {
    require_value();
    return *std::get_if<0>(&state_);
  }
  const T& value() const& {
    require_value();
    return *std::get_if<0>(&state_);
  }
  T&& value() && {
    require_value();
    return std::move(*std::get_if<0>(&state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const {
    NIBBLE_CHECK(!has_value(), "error() of a Result that holds a value");
    return *std::get_if<1>(&state_);
  }

 private:
  void require_value() const {
    NIBBLE_CHECK(has_value(), "value() of a failed Result: ", error_text());
  }
  std::string error_text() const { return has_value() ? "" : std::get_if<1>(&state_)->message(); }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT
  bool has_value() const { return !error_.has_value(); }
  explicit operator bool() const { return has_value(); }
  void value() const {
    NIBBLE_CHECK(has_value(), "value() of a failed Result: ", error_->message());
  }
  const Error& error() const {
    NIBBLE_CHECK(!has_value(), "error() of a Result that holds a value");
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

}  // namespace nibble

// NIBBLE_TRY(expr)                  returns the error of a Result<void> to the caller
// NIBBLE_TRY(decl, expr)            declares `decl` with the value, or returns the error
// NIBBLE_TRY(decl, expr, context)   the same with context, built only on failure
// The only macro here that hides a `return`.
#define NIBBLE_TRY_CONCAT2(a, b) a##b
#define NIBBLE_TRY_CONCAT(a, b) NIBBLE_TRY_CONCAT2(a, b)
#define NIBBLE_TRY1(expr) \
  if (auto nibble_try_result = (expr); !nibble_try_result) return nibble_try_result.error()
#define NIBBLE_TRY2_(tmp, decl, expr) \
  auto tmp = (expr);                  \
  if (!tmp) return tmp.error();       \
  decl = std::move(*tmp)
#define NIBBLE_TRY3_(tmp, decl, expr, context)          \
  auto tmp = (expr);                                    \
  if (!tmp) return tmp.error().with_context((context)); \
  decl = std::move(*tmp)
#define NIBBLE_TRY2(decl, expr) NIBBLE_TRY2_(NIBBLE_TRY_CONCAT(nibble_try_, __LINE__), decl, expr)
#define NIBBLE_TRY3(decl, expr, context) \
  NIBBLE_TRY3_(NIBBLE_TRY_CONCAT(nibble_try_, __LINE__), decl, expr, context)
#define NIBBLE_TRY_PICK(a, b, c, name, ...) name
#define NIBBLE_TRY(...) \
  NIBBLE_TRY_PICK(__VA_ARGS__, NIBBLE_TRY3, NIBBLE_TRY2, NIBBLE_TRY1, )(__VA_ARGS__)
