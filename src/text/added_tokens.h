// The "added_tokens" of tokenizer.json: tokens found in the text before the model sees it.
// Source: huggingface/tokenizers AddedVocabulary: leftmost-longest matches; tokens that are not
// "normalized" are sought in the raw text first, the others in what is left, normalized.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"
#include "text/bytes_map.h"

namespace nibble::text {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
  bool special = false;
};

/// Errors: kCorruptInput. `json` may be null.
Result<std::vector<AddedToken>> parse_added_tokens(const Json* json);

/// A stretch of text: an added token (id >= 0) or plain text (id < 0).
struct Section {
  size_t begin = 0;
  size_t end = 0;
  int32_t id = -1;
};

/// Finds a set of added tokens. Immutable after build, so thread-safe.
class AddedTokenFinder {
 public:
  /// `spelling` is what to look for, the content or its normalized form; the id is the token's.
  void add(std::string_view spelling, const AddedToken& token);
  bool empty() const { return tokens_.empty(); }
  /// Appends the sections of `text`, which they cover but for whitespace that a token strips.
  void split(std::string_view text, std::vector<Section>& sections) const;

 private:
  struct Node {
    std::array<int32_t, 16> next;  // by half byte: two steps a byte
    int32_t token = -1;
    Node() { next.fill(-1); }
  };
  // Longest token that starts at `pos`, or -1.
  int32_t match_at(std::string_view text, size_t pos, size_t& end) const;
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> starts_{};
};

}  // namespace nibble::text
