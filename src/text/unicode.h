// UTF-8 and Unicode facts for the tokenizer and the templates: repair of broken UTF-8, code point
// iteration, character classes and normalization forms. Normalization and properties come from ICU
// (Unicode 15); regular expressions are in regex.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble::text {

/// True if `text` is well-formed UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
bool is_valid_utf8(std::string_view text);

/// Appends `text` to `out`, each maximal broken part as one U+FFFD (the rule of the Unicode
/// standard, chapter 3.9, that Rust and the WHATWG decoder share).
void append_valid_utf8(std::string_view text, std::string& out);
std::string to_valid_utf8(std::string_view text);

/// How many bytes at the end of `text` are the start of a character that is still unfinished (0 to
/// 3); broken bytes that can never become one do not count.
size_t unfinished_tail(std::string_view text);

/// The code point at `pos` of valid UTF-8, which is moved behind it.
char32_t next_code_point(std::string_view text, size_t& pos);
/// The code point that ends at `pos` > 0 of valid UTF-8, which is moved before it.
char32_t previous_code_point(std::string_view text, size_t& pos);
void append_utf8(char32_t code_point, std::string& out);
/// Number of code points of valid UTF-8.
size_t count_code_points(std::string_view text);

bool is_white_space(char32_t c);  // property White_Space
bool is_word_char(char32_t c);    // Alphabetic, M, Nd, Pc or Join_Control: \w of UTS 18
bool is_numeric(char32_t c);      // Nd, Nl or No
bool is_punctuation(char32_t c);  // P, or ASCII punctuation
void append_lower(char32_t c, std::string& out);
void append_upper(char32_t c, std::string& out);
void append_title(char32_t c, std::string& out);
bool is_cased_letter(char32_t c);
bool is_letter(char32_t c);     // L
bool is_upper(char32_t c);      // Lu or Lt
bool is_lower(char32_t c);      // property Lowercase
bool is_printable(char32_t c);  // as Python's str.isprintable()

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
/// `text` must be valid UTF-8.
std::string normalize(std::string_view text, NormalForm form);

}  // namespace nibble::text
