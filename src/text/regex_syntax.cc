// Oniguruma pattern syntax (as tokenizer.json uses it) to PCRE2 syntax; see regex.h for the
// contract. One pass over the pattern; classes are rebuilt from code points and sets, so that no
// character of ours can be read as syntax by PCRE2.
// Source: oniguruma doc/RE (6.9) and doc/UNICODE_PROPERTIES; pcre2pattern(3) of 10.42.
#include <algorithm>
#include <array>
#include <vector>

#include "text/regex.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

constexpr int kMaxClassDepth = 16;
// White_Space of Unicode, and its complement, as the inside of a class.
constexpr std::string_view kSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
constexpr std::string_view kNotSpace =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}"
    "\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}"
    "\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}";
constexpr std::array<std::string_view, 37> kCategories = {
    "C",  "Cc", "Cf", "Cn", "Co", "Cs", "L",  "Ll", "Lm", "Lo", "Lt", "Lu", "M",
    "Mc", "Me", "Mn", "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi",
    "Po", "Ps", "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs"};
// Names that are neither a category nor a script; their sets differ between the libraries.
constexpr std::array<std::string_view, 16> kOtherProperties = {
    "Alnum", "Alpha", "Blank", "Cntrl", "Digit", "Graph",  "Lower", "Print",
    "Punct", "Space", "Upper", "Word",  "ASCII", "XDigit", "Any",   "Assigned"};

std::string code_point_text(char32_t c) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string digits;
  do {
    digits.insert(digits.begin(), kHex[c & 15]);
    c >>= 4;
  } while (c != 0);
  return "\\x{" + digits + "}";
}

// One escape: a single character, or a set given as the inside of a class, or an assertion.
struct Escape {
  enum class Kind { kChar, kSet, kAssertion } kind = Kind::kChar;
  char32_t code_point = 0;
  std::string text;
};

class Rewriter {
 public:
  explicit Rewriter(std::string_view pattern) : in_(pattern) {}

  Result<std::string> run() {
    while (pos_ < in_.size()) {
      NIBBLE_TRY(one());
    }
    if (!groups_.empty()) return corrupt("'(' is not closed");
    return std::move(out_);
  }

 private:
  Error corrupt(std::string_view what) const {
    return Error(Code::kCorruptInput,
                 cat("pattern '", in_.substr(0, 200), "' at byte ", pos_, ": ", what));
  }
  Error unsupported(std::string_view what) const {
    return Error(Code::kUnsupported,
                 cat("pattern '", in_.substr(0, 200), "' at byte ", pos_, ": ", what));
  }
  bool at(std::string_view text) const { return in_.substr(pos_).starts_with(text); }
  void atom(std::string_view text) {
    atom_start_ = out_.size();
    out_ += text;
    repeats_ = 0;
  }

  Result<void> one() {
    switch (in_[pos_]) {
      case '\\': {
        NIBBLE_TRY(const Escape escape, read_escape(false));
        if (escape.kind == Escape::Kind::kChar) {
          atom(code_point_text(escape.code_point));
        } else if (escape.kind == Escape::Kind::kSet) {
          atom("[" + escape.text + "]");
        } else {
          atom(escape.text);
        }
        return {};
      }
      case '[': {
        NIBBLE_TRY(const std::string text, read_class(0));
        atom(text);
        return {};
      }
      case '(': return open_group();
      case ')':
        if (groups_.empty()) return corrupt("')' without '('");
        out_ += ')';
        atom_start_ = groups_.back();
        groups_.pop_back();
        repeats_ = 0;
        ++pos_;
        return {};
      case '|':
        out_ += '|';
        atom_start_ = kNoAtom;
        ++pos_;
        return {};
      case '*':
      case '+':
      case '?': return repeat_sign();
      case '{': return repeat_braces();
      case '^':
      case '$': return unsupported("line anchors ^ and $");
      case '.':
        atom(".");
        ++pos_;
        return {};
      default: {
        const char32_t c = next_code_point(in_, pos_);
        atom(code_point_text(c));
        return {};
      }
    }
  }

