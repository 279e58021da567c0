#include "text/normalizer.h"

#include "base/json.h"

namespace nibble::text {
namespace {

std::string strip(std::string_view text, bool left, bool right) {
  size_t begin = 0;
  size_t end = text.size();
  while (left && begin < end) {
    size_t next = begin;
    if (!is_white_space(next_code_point(text, next))) break;
    begin = next;
  }
  while (right && end > begin) {
    size_t before = end;
    if (!is_white_space(previous_code_point(text, before))) break;
    end = before;
  }
  return std::string(text.substr(begin, end - begin));
}

std::string lowercase(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) append_lower(next_code_point(text, pos), out);
  return out;
}

}  // namespace

std::string replace_all(const Pattern& pattern, std::string_view text, std::string_view content,
                        RegexScratch& scratch) {
  std::string out;
  size_t done = 0;
  size_t from = 0;
  Span match;
  while (from <= text.size() && pattern.find(text, from, scratch, match)) {
    out.append(text, done, match.begin - done);
    out.append(content);
    done = match.end;
    from = match.end;
    if (match.end == match.begin) {  // an empty match: go on behind the next character
      if (from >= text.size()) break;
      next_code_point(text, from);
    }
  }
  out.append(text, done, text.size() - done);
  return out;
}

Result<Normalizer> Normalizer::parse(const Json* json) {
  Normalizer normalizer;
  if (json != nullptr) {
    NIBBLE_TRY(normalizer.add(*json, 0));
  }
  return normalizer;
}

Result<void> Normalizer::add(const Json& json, int depth) {
  NIBBLE_TRY(const std::string type_name, json_string(json, "type"), "normalizer");
  const std::string_view type = type_name;
  Step step;
  if (type == "Sequence") {
    if (depth > 8) return Error(Code::kUnsupported, "normalizers nested deeper than 8");
    const Json* parts = json_find(json, "normalizers");
    if (parts == nullptr || !parts->is_array()) {
      return Error(Code::kCorruptInput, "normalizer Sequence without 'normalizers'");
    }
    for (const Json& part : *parts) {
      NIBBLE_TRY(add(part, depth + 1));
    }
    return {};
  }
  if (type == "NFC" || type == "NFD" || type == "NFKC" || type == "NFKD") {
    step.form = type == "NFC"    ? NormalForm::kNfc
                : type == "NFD"  ? NormalForm::kNfd
                : type == "NFKC" ? NormalForm::kNfkc
                                 : NormalForm::kNfkd;
  } else if (type == "Replace") {
    step.kind = Step::Kind::kReplace;
    NIBBLE_TRY(Pattern pattern, Pattern::parse(json, "normalizer Replace"));
    step.pattern.emplace(std::move(pattern));
    NIBBLE_TRY(step.content, json_string(json, "content"), "normalizer Replace");
  } else if (type == "Prepend") {
    step.kind = Step::Kind::kPrepend;
    NIBBLE_TRY(step.content, json_string(json, "prepend"), "normalizer Prepend");
  } else if (type == "Lowercase") {
    step.kind = Step::Kind::kLowercase;
  } else if (type == "Strip") {
    step.kind = Step::Kind::kStrip;
    NIBBLE_TRY(step.left, json_bool(json, "strip_left", true));
    NIBBLE_TRY(step.right, json_bool(json, "strip_right", true));
  } else {
    return Error(Code::kUnsupported, cat("normalizer type '", type, "'"));
  }
  steps_.push_back(std::move(step));
  return {};
}

std::string Normalizer::apply(std::string_view text, RegexScratch& scratch) const {
  std::string now(text);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kForm: now = normalize(now, step.form); break;
      case Step::Kind::kReplace:
        now = replace_all(*step.pattern, now, step.content, scratch);
        break;
      case Step::Kind::kPrepend:
        if (!now.empty()) now.insert(0, step.content);
        break;
      case Step::Kind::kLowercase: now = lowercase(now); break;
      case Step::Kind::kStrip: now = strip(now, step.left, step.right); break;
    }
  }
  return now;
}

}  // namespace nibble::text
