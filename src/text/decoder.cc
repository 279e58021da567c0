#include "text/decoder.h"

#include "base/json.h"
#include "text/bpe.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

// The byte that <0xNN> names, or -1.
int fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

// Bytes of a token in the byte-level alphabet; tokens outside of it stand for themselves.
std::string byte_level_bytes(std::string_view token) {
  std::string bytes;
  return undo_byte_level(token, bytes) ? bytes : std::string(token);
}

std::vector<std::string> join_all(const std::vector<std::string>& tokens) {
  std::string all;
  for (const std::string& token : tokens) all += token;
  std::vector<std::string> out;
  out.push_back(std::move(all));
  return out;
}

// Runs of byte tokens become text; a run that is not UTF-8 becomes one U+FFFD a byte.
std::vector<std::string> byte_fallback(const std::vector<std::string>& tokens) {
  std::vector<std::string> out;
  std::string run;
  const auto flush = [&] {
    if (is_valid_utf8(run)) {
      if (!run.empty()) out.push_back(run);
    } else {
      out.insert(out.end(), run.size(), "\xEF\xBF\xBD");
    }
    run.clear();
  };
  for (const std::string& token : tokens) {
    const int byte = fallback_byte(token);
    if (byte >= 0) {
      run.push_back(static_cast<char>(byte));
    } else {
      flush();
      out.push_back(token);
    }
  }
  flush();
  return out;
}

std::string strip(const std::string& token, std::string_view what, size_t start, size_t stop) {
  std::string_view rest = token;
  for (size_t i = 0; i < start && rest.starts_with(what); ++i) rest.remove_prefix(what.size());
  for (size_t i = 0; i < stop && rest.ends_with(what); ++i) rest.remove_suffix(what.size());
  return std::string(rest);
}

std::string undo_metaspace(std::string_view token, std::string_view what, std::string_view with) {
  std::string out;
  for (size_t pos = 0; pos < token.size();) {
    if (token.substr(pos).starts_with(what)) {
      out += with;
      pos += what.size();
    } else {
      out += token[pos++];
    }
  }
  return out;
}

}  // namespace

Result<TokenDecoder> TokenDecoder::parse(const Json* json) {
  TokenDecoder decoder;
  if (json == nullptr) {
    decoder.joined_by_spaces_ = true;
    return decoder;
  }
  NIBBLE_TRY(decoder.add(*json, 0));
  return decoder;
}

Result<void> TokenDecoder::add(const Json& json, int depth) {
  NIBBLE_TRY(const std::string type_name, json_string(json, "type"), "decoder");
  const std::string_view type = type_name;
  Step step{};
  if (type == "Sequence") {
    if (depth > 8) return Error(Code::kUnsupported, "decoders nested deeper than 8");
    const Json* parts = json_find(json, "decoders");
    if (parts == nullptr || !parts->is_array()) {
      return Error(Code::kCorruptInput, "decoder Sequence without 'decoders'");
    }
    for (const Json& part : *parts) {
      NIBBLE_TRY(add(part, depth + 1));
    }
    return {};
  }
  if (type == "Strip") return add_strip(json);
  if (type == "Metaspace") return add_metaspace(json);
  if (type == "ByteLevel") {
    step.kind = Step::Kind::kByteLevel;
  } else if (type == "ByteFallback") {
    step.kind = Step::Kind::kByteFallback;
  } else if (type == "Fuse") {
    step.kind = Step::Kind::kFuse;
  } else if (type == "Replace") {
    step.kind = Step::Kind::kReplace;
    NIBBLE_TRY(Pattern pattern, Pattern::parse(json, "decoder Replace"));
    step.pattern.emplace(std::move(pattern));
    NIBBLE_TRY(step.content, json_string(json, "content"), "decoder Replace");
  } else {
    return Error(Code::kUnsupported, cat("decoder type '", type, "'"));
  }
  steps_.push_back(std::move(step));
  return {};
}

