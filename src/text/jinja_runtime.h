// What filters, tests and methods share with the evaluator: the heap, the limits, and calls back.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "text/jinja_value.h"

namespace nibble::text::jinja {

/// A template comes with the checkpoint, so it is not trusted: it may not run for ever, nor fill
/// the memory, nor overflow the stack.
struct Limits {
  int64_t steps = 5'000'000;
  int64_t bytes = 256LL * 1024 * 1024;  // of all values and the output, freed only at the end
  int depth = 500;                      // of evaluation, macros included
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  /// Argument number `index`, or the one called `name`; undefined if neither was given.
  Value get(size_t index, std::string_view name) const;
  bool has(size_t index, std::string_view name) const;
};

class Runtime {
 public:
  explicit Runtime(const Limits& limits) : heap(limits.bytes), steps_left_(limits.steps) {}
  virtual ~Runtime() = default;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Heap heap;

  /// Counts `count` steps of work. Errors: kResourceExhausted when steps or bytes are used up.
  Result<void> spend(int64_t count);
  virtual Result<Value> call(const Value& callee, const Arguments& arguments) = 0;

  Result<Value> text(std::string text);             // a new string
  Result<std::string> text_of(const Value& value);  // str()
  /// Items of a list, characters of a string, keys of a dict. Errors: for other types.
  Result<std::vector<Value>> items_of(const Value& value);

 private:
  int64_t steps_left_;
};

Result<Value> apply_filter(Runtime& runtime, std::string_view name, const Value& input,
                           const Arguments& arguments);
Result<bool> apply_test(Runtime& runtime, std::string_view name, const Value& input,
                        const Arguments& arguments);
/// True if values of this type have a method of this name (supported or not).
bool has_method(const Value& self, std::string_view name);
Result<Value> call_method(Runtime& runtime, const Value& self, std::string_view name,
                          const Arguments& arguments);
/// range, namespace, dict, raise_exception, strftime_now.
bool is_function(std::string_view name);
Result<Value> call_function(Runtime& runtime, std::string_view name, const Arguments& arguments);

/// value.name and value[key], as Jinja2 looks them up: undefined if there is none.
Result<Value> get_attribute(Runtime& runtime, const Value& value, std::string_view name);
Result<Value> get_item(Runtime& runtime, const Value& value, const Value& key);
/// `a in b`.
Result<bool> contains(Runtime& runtime, const Value& container, const Value& item);

/// A whole number out of an argument. Errors: kInvalidArgument naming `what`.
Result<int64_t> need_int(const Value& value, std::string_view what);
Result<std::string_view> need_string(const Value& value, std::string_view what);

}  // namespace nibble::text::jinja
