// Values of a running template. All heap objects of one rendering belong to its Heap and go with
// it, so that values are plain pointers and a template that builds a ring (a namespace that holds
// itself) frees like any other.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace nibble::text::jinja {

class Value;
struct ListData;
struct DictData;
struct Callable;
struct LoopState;

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kNamespace,
  kCallable,
  kLoop,
};

class Value {
 public:
  Value() = default;  // undefined
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool b) {
    Value v(Kind::kBool);
    v.int_ = b ? 1 : 0;
    return v;
  }
  static Value integer(int64_t i) {
    Value v(Kind::kInt);
    v.int_ = i;
    return v;
  }
  static Value number(double d) {
    Value v(Kind::kFloat);
    v.float_ = d;
    return v;
  }
  static Value string(const std::string* s) {
    Value v(Kind::kString);
    v.string_ = s;
    return v;
  }
  /// An undefined value that remembers what was looked for.
  static Value undefined(const std::string* name) {
    Value v;
    v.string_ = name;
    return v;
  }
  static Value list(ListData* l, Kind kind = Kind::kList) {
    Value v(kind);
    v.list_ = l;
    return v;
  }
  static Value dict(DictData* d, Kind kind = Kind::kDict) {
    Value v(kind);
    v.dict_ = d;
    return v;
  }
  static Value callable(const Callable* c) {
    Value v(Kind::kCallable);
    v.callable_ = c;
    return v;
  }
  static Value loop(const LoopState* l) {
    Value v(Kind::kLoop);
    v.loop_ = l;
    return v;
  }

  Kind kind() const { return kind_; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_dict() const { return kind_ == Kind::kDict; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat; }
  int64_t as_int() const { return int_; }
  double as_double() const { return kind_ == Kind::kFloat ? float_ : static_cast<double>(int_); }
  const std::string& as_string() const { return *string_; }
  /// What an undefined value was looked up as.
  std::string_view undefined_name() const {
    return string_ == nullptr ? std::string_view("value") : std::string_view(*string_);
  }
  ListData& as_list() const { return *list_; }
  DictData& as_dict() const { return *dict_; }
  const Callable& as_callable() const { return *callable_; }
  const LoopState& as_loop() const { return *loop_; }
  const void* identity() const { return list_; }

 private:
  explicit Value(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::kUndefined;
  union {
    int64_t int_;
    double float_;
    const std::string* string_ = nullptr;
    ListData* list_;
    DictData* dict_;
    const Callable* callable_;
    const LoopState* loop_;
  };
};

struct ListData {
  std::vector<Value> items;
};

/// Keeps the order of insertion. Keys are strings or whole numbers.
struct DictData {
  std::vector<std::pair<Value, Value>> items;
  std::unordered_map<std::string, size_t> index;  // by key_text
  const Value* find(std::string_view key) const;  // string keys only
  const Value* find(const Value& key) const;
  void set(const Value& key, const Value& value);
  /// Distinguishes 1 from '1'; empty for values that cannot be keys.
  static std::string key_text(const Value& key);
};

struct LoopState {
  std::vector<Value> items;
  size_t index = 0;
};

struct Macro;  // in jinja_ast.h
struct Scope;  // in jinja_eval.cc

struct Callable {
  enum class Kind { kFunction, kMethod, kMacro } kind = Kind::kFunction;
  std::string name;  // of a function or method
  Value self;        // of a method
  const Macro* macro = nullptr;
  Scope* scope = nullptr;  // where the macro was defined
};

/// Owns the objects of one rendering and counts what they cost; see Limits in jinja_eval.h.
class Heap {
 public:
  explicit Heap(int64_t byte_limit) : bytes_left_(byte_limit) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  Value string(std::string text) {
    bytes_left_ -= static_cast<int64_t>(text.size()) + 32;
    strings_.push_back(std::move(text));
    return Value::string(&strings_.back());
  }
  Value list(std::vector<Value> items, Kind kind = Kind::kList) {
    bytes_left_ -= static_cast<int64_t>(items.size() * sizeof(Value)) + 32;
    lists_.push_back({std::move(items)});
    return Value::list(&lists_.back(), kind);
  }
  DictData& dict() {
    bytes_left_ -= 128;
    dicts_.emplace_back();
    return dicts_.back();
  }
  Value callable(Callable c) {
    bytes_left_ -= 128;
    callables_.push_back(std::move(c));
    return Value::callable(&callables_.back());
  }
  LoopState& loop() {
    bytes_left_ -= 64;
    loops_.emplace_back();
    return loops_.back();
  }
  Value undefined(std::string name) {
    const Value text = string(std::move(name));
    return Value::undefined(&text.as_string());
  }
  /// Pays for `bytes` that are about to be made; false if there is no room for them.
  bool afford(int64_t bytes) {
    if (bytes > bytes_left_) {
      bytes_left_ = -1;
      return false;
    }
    return true;
  }
  void charge(int64_t bytes) { bytes_left_ -= bytes; }
  bool exhausted() const { return bytes_left_ < 0; }

 private:
  int64_t bytes_left_;
  std::deque<std::string> strings_;
  std::deque<ListData> lists_;
  std::deque<DictData> dicts_;
  std::deque<LoopState> loops_;
  std::deque<Callable> callables_;
};

/// JSON to values; the text is repaired where it is not UTF-8.
Value from_json(const OrderedJson& json, Heap& heap);

std::string_view type_name(const Value& value);  // as Python says it
bool truthy(const Value& value);
/// Values with more than a million parts, or nested deeper than 64, count as different.
bool equal(const Value& a, const Value& b);
/// Order of numbers, strings and lists. Errors: kInvalidArgument for other pairs.
Result<int> compare(const Value& a, const Value& b);
/// Appended text stops growing here: values may share parts, so a small one can print very long.
constexpr size_t kMaxTextBytes = 32 * 1024 * 1024;
/// Appends what Python's str() and repr() give, but no more once `out` is above kMaxTextBytes.
void append_text(const Value& value, std::string& out);
void append_repr(const Value& value, std::string& out, int depth = 0);
std::string float_text(double number);

struct JsonStyle {
  int indent = -1;  // none
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
  bool ascii = false;
};
/// As json.dumps. Errors: kInvalidArgument for values that JSON cannot hold.
Result<void> append_json(const Value& value, const JsonStyle& style, std::string& out,
                         int depth = 0);

Error template_error(std::string message);

}  // namespace nibble::text::jinja
