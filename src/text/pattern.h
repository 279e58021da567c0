// The "pattern" member of Split and Replace: {"Regex": ...} or {"String": ...}.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"
#include "text/regex.h"

namespace nibble::text {

class Pattern {
 public:
  /// `owner` names the component in messages.
  static Result<Pattern> parse(const Json& owner_object, std::string_view owner) {
    const Json* pattern = json_find(owner_object, "pattern");
    if (pattern != nullptr && pattern->is_object() && pattern->size() == 1) {
      Pattern parsed;
      if (const Json* text = json_find(*pattern, "String"); text != nullptr && text->is_string()) {
        parsed.literal_ = text->get<std::string>();
        return parsed;
      }
      if (const Json* text = json_find(*pattern, "Regex"); text != nullptr && text->is_string()) {
        NIBBLE_TRY(Regex regex, Regex::compile(text->get_ref<const std::string&>()), owner);
        parsed.regex_.emplace(std::move(regex));
        return parsed;
      }
    }
    return Error(Code::kCorruptInput,
                 cat(owner, ": 'pattern' is neither {\"String\": text} nor {\"Regex\": text}"));
  }

  /// The first match at or after `from`. An empty literal matches nothing.
  bool find(std::string_view text, size_t from, RegexScratch& scratch, Span& match) const {
    if (regex_) return regex_->find(text, from, scratch, match);
    if (literal_.empty()) return false;
    const size_t at = text.find(literal_, from);
    if (at == std::string_view::npos) return false;
    match = {at, at + literal_.size()};
    return true;
  }

 private:
  std::optional<Regex> regex_;
  std::string literal_;
};

/// `text` with every match replaced by `content`.
std::string replace_all(const Pattern& pattern, std::string_view text, std::string_view content,
                        RegexScratch& scratch);

}  // namespace nibble::text
