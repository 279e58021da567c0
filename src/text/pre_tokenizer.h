// The "pre_tokenizer" of tokenizer.json: a stretch of normalized text to words. Words stay plain
// text; where the file asks for the byte-level alphabet, the model takes the bytes themselves.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"
#include "text/pattern.h"

namespace nibble::text {

/// Words as ranges of a text that the pre-tokenizer may have had to rewrite.
struct Words {
  std::string_view text;  // the input, or `rewritten`
  std::string rewritten;
  std::vector<Span> spans;
  std::vector<Span> scratch;  // the step in the making
  std::string scratch_text;
};

class PreTokenizer {
 public:
  /// `json` may be null: the whole text is one word. Errors: kUnsupported naming type or option.
  static Result<PreTokenizer> parse(const Json* json);
  /// True if the words are spelled in the byte-level alphabet.
  bool byte_level() const { return byte_level_; }
  /// Splits `text` (valid UTF-8, not empty). `first`: it starts the whole input. `words.text` and
  /// spans are valid while `text` and `words` are.
  void split(std::string_view text, bool first, RegexScratch& scratch, Words& words) const;

 private:
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Prepend { kNever, kFirst, kAlways };
  struct Step {
    enum class Kind { kSplit, kDigits, kPunctuation, kWhitespace, kSpacePrefix, kMetaspace } kind;
    std::optional<Pattern> pattern;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    std::string replacement;  // Metaspace
    Prepend prepend = Prepend::kNever;
    bool split_words = true;
  };
  Result<void> add(const Json& json, int depth);
  Result<void> add_split(const Json& json);
  Result<void> add_byte_level(const Json& json);
  Result<void> add_metaspace(const Json& json);
  static Result<Behavior> parse_behavior(const Json& json, std::string_view fallback);
  static void cut(const Step& step, std::string_view text, Span piece, RegexScratch& scratch,
                  std::vector<Span>& out);
  static void metaspace(const Step& step, bool first, RegexScratch& scratch, Words& words);
  static void space_prefix(Words& words);
  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace nibble::text
