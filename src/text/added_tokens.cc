#include "text/added_tokens.h"

#include <algorithm>

#include "base/json.h"
#include "text/unicode.h"

namespace nibble::text {

Result<std::vector<AddedToken>> parse_added_tokens(const Json* json) {
  std::vector<AddedToken> tokens;
  if (json == nullptr) return tokens;
  if (!json->is_array()) return Error(Code::kCorruptInput, "'added_tokens' is no array");
  for (const Json& item : *json) {
    AddedToken token;
    NIBBLE_TRY(token.content, json_string(item, "content"), "added token");
    NIBBLE_TRY(const int64_t id, json_int(item, "id"), cat("added token '", token.content, "'"));
    if (id < 0 || id >= 16 * 1024 * 1024) {
      return Error(Code::kCorruptInput, cat("added token '", token.content, "': id ", id));
    }
    token.id = static_cast<int32_t>(id);
    NIBBLE_TRY(token.single_word, json_bool(item, "single_word", false));
    NIBBLE_TRY(token.lstrip, json_bool(item, "lstrip", false));
    NIBBLE_TRY(token.rstrip, json_bool(item, "rstrip", false));
    NIBBLE_TRY(token.special, json_bool(item, "special", false));
    NIBBLE_TRY(token.normalized, json_bool(item, "normalized", !token.special));
    if (!token.content.empty()) tokens.push_back(std::move(token));
  }
  return tokens;
}

void AddedTokenFinder::add(std::string_view spelling, const AddedToken& token) {
  if (spelling.empty()) return;
  if (nodes_.empty()) nodes_.emplace_back();
  size_t node = 0;
  const auto step = [&](unsigned half) {
    if (nodes_[node].next[half] < 0) {
      nodes_[node].next[half] = static_cast<int32_t>(nodes_.size());
      nodes_.emplace_back();
    }
    node = static_cast<size_t>(nodes_[node].next[half]);
  };
  for (const char c : spelling) {
    step(static_cast<uint8_t>(c) >> 4);
    step(static_cast<uint8_t>(c) & 15);
  }
  starts_[static_cast<uint8_t>(spelling[0])] = true;
  if (nodes_[node].token >= 0) return;  // the first of two equal spellings is found
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
}

int32_t AddedTokenFinder::match_at(std::string_view text, size_t pos, size_t& end) const {
  int32_t found = -1;
  int32_t node = 0;
  for (size_t i = pos; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    node = nodes_[static_cast<size_t>(node)].next[byte >> 4];
    if (node < 0) break;
    node = nodes_[static_cast<size_t>(node)].next[byte & 15];
    if (node < 0) break;
    if (nodes_[static_cast<size_t>(node)].token >= 0) {
      found = nodes_[static_cast<size_t>(node)].token;
      end = i + 1;
    }
  }
  return found;
}

void AddedTokenFinder::split(std::string_view text, std::vector<Section>& sections) const {
  size_t done = 0;
  if (!tokens_.empty()) {
    for (size_t pos = 0; pos < text.size();) {
      size_t match_end = 0;
      const bool may = starts_[static_cast<uint8_t>(text[pos])];
      const int32_t index = may ? match_at(text, pos, match_end) : -1;
      if (index < 0) {
        ++pos;
        continue;
      }
      const AddedToken& token = tokens_[static_cast<size_t>(index)];
      size_t begin = pos;
      size_t end = match_end;
      pos = match_end;
      if (token.single_word) {
        size_t before = begin;
        size_t after = end;
        const bool joined_left = begin > 0 && is_word_char(previous_code_point(text, before));
        const bool joined_right = end < text.size() && is_word_char(next_code_point(text, after));
        if (joined_left || joined_right) continue;
      }
      while (token.lstrip && begin > done) {
        size_t before = begin;
        if (!is_white_space(previous_code_point(text, before)) || before < done) break;
        begin = before;
      }
      while (token.rstrip && end < text.size()) {
        size_t after = end;
        if (!is_white_space(next_code_point(text, after))) break;
        end = after;
      }
      if (done < begin) sections.push_back({done, begin, -1});
      sections.push_back({begin, end, token.id});
      done = end;
      pos = std::max(pos, end);
    }
  }
  if (done < text.size()) sections.push_back({done, text.size(), -1});
}

}  // namespace nibble::text