Result<void> TokenDecoder::add_strip(const Json& json) {
  Step step{};
  step.kind = Step::Kind::kStrip;
  NIBBLE_TRY(step.content, json_string(json, "content"), "decoder Strip");
  NIBBLE_TRY(const int64_t start, json_int(json, "start", 0));
  NIBBLE_TRY(const int64_t stop, json_int(json, "stop", 0));
  if (count_code_points(step.content) != 1 || start < 0 || stop < 0 || start > 1024) {
    return Error(Code::kCorruptInput, "decoder Strip: content is one character, counts 0 to 1024");
  }
  // Only a strip of the whole text's start can be decoded token by token.
  const bool fused = !steps_.empty() && steps_.back().kind == Step::Kind::kFuse;
  if (stop != 0 || !fused) {
    return Error(Code::kUnsupported, "decoder Strip other than of the start, behind Fuse");
  }
  step.start = static_cast<size_t>(start);
  strip_start_ = step.content;
  strip_start_count_ = step.start;
  steps_.push_back(std::move(step));
  return {};
}

Result<void> TokenDecoder::add_metaspace(const Json& json) {
  Step step{};
  step.kind = Step::Kind::kMetaspace;
  NIBBLE_TRY(step.content, json_string(json, "replacement", "\xE2\x96\x81"));
  if (step.content.empty()) return Error(Code::kCorruptInput, "Metaspace replacement is empty");
  NIBBLE_TRY(const bool add_prefix, json_bool(json, "add_prefix_space", true));
  NIBBLE_TRY(const std::string scheme,
             json_string(json, "prepend_scheme", add_prefix ? "always" : "never"));
  step.prefix = scheme != "never";
  steps_.push_back(std::move(step));
  return {};
}

std::string TokenDecoder::decode(std::vector<std::string> tokens, RegexScratch& scratch) const {
  if (joined_by_spaces_) {
    std::string out;
    for (size_t i = 0; i < tokens.size(); ++i) out += (i > 0 ? " " : "") + tokens[i];
    return to_valid_utf8(out);
  }
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kByteLevel: {
        std::string bytes;
        for (const std::string& token : tokens) bytes += byte_level_bytes(token);
        tokens.assign(1, to_valid_utf8(bytes));
        break;
      }
      case Step::Kind::kReplace:
        for (std::string& token : tokens) {
          token = replace_all(*step.pattern, token, step.content, scratch);
        }
        break;
      case Step::Kind::kByteFallback: tokens = byte_fallback(tokens); break;
      case Step::Kind::kFuse: tokens = join_all(tokens); break;
      case Step::Kind::kStrip:
        for (std::string& token : tokens) token = strip(token, step.content, step.start, step.stop);
        break;
      case Step::Kind::kMetaspace:
        for (size_t i = 0; i < tokens.size(); ++i) {
          tokens[i] = undo_metaspace(tokens[i], step.content, i == 0 && step.prefix ? "" : " ");
        }
        break;
    }
  }
  std::string out;
  for (const std::string& token : tokens) out += token;
  return to_valid_utf8(out);
}

std::string TokenDecoder::bytes_of(std::string_view token, bool first,
                                   RegexScratch& scratch) const {
  if (joined_by_spaces_) return cat(first ? "" : " ", token);
  std::string now(token);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kByteLevel: now = byte_level_bytes(now); break;
      case Step::Kind::kReplace:
        now = replace_all(*step.pattern, now, step.content, scratch);
        break;
      case Step::Kind::kByteFallback:
        if (const int byte = fallback_byte(now); byte >= 0) return {static_cast<char>(byte)};
        break;
      case Step::Kind::kMetaspace:
        now = now = undo_metaspace(now, step.content, first && step.prefix ? "" : " ");
        break;
      case Step::Kind::kFuse:
      case Step::Kind::kStrip: break;  // concern the whole text
    }
  }
  return now;
}

}  // namespace nibble::text
