// Operators on template values, with Python's rules.
#pragma once

#include <string_view>

#include "text/jinja_runtime.h"

namespace nibble::text::jinja {

/// + - * / // % **. Errors: kInvalidArgument (types, zero division, overflow of 64 bits).
Result<Value> arithmetic(Runtime& runtime, std::string_view op, const Value& left,
                         const Value& right);
Result<Value> negate(const Value& value);
/// value[start:stop:step]; none where left out.
Result<Value> slice(Runtime& runtime, const Value& value, const Value& start, const Value& stop,
                    const Value& step);

}  // namespace nibble::text::jinja
