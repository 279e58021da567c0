// The "decoder" of tokenizer.json: token spellings to text, as the reference chains its steps.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"
#include "text/pattern.h"

namespace nibble::text {

class TokenDecoder {
 public:
  /// `json` may be null: tokens are joined by spaces, as the reference does.
  /// Errors: kUnsupported naming the type or option.
  static Result<TokenDecoder> parse(const Json* json);

  /// All tokens to text (valid UTF-8).
  std::string decode(std::vector<std::string> tokens, RegexScratch& scratch) const;
  /// True if the text is the bytes of the tokens one after the other, repaired at the end; then
  /// nothing but bytes_of is needed to decode.
  bool bytewise() const { return steps_.size() == 1 && steps_[0].kind == Step::Kind::kByteLevel; }
  /// What one token adds to the text, as bytes; `first`: it is the first of the text.
  std::string bytes_of(std::string_view token, bool first, RegexScratch& scratch) const;
  /// A character that is dropped from the start of the whole text, and at most how often.
  std::string_view stripped_start() const { return strip_start_; }
  size_t stripped_start_count() const { return strip_start_count_; }

 private:
  struct Step {
    enum class Kind { kByteLevel, kReplace, kByteFallback, kFuse, kStrip, kMetaspace } kind;
    std::optional<Pattern> pattern;
    std::string content;  // Replace: the new text; Strip, Metaspace: the character
    size_t start = 0, stop = 0;
    bool prefix = false;  // Metaspace: the first token loses its replacement
  };
  Result<void> add(const Json& json, int depth);
  Result<void> add_strip(const Json& json);
  Result<void> add_metaspace(const Json& json);
  std::vector<Step> steps_;
  bool joined_by_spaces_ = false;
  std::string strip_start_;
  size_t strip_start_count_ = 0;
};

}  // namespace nibble::text
