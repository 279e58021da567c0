// Tokens to the tree of jinja_ast.h, by recursive descent with the precedences of Jinja2.
#pragma once

#include <string_view>

#include "base/result.h"
#include "text/jinja_ast.h"

namespace nibble::text::jinja {

/// Errors: kCorruptInput with the line; kUnsupported naming a statement not implemented.
Result<Block> parse_template(std::string_view source);

}  // namespace nibble::text::jinja
