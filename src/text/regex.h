// Split and replace patterns of tokenizer.json. They are written for Oniguruma; this file gives
// them Oniguruma's meaning on PCRE2: the pattern is parsed and rewritten, and what has no sure
// counterpart is refused by name rather than matched a little differently.
//
// Rewritten: \s and \S (Unicode White_Space; PCRE2's has U+180E too), \p{Script} (Script, not
// Script_Extensions), nested classes and && intersections, x{n,m}+ (a plain repeat there), {,m}.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble::text {

/// The PCRE2 pattern with the meaning that `pattern` has in Oniguruma.
/// Errors: kCorruptInput for broken patterns, kUnsupported naming the construct.
Result<std::string> pcre_from_oniguruma(std::string_view pattern);

struct Span {
  size_t begin = 0;
  size_t end = 0;
};

/// Match data and JIT stack of one thread; a Regex may be used with any.
class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  void* match_data_;
  void* match_context_;
  void* jit_stack_;
};

/// A compiled pattern. Thread-safe, each thread with its own scratch.
class Regex {
 public:
  static Result<Regex> compile(std::string_view oniguruma_pattern);
  Regex(Regex&& other) noexcept;
  Regex& operator=(Regex&& other) noexcept;
  ~Regex();

  /// The first match that starts at or after `from`; false if there is none. `text` must be valid
  /// UTF-8. A pattern that runs into the match limit counts as no match from there on.
  bool find(std::string_view text, size_t from, RegexScratch& scratch, Span& match) const;

 private:
  Regex(void* code, bool jit) : code_(code), jit_(jit) {}
  void* code_ = nullptr;
  bool jit_ = false;
};

}  // namespace nibble::text
