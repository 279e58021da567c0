// Walks a parsed template and writes its text.
#pragma once

#include <string>

#include "base/json.h"
#include "base/result.h"
#include "text/jinja_ast.h"
#include "text/jinja_runtime.h"

namespace nibble::text::jinja {

/// Errors: kInvalidArgument (raise_exception, wrong types, undefined values used), kUnsupported
/// (filters, tests and methods that are not implemented), kResourceExhausted (limits).
Result<std::string> render_template(const Block& block, const OrderedJson& variables,
                                    const Limits& limits = {});

}  // namespace nibble::text::jinja
