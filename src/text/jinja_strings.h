// String work that filters and methods share, as Python does it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace nibble::text::jinja {

std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string to_capitalized(std::string_view text);
/// str.title(): every run of letters starts with a capital.
std::string to_title(std::string_view text);
/// The title filter, which knows words by the space, dash or bracket before them.
std::string to_title_words(std::string_view text);
/// str.strip(chars): any of the characters, at the chosen ends.
std::string_view strip_chars(std::string_view text, std::string_view chars, bool left, bool right);
std::vector<std::string_view> split_lines(std::string_view text);
/// At most `limit` replacements; negative: all.
std::string replace_text(std::string_view text, std::string_view from, std::string_view to,
                         int64_t limit);

}  // namespace nibble::text::jinja
