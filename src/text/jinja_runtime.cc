#include "text/jinja_runtime.h"

#include "text/unicode.h"

namespace nibble::text::jinja {

Value Arguments::get(size_t index, std::string_view name) const {
  if (index < positional.size()) return positional[index];
  for (const auto& [key, value] : named) {
    if (key == name) return value;
  }
  return {};
}

bool Arguments::has(size_t index, std::string_view name) const {
  if (index < positional.size()) return true;
  for (const auto& [key, value] : named) {
    if (key == name) return true;
  }
  return false;
}

Result<void> Runtime::spend(int64_t count) {
  steps_left_ -= count;
  if (steps_left_ < 0) return Error(Code::kResourceExhausted, "the template takes too many steps");
  if (heap.exhausted()) {
    return Error(Code::kResourceExhausted, "the template makes too much data");
  }
  return {};
}

Result<Value> Runtime::text(std::string made) {
  const auto bytes = static_cast<int64_t>(made.size());
  const Value value = heap.string(std::move(made));
  NIBBLE_TRY(spend(1 + bytes / 1024));
  return value;
}

Result<std::string> Runtime::text_of(const Value& value) {
  std::string out;
  append_text(value, out);
  if (out.size() > kMaxTextBytes) {
    return Error(Code::kResourceExhausted, "a value of the template prints too long");
  }
  heap.charge(static_cast<int64_t>(out.size()));
  NIBBLE_TRY(spend(1 + static_cast<int64_t>(out.size()) / 64));
  return out;
}

Result<std::vector<Value>> Runtime::items_of(const Value& value) {
  std::vector<Value> items;
  switch (value.kind()) {
    case Kind::kUndefined: break;  // iterates as nothing
    case Kind::kList:
    case Kind::kTuple: items = value.as_list().items; break;
    case Kind::kDict:
      for (const auto& [key, item] : value.as_dict().items) items.push_back(key);
      break;
    case Kind::kString: {
      const std::string& text = value.as_string();
      NIBBLE_TRY(spend(static_cast<int64_t>(text.size())));
      for (size_t pos = 0; pos < text.size();) {
        const size_t begin = pos;
        next_code_point(text, pos);
        items.push_back(heap.string(text.substr(begin, pos - begin)));
      }
      break;
    }
    default: return template_error(cat("'", type_name(value), "' object is not iterable"));
  }
  heap.charge(static_cast<int64_t>(items.size() * sizeof(Value)));
  NIBBLE_TRY(spend(1 + static_cast<int64_t>(items.size())));
  return items;
}

Result<Value> get_attribute(Runtime& runtime, const Value& value, std::string_view name) {
  if (value.is_undefined()) return template_error(std::string(value.undefined_name()));
  if (value.kind() == Kind::kNamespace) {
    if (const Value* found = value.as_dict().find(name)) return *found;
  } else if (value.kind() == Kind::kLoop) {
    const LoopState& loop = value.as_loop();
    const auto index = static_cast<int64_t>(loop.index);
    const auto length = static_cast<int64_t>(loop.items.size());
    if (name == "index") return Value::integer(index + 1);
    if (name == "index0") return Value::integer(index);
    if (name == "revindex") return Value::integer(length - index);
    if (name == "revindex0") return Value::integer(length - index - 1);
    if (name == "first") return Value::boolean(index == 0);
    if (name == "last") return Value::boolean(index + 1 == length);
    if (name == "length") return Value::integer(length);
    if (name == "depth") return Value::integer(1);  // recursive loops only
    if (name == "depth0") return Value::integer(0);
    if (name == "previtem" && index > 0) return loop.items[loop.index - 1];
    if (name == "nextitem" && index + 1 < length) return loop.items[loop.index + 1];
  }
  if (has_method(value, name)) {
    Callable method;
    method.kind = Callable::Kind::kMethod;
    method.name = name;
    method.self = value;
    return runtime.heap.callable(std::move(method));
  }
  if (value.is_dict()) {
    if (const Value* found = value.as_dict().find(name)) return *found;
  }
  return runtime.heap.undefined(
      cat("'", type_name(value), " object' has no attribute '", name.substr(0, 100), "'"));
}

Result<Value> get_item(Runtime& runtime, const Value& value, const Value& key) {
  if (value.is_undefined()) return template_error(std::string(value.undefined_name()));
  if (value.is_dict()) {
    if (const Value* found = value.as_dict().find(key)) return *found;
  } else if (value.is_sequence() && key.is_integral()) {
    const auto& items = value.as_list().items;
    const auto size = static_cast<int64_t>(items.size());
    const int64_t index = key.as_int() < 0 ? key.as_int() + size : key.as_int();
    if (index >= 0 && index < size) return items[static_cast<size_t>(index)];
    return runtime.heap.undefined(cat("list index ", key.as_int(), " is out of range"));
  } else if (value.is_string() && key.is_integral()) {
    NIBBLE_TRY(const std::vector<Value> items, runtime.items_of(value));
    const auto size = static_cast<int64_t>(items.size());
    const int64_t index = key.as_int() < 0 ? key.as_int() + size : key.as_int();
    if (index >= 0 && index < size) return items[static_cast<size_t>(index)];
    return runtime.heap.undefined(cat("string index ", key.as_int(), " is out of range"));
  }
  if (key.is_string()) return get_attribute(runtime, value, key.as_string());
  return runtime.heap.undefined(cat("'", type_name(value), " object' has no such item"));
}

Result<bool> contains(Runtime& runtime, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kUndefined: return false;
    case Kind::kString: {
      NIBBLE_TRY(const std::string_view part, need_string(item, "'in <string>'"));
      NIBBLE_TRY(runtime.spend(1 + static_cast<int64_t>(container.as_string().size()) / 64));
      return container.as_string().find(part) != std::string::npos;
    }
    case Kind::kDict: return container.as_dict().find(item) != nullptr;
    case Kind::kList:
    case Kind::kTuple:
      for (const Value& candidate : container.as_list().items) {
        NIBBLE_TRY(runtime.spend(1));
        if (equal(candidate, item)) return true;
      }
      return false;
    default:
      return template_error(cat("argument of type '", type_name(container), "' is not iterable"));
  }
}

Result<int64_t> need_int(const Value& value, std::string_view what) {
  if (value.is_integral()) return value.as_int();
  return template_error(cat(what, ": expected an integer, found '", type_name(value), "'"));
}

Result<std::string_view> need_string(const Value& value, std::string_view what) {
  if (value.is_string()) return std::string_view(value.as_string());
  if (value.is_undefined()) return template_error(std::string(value.undefined_name()));
  return template_error(cat(what, ": expected a string, found '", type_name(value), "'"));
}

}  // namespace nibble::text::jinja
