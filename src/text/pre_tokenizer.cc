#include "text/pre_tokenizer.h"

#include <algorithm>

#include "base/json.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

// The split of GPT-2, which ByteLevel applies itself unless told not to.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Joins matches and gaps of one piece into words, as the behaviours of Split define it.
template <typename Behavior>
class Joiner {
 public:
  Joiner(Behavior behavior, std::vector<Span>& out)
      : behavior_(behavior), begin_(out.size()), out_(out) {}

  void add(Span span, bool is_match) {
    switch (behavior_) {
      case Behavior::kRemoved:
        if (is_match) return;
        break;
      case Behavior::kContiguous:
        if (out_.size() > begin_ && is_match == last_match_) {
          out_.back().end = span.end;
          return;
        }
        break;
      case Behavior::kMergedWithPrevious:
        if (is_match && !last_match_ && out_.size() > begin_) {
          out_.back().end = span.end;
          last_match_ = true;
          return;
        }
        break;
      case Behavior::kMergedWithNext:
        // A match waits for the gap behind it; of two matches in a row the first stands alone.
        if (!is_match && last_match_ && out_.size() > begin_) {
          out_.back().end = span.end;
          last_match_ = false;
          return;
        }
        break;
      case Behavior::kIsolated: break;
    }
    out_.push_back(span);
    last_match_ = is_match;
  }

 private:
  Behavior behavior_;
  size_t begin_;
  bool last_match_ = false;
  std::vector<Span>& out_;
};

}  // namespace

Result<PreTokenizer> PreTokenizer::parse(const Json* json) {
  PreTokenizer pre_tokenizer;
  if (json != nullptr) {
    NIBBLE_TRY(pre_tokenizer.add(*json, 0));
  }
  return pre_tokenizer;
}

Result<PreTokenizer::Behavior> PreTokenizer::parse_behavior(const Json& json,
                                                            std::string_view fallback) {
  NIBBLE_TRY(const std::string name, json_string(json, "behavior", fallback));
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  return Error(Code::kUnsupported, cat("split behavior '", name, "'"));
}

Result<void> PreTokenizer::add(const Json& json, int depth) {
  NIBBLE_TRY(const std::string type_name, json_string(json, "type"), "pre_tokenizer");
  const std::string_view type = type_name;
  if (byte_level_ && type != "Sequence") {
    return Error(Code::kUnsupported, cat("pre_tokenizer '", type, "' behind ByteLevel"));
  }
  if (type == "Sequence") {
    if (depth > 8) return Error(Code::kUnsupported, "pre_tokenizers nested deeper than 8");
    const Json* parts = json_find(json, "pretokenizers");
    if (parts == nullptr || !parts->is_array()) {
      return Error(Code::kCorruptInput, "pre_tokenizer Sequence without 'pretokenizers'");
    }
    for (const Json& part : *parts) {
      NIBBLE_TRY(add(part, depth + 1));
    }
    return {};
  }
  if (type == "Split") return add_split(json);
  if (type == "ByteLevel") return add_byte_level(json);
  if (type == "Metaspace") return add_metaspace(json);
  Step step{};
  if (type == "Digits") {
    step.kind = Step::Kind::kDigits;
    NIBBLE_TRY(const bool individual, json_bool(json, "individual_digits", false));
    step.behavior = individual ? Behavior::kIsolated : Behavior::kContiguous;
  } else if (type == "Punctuation") {
    step.kind = Step::Kind::kPunctuation;
    NIBBLE_TRY(step.behavior, parse_behavior(json, "Isolated"));
  } else if (type == "WhitespaceSplit") {
    step.kind = Step::Kind::kWhitespace;
    step.behavior = Behavior::kRemoved;
  } else {
    return Error(Code::kUnsupported, cat("pre_tokenizer type '", type, "'"));
  }
  steps_.push_back(std::move(step));
  return {};
}

Result<void> PreTokenizer::add_split(const Json& json) {
  Step step{};
  step.kind = Step::Kind::kSplit;
  NIBBLE_TRY(Pattern pattern, Pattern::parse(json, "pre_tokenizer Split"));
  step.pattern.emplace(std::move(pattern));
  NIBBLE_TRY(step.behavior, parse_behavior(json, "Isolated"));
  NIBBLE_TRY(step.invert, json_bool(json, "invert", false));
  steps_.push_back(std::move(step));
  return {};
}

Result<void> PreTokenizer::add_byte_level(const Json& json) {
  NIBBLE_TRY(const bool prefix, json_bool(json, "add_prefix_space", true));
  NIBBLE_TRY(const bool use_regex, json_bool(json, "use_regex", true));
  if (prefix) {
    Step step{};
    step.kind = Step::Kind::kSpacePrefix;
    steps_.push_back(std::move(step));
  }
  if (use_regex) {
    Step step{};
    step.kind = Step::Kind::kSplit;
    const Json split = {{"pattern", {{"Regex", kGpt2Pattern}}}};
    NIBBLE_TRY(Pattern pattern, Pattern::parse(split, "pre_tokenizer ByteLevel"));
    step.pattern.emplace(std::move(pattern));
    steps_.push_back(std::move(step));
  }
  byte_level_ = true;
  return {};
}

