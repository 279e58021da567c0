// Template text to tokens, with the whitespace rules of Jinja2 under trim_blocks and lstrip_blocks,
// which is how transformers sets it up.
// Source: the Jinja template documentation, "Whitespace Control", and Jinja 3.1's behaviour.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble::text::jinja {

struct Token {
  enum class Kind {
    kText,
    kBlockBegin,
    kBlockEnd,
    kPrintBegin,
    kPrintEnd,
    kName,
    kString,
    kInt,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind = Kind::kEnd;
  int line = 1;
  std::string text;
  int64_t integer = 0;
  double number = 0;
};

/// Errors: kCorruptInput with the line.
Result<std::vector<Token>> lex(std::string_view source);

/// Whitespace as Python's str.isspace() sees it.
bool python_space(char32_t c);
/// `text` without that whitespace at its ends.
std::string_view strip_space(std::string_view text, bool left, bool right);

Error syntax_error(int line, std::string_view what);

}  // namespace nibble::text::jinja
