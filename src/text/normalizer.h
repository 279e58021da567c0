// The "normalizer" of tokenizer.json: text to text, before splitting.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"
#include "text/pattern.h"
#include "text/unicode.h"

namespace nibble::text {

class Normalizer {
 public:
  /// `json` may be null: nothing is changed. Errors: kUnsupported naming the type.
  static Result<Normalizer> parse(const Json* json);
  bool identity() const { return steps_.empty(); }
  std::string apply(std::string_view text, RegexScratch& scratch) const;

 private:
  struct Step {
    enum class Kind { kForm, kReplace, kPrepend, kLowercase, kStrip } kind = Kind::kForm;
    NormalForm form = NormalForm::kNfc;
    std::optional<Pattern> pattern;
    std::string content;
    bool left = false, right = false;
  };
  Result<void> add(const Json& json, int depth);
  std::vector<Step> steps_;
};

}  // namespace nibble::text
