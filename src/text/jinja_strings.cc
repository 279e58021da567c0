#include "text/jinja_strings.h"

#include <cstdint>

#include "text/jinja_lexer.h"
#include "text/unicode.h"

namespace nibble::text::jinja {

std::string to_upper(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) append_upper(next_code_point(text, pos), out);
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) append_lower(next_code_point(text, pos), out);
  return out;
}

std::string to_capitalized(std::string_view text) {
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const bool first = pos == 0;
    const char32_t c = next_code_point(text, pos);
    if (first) {
      append_title(c, out);
    } else {
      append_lower(c, out);
    }
  }
  return out;
}

std::string to_title(std::string_view text) {
  std::string out;
  bool inside = false;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = next_code_point(text, pos);
    if (inside) {
      append_lower(c, out);
    } else {
      append_title(c, out);
    }
    inside = is_cased_letter(c);
  }
  return out;
}

std::string to_title_words(std::string_view text) {
  std::string out;
  bool starts = true;
  for (size_t pos = 0; pos < text.size();) {
    const char32_t c = next_code_point(text, pos);
    if (starts) {
      append_upper(c, out);
    } else {
      append_lower(c, out);
    }
    starts = c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || python_space(c);
  }
  return out;
}

std::string_view strip_chars(std::string_view text, std::string_view chars, bool left, bool right) {
  const auto listed = [chars](char32_t c) {
    for (size_t pos = 0; pos < chars.size();) {
      if (next_code_point(chars, pos) == c) return true;
    }
    return false;
  };
  size_t begin = 0;
  size_t end = text.size();
  while (left && begin < end) {
    size_t next = begin;
    if (!listed(next_code_point(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    size_t before = end;
    if (!listed(previous_code_point(text, before))) break;
    end = before;
  }
  return text.substr(begin, end - begin);
}

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const size_t at = pos;
    const char32_t c = next_code_point(text, pos);
    const bool ends = (c >= '\n' && c <= '\r') || (c >= 0x1C && c <= 0x1E) || c == 0x85 ||
                      c == 0x2028 || c == 0x2029;
    if (!ends) continue;
    lines.push_back(text.substr(begin, at - begin));
    if (c == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    begin = pos;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

std::string replace_text(std::string_view text, std::string_view from, std::string_view to,
                         int64_t limit) {
  std::string out;
  size_t pos = 0;
  while (limit != 0) {
    if (from.empty()) {  // between all characters, as Python
      out += to;
      if (pos >= text.size()) return out;
      const size_t begin = pos;
      next_code_point(text, pos);
      out += text.substr(begin, pos - begin);
    } else {
      const size_t at = text.find(from, pos);
      if (at == std::string_view::npos) break;
      out += text.substr(pos, at - pos);
      out += to;
      pos = at + from.size();
    }
    --limit;
  }
  out += text.substr(pos);
  return out;
}

}  // namespace nibble::text::jinja