  Result<void> open_group() {
    if (groups_.size() >= 90) return unsupported("groups nested deeper than 90");
    // Captures are never used (back references are refused), so every plain group is (?:.
    static constexpr std::array<std::string_view, 7> kPrefixes = {
        "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
    groups_.push_back(out_.size());
    atom_start_ = kNoAtom;
    for (const std::string_view prefix : kPrefixes) {
      if (at(prefix)) {
        out_ += prefix;
        pos_ += prefix.size();
        return {};
      }
    }
    if (pos_ == 0 && at("(?i)")) {
      groups_.pop_back();
      out_ += "(?i)";
      pos_ += 4;
      return {};
    }
    if (at("(?<")) {
      const size_t end = in_.find('>', pos_);
      if (end == std::string_view::npos) return corrupt("group name is not closed");
      out_ += "(?:";
      pos_ = end + 1;
      return {};
    }
    if (at("(?")) return unsupported(cat("group '", in_.substr(pos_, 4), "'"));
    out_ += "(?:";
    ++pos_;
    return {};
  }

  Result<void> need_atom() const {
    if (atom_start_ == kNoAtom) return corrupt("a repeat without something to repeat");
    if (repeats_ > 0) return unsupported("a repeat of a repeat");
    return {};
  }

  Result<void> repeat_sign() {
    NIBBLE_TRY(need_atom());
    out_ += in_[pos_++];
    if (at("?") || at("+")) out_ += in_[pos_++];
    repeats_ = 1;
    return {};
  }

  Result<void> repeat_braces() {
    size_t p = pos_ + 1;
    const auto digits = [&] {
      const size_t begin = p;
      while (p < in_.size() && in_[p] >= '0' && in_[p] <= '9') ++p;
      return std::string(in_.substr(begin, p - begin));
    };
    const std::string low = digits();
    const bool comma = p < in_.size() && in_[p] == ',';
    if (comma) ++p;
    const std::string high = comma ? digits() : low;
    const bool closed = p < in_.size() && in_[p] == '}';
    if (!closed || (low.empty() && high.empty())) {  // not a repeat: a literal brace
      atom("\\{");
      ++pos_;
      return {};
    }
    NIBBLE_TRY(need_atom());
    if (low.size() > 4 || high.size() > 4) return unsupported("a repeat above 9999");
    pos_ = p + 1;
    std::string braces = "{" + (low.empty() ? "0" : low);
    if (comma) braces += "," + high;
    braces += "}";
    if (at("+")) {  // not possessive in Oniguruma: the repeat, repeated
      out_.insert(atom_start_, "(?:");
      out_ += braces + ")+";
      ++pos_;
    } else if (at("?")) {
      if (!comma) return unsupported("{n}?");
      out_ += braces + "?";
      ++pos_;
    } else {
      out_ += braces;
    }
    repeats_ = 1;
    return {};
  }

  // \p{Name}, \P{Name}, \p{^Name}: pos_ is at the backslash.
  Result<std::string> read_property() {
    bool negated = in_[pos_ + 1] == 'P';
    const size_t open = pos_ + 2;
    if (open >= in_.size() || in_[open] != '{') return unsupported("\\p without braces");
    const size_t close = in_.find('}', open);
    if (close == std::string_view::npos) return corrupt("\\p{ is not closed");
    std::string_view name = in_.substr(open + 1, close - open - 1);
    if (name.starts_with('^')) {
      negated = !negated;
      name.remove_prefix(1);
    }
    const bool plain = !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    });
    if (!plain || std::find(kOtherProperties.begin(), kOtherProperties.end(), name) !=
                      kOtherProperties.end()) {
      return unsupported(cat("property \\p{", name.substr(0, 40), "}"));
    }
    const bool category =
        std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end();
    if (!category && name.size() < 3) return unsupported(cat("property \\p{", name, "}"));
    pos_ = close + 1;
    return cat(negated ? "\\P{" : "\\p{", category ? "" : "sc:", name, "}");
  }

  Result<char32_t> read_hex(size_t begin, size_t count) {
    char32_t value = 0;
    if (count == 0 || count > 6 || begin + count > in_.size()) return corrupt("broken hex escape");
    for (size_t i = begin; i < begin + count; ++i) {
      const char c = in_[i];
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) return corrupt("broken hex escape");
      value = value * 16 + static_cast<char32_t>(digit);
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
      return corrupt("escape is not a code point");
    }
    return value;
  }

  Result<Escape> read_escape(bool in_class) {
    if (pos_ + 1 >= in_.size()) return corrupt("pattern ends with a backslash");
    const char c = in_[pos_ + 1];
    Escape escape;
    const auto set = [&](std::string_view text) {
      escape.kind = Escape::Kind::kSet;
      escape.text = text;
      pos_ += 2;
      return escape;
    };
    const auto character = [&](char32_t code_point) {
      escape.code_point = code_point;
      pos_ += 2;
      return escape;
    };
    switch (c) {
      case 'p':
      case 'P': {
        NIBBLE_TRY(escape.text, read_property());
        escape.kind = Escape::Kind::kSet;
        return escape;
      }
      case 's': return set(kSpace);
      case 'S': return set(kNotSpace);
      case 'd': return set("\\p{Nd}");
      case 'D': return set("\\P{Nd}");
      case 'n': return character('\n');
      case 'r': return character('\r');
      case 't': return character('\t');
      case 'f': return character('\f');
      case 'v': return character('\v');
      case 'a': return character('\a');
      case 'e': return character(0x1B);
      case 'A':
      case 'z':
      case 'Z':
        if (in_class) break;
        escape.kind = Escape::Kind::kAssertion;
        escape.text = std::string("\\") + c;
        pos_ += 2;
        return escape;
      case 'u': {
        NIBBLE_TRY(escape.code_point, read_hex(pos_ + 2, 4));
        pos_ += 6;
        return escape;
      }
      case 'x': return read_x_escape();
      default: break;
    }
    if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) {
      return unsupported(cat("escape \\", std::string(1, c)));
    }
    ++pos_;
    escape.code_point = next_code_point(in_, pos_);
    return escape;
  }

  Result<Escape> read_x_escape() {
    Escape escape;
    if (pos_ + 2 < in_.size() && in_[pos_ + 2] == '{') {
      const size_t close = in_.find('}', pos_);
      if (close == std::string_view::npos) return corrupt("\\x{ is not closed");
      NIBBLE_TRY(escape.code_point, read_hex(pos_ + 3, close - pos_ - 3));
      pos_ = close + 1;
      return escape;
    }
    NIBBLE_TRY(escape.code_point, read_hex(pos_ + 2, 2));
    if (escape.code_point > 0x7F) return unsupported("\\x of a byte above 7F");
    pos_ += 4;
    return escape;
  }

  // One operand of && in a class: characters and sets for one PCRE2 class, and nested classes.
  struct Operand {
    std::string inside;
    std::vector<std::string> nested;
    bool empty() const { return inside.empty() && nested.empty(); }
    std::string text() const {
      if (nested.empty()) return "[" + inside + "]";
      std::string all = "(?:";
      if (!inside.empty()) all += "[" + inside + "]|";
      for (size_t i = 0; i < nested.size(); ++i) all += (i > 0 ? "|" : "") + nested[i];
      return all + ")";
    }
  };

  Result<std::string> read_class(int depth) {
    if (depth >= kMaxClassDepth) return unsupported("classes nested deeper than 16");
    ++pos_;
    const bool negated = at("^");
    if (negated) ++pos_;
    std::vector<Operand> operands(1);
    bool first = true;
    while (true) {
      if (pos_ >= in_.size()) return corrupt("'[' is not closed");
      Operand& operand = operands.back();
      if (in_[pos_] == ']' && !first) break;
      first = false;
      if (at("&&")) {
        if (operand.empty()) return corrupt("&& without a left side");
        pos_ += 2;
        operands.emplace_back();
      } else if (at("[:")) {
        return unsupported("POSIX bracket");
      } else if (in_[pos_] == '[') {
        NIBBLE_TRY(std::string nested, read_class(depth + 1));
        operand.nested.push_back(std::move(nested));
      } else {
        NIBBLE_TRY(read_class_item(operand));
      }
    }
    ++pos_;
    if (operands.back().empty()) return corrupt("&& without a right side");
    if (operands.size() == 1 && operands[0].nested.empty()) {
      return (negated ? "[^" : "[") + operands[0].inside + "]";
    }
    std::string positive = "(?:";
    for (size_t i = 1; i < operands.size(); ++i) positive += "(?=" + operands[i].text() + ")";
    positive += operands[0].text() + ")";
    if (!negated) return positive;
    return "(?:(?!" + positive + ")[\\x{0}-\\x{10ffff}])";
  }

  // A set, a character, or a range of characters.
  Result<void> read_class_item(Operand& operand) {
    Escape low;
    NIBBLE_TRY(low, read_class_char());
    if (low.kind == Escape::Kind::kSet) {
      operand.inside += low.text;
      if (at("-") && !at("-]") && !at("-&&")) return unsupported("a range that starts with a set");
      return {};
    }
    operand.inside += code_point_text(low.code_point);
    if (!at("-") || at("-]") || at("-&&") || at("-[")) return {};
    ++pos_;
    Escape high;
    NIBBLE_TRY(high, read_class_char());
    if (high.kind == Escape::Kind::kSet) return unsupported("a range that ends with a set");
    if (high.code_point < low.code_point) return corrupt("empty range in a class");
    operand.inside += "-" + code_point_text(high.code_point);
    return {};
  }

  Result<Escape> read_class_char() {
    if (pos_ >= in_.size()) return corrupt("'[' is not closed");
    if (in_[pos_] == '\\') return read_escape(true);
    Escape escape;
    escape.code_point = next_code_point(in_, pos_);
    return escape;
  }

  static constexpr size_t kNoAtom = static_cast<size_t>(-1);
  std::string_view in_;
  size_t pos_ = 0;
  std::string out_;
  size_t atom_start_ = kNoAtom;
  int repeats_ = 0;
  std::vector<size_t> groups_;
};

}  // namespace

Result<std::string> pcre_from_oniguruma(std::string_view pattern) {
  if (!is_valid_utf8(pattern)) return Error(Code::kCorruptInput, "pattern is not UTF-8");
  if (pattern.size() > 64 * 1024) {
    return Error(Code::kUnsupported, cat("pattern of ", pattern.size(), " bytes"));
  }
  return Rewriter(pattern).run();
}

}  // namespace nibble::text
