#include "text/jinja_lexer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>

#include "text/unicode.h"

namespace nibble::text::jinja {
namespace {

constexpr size_t kMaxSource = 4 * 1024 * 1024;

// All line ends become \n, and one at the very end is dropped.
std::string normalize_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out += source[i];
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<uint8_t>(c) >= 0x80;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}

  Result<std::vector<Token>> run() {
    while (pos_ < source_.size()) {
      NIBBLE_TRY(text_and_tag());
    }
    add(Token::Kind::kEnd);
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return source_.substr(pos_); }
  bool at(std::string_view what) const { return rest().starts_with(what); }

  void advance(size_t bytes) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<std::ptrdiff_t>(pos_),
                   source_.begin() + static_cast<std::ptrdiff_t>(pos_ + bytes), '\n'));
    pos_ += bytes;
    line_starts_ = pos_ > 0 && source_[pos_ - 1] == '\n';
  }
  void skip_space() {
    const std::string_view kept = strip_space(rest(), true, false);
    advance(rest().size() - kept.size());
  }
  Token& add(Token::Kind kind, std::string text = {}) {
    tokens_.push_back({});
    tokens_.back().kind = kind;
    tokens_.back().line = line_;
    tokens_.back().text = std::move(text);
    return tokens_.back();
  }

  // Text up to the next tag, and the tag.
  Result<void> text_and_tag() {
    size_t open = pos_;
    while (true) {
      open = source_.find('{', open);
      if (open == std::string_view::npos || open + 1 >= source_.size()) {
        add(Token::Kind::kText, std::string(rest()));
        advance(rest().size());
        return {};
      }
      const char kind = source_[open + 1];
      if (kind == '%' || kind == '{' || kind == '#') break;
      ++open;
    }
    const char kind = source_[open + 1];
    const char sign = open + 2 < source_.size() ? source_[open + 2] : ' ';
    std::string_view text = source_.substr(pos_, open - pos_);
    if (sign == '-') {
      text = strip_space(text, false, true);
    } else if (sign != '+' && kind != '{') {
      const size_t newline = text.rfind('\n');
      const size_t line = newline == std::string_view::npos ? 0 : newline + 1;
      const bool starts = line > 0 || line_starts_ || pos_ == 0;
      if (starts && strip_space(text.substr(line), true, false).empty())
        text = text.substr(0, line);
    }
    if (!text.empty()) add(Token::Kind::kText, std::string(text));
    advance(open - pos_ + 2);
    if (kind == '#') return comment();
    if (sign == '-' || sign == '+') advance(1);
    if (kind == '{') {
      add(Token::Kind::kPrintBegin);
      return tag("}}", Token::Kind::kPrintEnd);
    }
    if (raw_follows()) return raw();
    add(Token::Kind::kBlockBegin);
    return tag("%}", Token::Kind::kBlockEnd);
  }

  // Behind an end mark whose sign stood at `sign`: what of the whitespace goes.
  void after_end(char sign, bool trim_newline) {
    if (sign == '-') {
      skip_space();
    } else if (trim_newline && sign != '+' && at("\n")) {
      advance(1);
    }
  }

  Result<void> comment() {
    const size_t end = source_.find("#}", pos_);
    if (end == std::string_view::npos) return syntax_error(line_, "a comment is not closed");
    const char sign = end > pos_ ? source_[end - 1] : ' ';
    advance(end + 2 - pos_);
    after_end(sign, true);
    return {};
  }

  // {% raw %}: pos_ is behind the opening mark.
  bool raw_follows() const {
    std::string_view inside = strip_space(rest(), true, false);
    if (!inside.starts_with("raw")) return false;
    inside = strip_space(inside.substr(3), true, false);
    return inside.starts_with("%}") || inside.starts_with("-%}");
  }
  Result<void> raw() {
    const size_t close = source_.find("%}", pos_);
    const bool strip = source_[close - 1] == '-';
    advance(close + 2 - pos_);
    if (strip) skip_space();
    const size_t begin = pos_;
    for (size_t open = source_.find("{%", pos_); open != std::string_view::npos;
         open = source_.find("{%", open + 2)) {
      std::string_view inside = source_.substr(open + 2);
      const char sign = inside.empty() ? ' ' : inside[0];
      if (sign == '-' || sign == '+') inside.remove_prefix(1);
      inside = strip_space(inside, true, false);
      if (!inside.starts_with("endraw")) continue;
      inside = strip_space(inside.substr(6), true, false);
      const char end_sign = inside.empty() ? ' ' : inside[0];
      if (end_sign == '-' || end_sign == '+') inside.remove_prefix(1);
      if (!inside.starts_with("%}")) continue;
      std::string_view text = source_.substr(begin, open - begin);
      if (sign == '-') {
        text = strip_space(text, false, true);
      } else if (sign != '+') {
        const size_t newline = text.rfind('\n');
        if (newline != std::string_view::npos &&
            strip_space(text.substr(newline + 1), true, false).empty()) {
          text = text.substr(0, newline + 1);
        }
      }
      add(Token::Kind::kText, std::string(text));
      advance(source_.size() - inside.size() + 2 - pos_);
      after_end(end_sign, true);
      return {};
    }
    return syntax_error(line_, "a raw block is not closed");
  }

  Result<void> tag(std::string_view end, Token::Kind end_kind) {
    std::string open;  // brackets that are open; an end mark inside of them is none
    while (true) {
      skip_space();
      if (pos_ >= source_.size()) return syntax_error(line_, cat("'", end, "' is missing"));
      if (open.empty()) {
        const char sign = rest()[0];
        const bool with_sign = (sign == '-' || sign == '+') && rest().substr(1).starts_with(end) &&
                               (sign == '-' || end == "%}");
        if (with_sign || at(end)) {
          add(end_kind);
          advance(end.size() + (with_sign ? 1 : 0));
          after_end(with_sign ? sign : ' ', end == "%}");
          return {};
        }
      }
      NIBBLE_TRY(inner_token(open));
    }
  }

  Result<void> inner_token(std::string& open) {
    const char c = rest()[0];
    if (name_start(c)) {
      size_t size = 1;
      while (size < rest().size() && (name_start(rest()[size]) || is_digit(rest()[size]))) ++size;
      add(Token::Kind::kName, std::string(rest().substr(0, size)));
      advance(size);
      return {};
    }
    if (is_digit(c)) return number();
    if (c == '\'' || c == '"') return string();
    static constexpr std::array<std::string_view, 26> kOperators = {
        "**", "//", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "(",
        ")",  "[",  "]",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
    for (const std::string_view op : kOperators) {
      if (!at(op)) continue;
      if (c == '(' || c == '[' || c == '{') open += c;
      if (c == ')' || c == ']' || c == '}') {
        const char opened = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open.empty() || open.back() != opened) {
          return syntax_error(line_, cat("'", op, "' closes nothing"));
        }
        open.pop_back();
      }
      add(Token::Kind::kOperator, std::string(op));
      advance(op.size());
      return {};
    }
    return syntax_error(line_, cat("unexpected character '", std::string(1, c), "'"));
  }

  Result<void> number() {
    size_t size = 0;
    std::string digits;
    const auto take_digits = [&] {
      while (size < rest().size() &&
             (is_digit(rest()[size]) ||
              (rest()[size] == '_' && size + 1 < rest().size() && is_digit(rest()[size + 1])))) {
        if (rest()[size] != '_') digits += rest()[size];
        ++size;
      }
    };
    take_digits();
    const auto digit_at = [&](size_t i) { return i < rest().size() && is_digit(rest()[i]); };
    bool real = false;
    const bool behind_dot = !tokens_.empty() && tokens_.back().kind == Token::Kind::kOperator &&
                            tokens_.back().text == ".";  // foo.0.1 is foo[0][1]
    if (!behind_dot && size < rest().size() && rest()[size] == '.' && digit_at(size + 1)) {
      real = true;
      digits += '.';
      ++size;
      take_digits();
    }
    if (!behind_dot && size < rest().size() && (rest()[size] == 'e' || rest()[size] == 'E')) {
      size_t exponent = size + 1;
      if (exponent < rest().size() && (rest()[exponent] == '+' || rest()[exponent] == '-')) {
        ++exponent;
      }
      if (digit_at(exponent)) {
        real = true;
        digits += rest().substr(size, exponent - size);
        size = exponent;
        take_digits();
      }
    }
    errno = 0;
    Token& token = add(real ? Token::Kind::kFloat : Token::Kind::kInt, digits);
    if (real) {
      token.number = std::strtod(digits.c_str(), nullptr);
    } else {
      token.integer = std::strtoll(digits.c_str(), nullptr, 10);
      if (errno == ERANGE) return syntax_error(line_, "an integer above 2^63");
    }
    advance(size);
    return {};
  }

  Result<void> string() {
    const char quote = rest()[0];
    std::string raw;
    size_t i = 1;
    for (;; ++i) {
      if (i >= rest().size()) return syntax_error(line_, "a string is not closed");
      if (rest()[i] == quote) break;
      raw += rest()[i];
      if (rest()[i] == '\\' && i + 1 < rest().size()) raw += rest()[++i];
    }
    NIBBLE_TRY(std::string text, unescape(raw));
    add(Token::Kind::kString, std::move(text));
    advance(i + 1);
    return {};
  }

  // Python's escapes.
  Result<std::string> unescape(std::string_view raw) const {
    std::string out;
    for (size_t i = 0; i < raw.size(); ++i) {
      if (raw[i] != '\\' || i + 1 >= raw.size()) {
        out += raw[i];
        continue;
      }
      const char c = raw[++i];
      static constexpr std::string_view kFrom = "ntrabfv\\'\"";
      static constexpr std::string_view kTo = "\n\t\r\a\b\f\v\\'\"";
      if (const size_t simple = kFrom.find(c); simple != std::string_view::npos) {
        out += kTo[simple];
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        const std::string hex(raw.substr(i + 1, digits));
        const bool good = hex.size() == digits &&
                          hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
        const unsigned long value = good ? std::strtoul(hex.c_str(), nullptr, 16) : 0x110000UL;
        if (value > 0x10FFFF) return syntax_error(line_, "a broken escape in a string");
        append_utf8(static_cast<char32_t>(value), out);
        i += digits;
      } else if (c >= '0' && c <= '7') {
        char32_t value = 0;
        size_t count = 0;
        while (count < 3 && i < raw.size() && raw[i] >= '0' && raw[i] <= '7') {
          value = value * 8 + static_cast<char32_t>(raw[i] - '0');
          ++i;
          ++count;
        }
        --i;
        append_utf8(value, out);
      } else if (c == 'N') {
        return Error(Code::kUnsupported, cat("line ", line_, ": \\N{...} in a string"));
      } else if (c != '\n') {  // a backslash before a line end joins the lines
        out += '\\';
        out += c;
      }
    }
    return out;
  }

  std::string_view source_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

Error syntax_error(int line, std::string_view what) {
  return Error(Code::kCorruptInput, cat("line ", line, ": ", what));
}

bool python_space(char32_t c) { return (c >= 0x1C && c <= 0x1F) || is_white_space(c); }

std::string_view strip_space(std::string_view text, bool left, bool right) {
  size_t begin = 0;
  size_t end = text.size();
  while (left && begin < end) {
    size_t next = begin;
    if (!python_space(next_code_point(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    size_t before = end;
    if (!python_space(previous_code_point(text, before))) break;
    end = before;
  }
  return text.substr(begin, end - begin);
}

Result<std::vector<Token>> lex(std::string_view source) {
  if (source.size() > kMaxSource) {
    return Error(Code::kUnsupported, cat("a template of ", source.size(), " bytes"));
  }
  const std::string normalized = normalize_lines(to_valid_utf8(source));
  return Lexer(normalized).run();
}

}  // namespace nibble::text::jinja