Result<void> PreTokenizer::add_metaspace(const Json& json) {
  Step step{};
  step.kind = Step::Kind::kMetaspace;
  NIBBLE_TRY(step.replacement, json_string(json, "replacement", "\xE2\x96\x81"));
  if (count_code_points(step.replacement) != 1) {
    return Error(Code::kCorruptInput, "Metaspace replacement is not one character");
  }
  NIBBLE_TRY(const bool add_prefix, json_bool(json, "add_prefix_space", true));
  NIBBLE_TRY(const std::string scheme,
             json_string(json, "prepend_scheme", add_prefix ? "always" : "never"));
  if (scheme == "always") {
    step.prepend = Prepend::kAlways;
  } else if (scheme == "first") {
    step.prepend = Prepend::kFirst;
  } else if (scheme != "never") {
    return Error(Code::kUnsupported, cat("Metaspace prepend_scheme '", scheme, "'"));
  }
  NIBBLE_TRY(step.split_words, json_bool(json, "split", true));
  step.behavior = Behavior::kMergedWithNext;
  const Json split = {{"pattern", {{"String", step.replacement}}}};
  NIBBLE_TRY(Pattern pattern, Pattern::parse(split, "pre_tokenizer Metaspace"));
  step.pattern.emplace(std::move(pattern));
  steps_.push_back(std::move(step));
  return {};
}

// Cuts one piece with the step's pattern or character class.
void PreTokenizer::cut(const Step& step, std::string_view text, Span piece, RegexScratch& scratch,
                       std::vector<Span>& out) {
  Joiner<Behavior> joiner(step.behavior, out);
  const std::string_view part = text.substr(piece.begin, piece.end - piece.begin);
  const auto emit = [&](size_t begin, size_t end, bool is_match) {
    if (begin < end) {
      joiner.add({piece.begin + begin, piece.begin + end}, is_match != step.invert);
    }
  };
  size_t done = 0;
  if (step.pattern) {
    size_t from = 0;
    Span match;
    while (from <= part.size() && step.pattern->find(part, from, scratch, match)) {
      emit(done, match.begin, false);
      emit(match.begin, match.end, true);
      done = match.end;
      from = match.end;
      if (match.end == match.begin) {
        if (from >= part.size()) break;
        next_code_point(part, from);
      }
    }
    emit(done, part.size(), false);
    return;
  }
  for (size_t pos = 0; pos < part.size();) {
    const size_t begin = pos;
    const char32_t c = next_code_point(part, pos);
    const bool is_match = step.kind == Step::Kind::kDigits        ? is_numeric(c)
                          : step.kind == Step::Kind::kPunctuation ? is_punctuation(c)
                                                                  : is_white_space(c);
    if (!is_match) continue;
    emit(done, begin, false);
    emit(begin, pos, true);
    done = pos;
  }
  emit(done, part.size(), false);
}

// A space in front of every piece that has none.
void PreTokenizer::space_prefix(Words& words) {
  words.scratch_text.clear();
  words.scratch.clear();
  for (const Span piece : words.spans) {
    const size_t begin = words.scratch_text.size();
    if (words.text[piece.begin] != ' ') words.scratch_text += ' ';
    words.scratch_text.append(words.text, piece.begin, piece.end - piece.begin);
    words.scratch.push_back({begin, words.scratch_text.size()});
  }
  std::swap(words.rewritten, words.scratch_text);
  std::swap(words.spans, words.scratch);
  words.text = words.rewritten;
}

// Spaces become the replacement, which may also be put in front; then each starts a new word.
void PreTokenizer::metaspace(const Step& step, bool first, RegexScratch& scratch, Words& words) {
  words.scratch_text.clear();
  words.scratch.clear();
  bool at_start = first;
  for (const Span piece : words.spans) {
    const size_t begin = words.scratch_text.size();
    for (size_t i = piece.begin; i < piece.end; ++i) {
      if (words.text[i] == ' ') {
        words.scratch_text += step.replacement;
      } else {
        words.scratch_text += words.text[i];
      }
    }
    const bool prepend = step.prepend == Prepend::kAlways ||
                         (step.prepend == Prepend::kFirst && at_start && piece.begin == 0);
    if (prepend &&
        !std::string_view(words.scratch_text).substr(begin).starts_with(step.replacement)) {
      words.scratch_text.insert(begin, step.replacement);
    }
    at_start = false;
    words.scratch.push_back({begin, words.scratch_text.size()});
  }
  std::swap(words.rewritten, words.scratch_text);
  std::swap(words.spans, words.scratch);
  words.text = words.rewritten;
  if (!step.split_words) return;
  words.scratch.clear();
  for (const Span piece : words.spans) cut(step, words.text, piece, scratch, words.scratch);
  std::swap(words.spans, words.scratch);
}

void PreTokenizer::split(std::string_view text, bool first, RegexScratch& scratch,
                         Words& words) const {
  words.text = text;
  words.spans.assign(1, Span{0, text.size()});
  for (const Step& step : steps_) {
    if (step.kind == Step::Kind::kSpacePrefix) {
      space_prefix(words);
    } else if (step.kind == Step::Kind::kMetaspace) {
      metaspace(step, first, scratch, words);
    } else {
      words.scratch.clear();
      for (const Span piece : words.spans) cut(step, words.text, piece, scratch, words.scratch);
      std::swap(words.spans, words.scratch);
    }
  }
}

}  // namespace nibble::text
