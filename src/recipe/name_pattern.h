// Lists of module names and patterns in quantization configs (ignore, targets), and whether a
// stored module is on one. Spec: containers, sections 2 and 4; recipes, section 2.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/result.h"

namespace nibble::recipe {

/// Shell pattern over the whole text: `*` crosses dots, `?` is one character, `[a-z]` and `[!x]`
/// are sets; an unclosed `[` stands for itself. Case-sensitive, O(pattern * text).
bool shell_match(std::string_view pattern, std::string_view text);

/// A list of entries: "re:X" (regular expression, matched from the start), shell patterns, exact
/// names, and, where `substrings` is set, any part of a name. Every comparison is made with and
/// without the "model." and "language_model." prefixes. Thread-safe once filled.
class NameList {
 public:
  explicit NameList(bool substrings = false) : substrings_(substrings) {}
  /// Errors: kCorruptInput if a regular expression does not compile or an entry is over 4096 bytes.
  Result<void> add(std::string_view entry);
  bool matches(std::string_view module) const;
  bool empty() const { return exact_.empty() && anywhere_.empty() && by_layer_.empty(); }

 private:
  struct Regex;
  struct Entry {
    std::string text;
    bool shell = false;
    std::shared_ptr<const Regex> regex;
  };
  bool entry_matches(const Entry& entry, std::string_view module) const;

  bool substrings_ = false;
  std::unordered_set<std::string> exact_;  // without prefix
  // Entries that name a layer ("…layers.3.…") are only tried on modules of that layer: lists hold
  // hundreds of them and a checkpoint a hundred thousand modules.
  std::unordered_map<int64_t, std::vector<Entry>> by_layer_;
  std::vector<Entry> anywhere_;
};

}  // namespace nibble::recipe
