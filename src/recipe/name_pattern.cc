#include "recipe/name_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "recipe/module_name.h"

namespace nibble::recipe {
namespace {

constexpr size_t kMaxEntryBytes = 4096;
constexpr uint32_t kMatchLimit = 20000;  // a config cannot make matching take forever

/// Matches one set "[...]" at `at`; sets `next` behind it. False in `valid` if it is not closed.
bool set_matches(std::string_view pattern, size_t at, char c, size_t& next, bool& valid) {
  size_t i = at + 1;
  const bool negated = i < pattern.size() && pattern[i] == '!';
  if (negated) ++i;
  bool found = false;
  for (bool first = true; i < pattern.size(); first = false) {
    if (pattern[i] == ']' && !first) {
      next = i + 1;
      valid = true;
      return found != negated;
    }
    if (i + 2 < pattern.size() && pattern[i + 1] == '-' && pattern[i + 2] != ']') {
      found = found || (pattern[i] <= c && c <= pattern[i + 2]);
      i += 3;
    } else {
      found = found || pattern[i] == c;
      ++i;
    }
  }
  valid = false;
  return false;
}

/// One pattern element other than '*' against one character.
bool element_matches(std::string_view pattern, size_t at, char c, size_t& next) {
  next = at + 1;
  if (pattern[at] == '?') return true;
  if (pattern[at] == '[') {
    bool valid = false;
    const bool found = set_matches(pattern, at, c, next, valid);
    if (valid) return found;
    next = at + 1;
  }
  return pattern[at] == c;
}

bool is_shell(std::string_view entry) { return entry.find_first_of("*?[") != entry.npos; }

/// N of "layers.N." at a component boundary, if everything an entry matches must contain it.
int64_t bound_layer(std::string_view entry) {
  constexpr std::string_view kWord = "layers.";
  const size_t at = entry.find(kWord);
  if (at == std::string_view::npos || (at > 0 && entry[at - 1] != '.')) return -1;
  if (entry.find('[') < at) return -1;  // might be inside a set
  const std::string_view rest = entry.substr(at + kWord.size());
  const size_t digits = rest.find_first_not_of("0123456789");
  if (digits == std::string_view::npos || rest[digits] != '.') return -1;
  return leading_number(rest);
}

}  // namespace

struct NameList::Regex {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
  Regex() = default;
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;
  ~Regex() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
  bool matches(std::string_view text) const {
    pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
    if (data == nullptr) return false;
    const int rc = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                               PCRE2_ANCHORED, data, context);
    pcre2_match_data_free(data);
    return rc >= 0;
  }
};

bool shell_match(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0;
  size_t star = std::string_view::npos, star_text = 0;
  while (t < text.size()) {
    size_t next = 0;
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (p < pattern.size() && element_matches(pattern, p, text[t], next)) {
      p = next;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

Result<void> NameList::add(std::string_view entry) {
  if (entry.size() > kMaxEntryBytes) {
    return Error(Code::kCorruptInput,
                 cat("name pattern '", entry.substr(0, 60), "...': ", entry.size(),
                     " bytes, expected at most ", kMaxEntryBytes));
  }
  if (entry.empty()) return {};
  Entry made;
  if (entry.starts_with("re:")) {
    made.text = std::string(entry.substr(3));
    auto regex = std::make_shared<Regex>();
    int code = 0;
    PCRE2_SIZE offset = 0;
    regex->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(made.text.data()), made.text.size(), 0,
                                &code, &offset, nullptr);
    regex->context = pcre2_match_context_create(nullptr);
    if (regex->code == nullptr || regex->context == nullptr) {
      return Error(Code::kCorruptInput, cat("name pattern '", entry, "': not a regular expression ",
                                            "(error ", code, " at byte ", offset, ")"));
    }
    pcre2_set_match_limit(regex->context, kMatchLimit);
    made.regex = std::move(regex);
    anywhere_.push_back(std::move(made));
    return {};
  }
  made.shell = is_shell(entry);
  made.text = std::string(without_prefix(entry));
  if (!made.shell) exact_.insert(made.text);
  if (!made.shell && !substrings_) return {};
  const int64_t layer = bound_layer(made.text);
  if (layer >= 0) {
    by_layer_[layer].push_back(std::move(made));
  } else {
    anywhere_.push_back(std::move(made));
  }
  return {};
}

bool NameList::entry_matches(const Entry& entry, std::string_view module) const {
  const std::string_view bare = without_prefix(module);
  if (entry.regex != nullptr) return entry.regex->matches(module) || entry.regex->matches(bare);
  if (entry.shell) return shell_match(entry.text, bare) || shell_match(entry.text, module);
  return bare.find(entry.text) != std::string_view::npos;
}

bool NameList::matches(std::string_view module) const {
  if (exact_.contains(std::string(without_prefix(module)))) return true;
  if (!by_layer_.empty()) {
    constexpr std::string_view kWord = "layers.";
    const size_t at = module.find(kWord);
    if (at != std::string_view::npos) {
      const auto found = by_layer_.find(leading_number(module.substr(at + kWord.size())));
      if (found != by_layer_.end()) {
        for (const Entry& entry : found->second) {
          if (entry_matches(entry, module)) return true;
        }
      }
    }
  }
  for (const Entry& entry : anywhere_) {
    if (entry_matches(entry, module)) return true;
  }
  return false;
}

}  // namespace nibble::recipe
