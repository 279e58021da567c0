#include "text/unicode.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include <cstring>

namespace nibble::text {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Length of the ASCII run at `pos`.
size_t ascii_run(std::string_view text, size_t pos) {
  const size_t begin = pos;
  while (pos + 8 <= text.size()) {
    uint64_t word;
    std::memcpy(&word, text.data() + pos, 8);
    if ((word & 0x8080808080808080ULL) != 0) break;
    pos += 8;
  }
  while (pos < text.size() && static_cast<uint8_t>(text[pos]) < 0x80) ++pos;
  return pos - begin;
}

struct Step {
  size_t bytes;     // to move on, at least 1
  bool valid;       // a whole well-formed character
  bool unfinished;  // well-formed so far, but the text ended
};

// Table 3-7 of the Unicode standard: the range of the second byte depends on the first.
Step step_at(std::string_view text, size_t pos) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(pos);
  if (lead < 0x80) return {1, true, false};
  size_t need = 0;
  uint8_t low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    need = 1;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    need = 2;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    need = 3;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false, false};
  }
  for (size_t i = 1; i <= need; ++i) {
    if (pos + i >= text.size()) return {i, false, true};
    const uint8_t c = byte(pos + i);
    if (c < low || c > high) return {i, false, false};
    low = 0x80;
    high = 0xBF;
  }
  return {need + 1, true, false};
}

const icu::Normalizer2* normalizer_of(NormalForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* found = nullptr;
  switch (form) {
    case NormalForm::kNfc: found = icu::Normalizer2::getNFCInstance(status); break;
    case NormalForm::kNfd: found = icu::Normalizer2::getNFDInstance(status); break;
    case NormalForm::kNfkc: found = icu::Normalizer2::getNFKCInstance(status); break;
    case NormalForm::kNfkd: found = icu::Normalizer2::getNFKDInstance(status); break;
  }
  NIBBLE_CHECK(U_SUCCESS(status) && found != nullptr, "ICU normalizer: ", u_errorName(status));
  return found;
}

}  // namespace

bool is_valid_utf8(std::string_view text) {
  size_t pos = 0;
  while (true) {
    pos += ascii_run(text, pos);
    if (pos >= text.size()) return true;
    const Step step = step_at(text, pos);
    if (!step.valid) return false;
    pos += step.bytes;
  }
}

void append_valid_utf8(std::string_view text, std::string& out) {
  size_t pos = 0;
  while (pos < text.size()) {
    const size_t run = ascii_run(text, pos);
    out.append(text, pos, run);
    pos += run;
    if (pos >= text.size()) return;
    const Step step = step_at(text, pos);
    out.append(step.valid ? text.substr(pos, step.bytes) : kReplacement);
    pos += step.bytes;
  }
}

std::string to_valid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  append_valid_utf8(text, out);
  return out;
}

size_t unfinished_tail(std::string_view text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const size_t pos = text.size() - back;
    if ((static_cast<uint8_t>(text[pos]) & 0xC0) == 0x80) continue;
    return step_at(text, pos).unfinished ? back : 0;
  }
  return 0;
}

char32_t next_code_point(std::string_view text, size_t& pos) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<uint8_t>(text[i])); };
  const char32_t lead = byte(pos);
  if (lead < 0x80) {
    ++pos;
    return lead;
  }
  if (lead < 0xE0) {
    const char32_t c = ((lead & 0x1F) << 6) | (byte(pos + 1) & 0x3F);
    pos += 2;
    return c;
  }
  if (lead < 0xF0) {
    const char32_t c =
        ((lead & 0x0F) << 12) | ((byte(pos + 1) & 0x3F) << 6) | (byte(pos + 2) & 0x3F);
    pos += 3;
    return c;
  }
  const char32_t c = ((lead & 0x07) << 18) | ((byte(pos + 1) & 0x3F) << 12) |
                     ((byte(pos + 2) & 0x3F) << 6) | (byte(pos + 3) & 0x3F);
  pos += 4;
  return c;
}

char32_t previous_code_point(std::string_view text, size_t& pos) {
  do {
    --pos;
  } while (pos > 0 && (static_cast<uint8_t>(text[pos]) & 0xC0) == 0x80);
  size_t at = pos;
  return next_code_point(text, at);
}

void append_utf8(char32_t c, std::string& out) {
  const auto put = [&out](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | (c >> 6));
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    if (c >= 0xD800 && c <= 0xDFFF) c = 0xFFFD;  // a lone surrogate has no UTF-8 form
    put(0xE0 | (c >> 12));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | (c >> 18));
    put(0x80 | ((c >> 12) & 0x3F));
    put(0x80 | ((c >> 6) & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

size_t count_code_points(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  return count;
}

bool is_white_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0; }

bool is_word_char(char32_t c) {
  const auto u = static_cast<UChar32>(c);
  constexpr uint32_t kMask = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_isUAlphabetic(u) != 0 || (U_GET_GC_MASK(u) & kMask) != 0 || c == 0x200C || c == 0x200D;
}

bool is_numeric(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_N_MASK) != 0; }

bool is_punctuation(char32_t c) {
  if (c < 0x80) {
    return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
           (c >= 123 && c <= 126);
  }
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_P_MASK) != 0;
}

void append_lower(char32_t c, std::string& out) {
  if (c == 0x130) {  // the only character whose lower case is two: i and a combining dot
    out += "i\xCC\x87";
    return;
  }
  append_utf8(static_cast<char32_t>(u_tolower(static_cast<UChar32>(c))), out);
}

void append_upper(char32_t c, std::string& out) {
  if (c == 0xDF) {  // sharp s, the common case of a longer upper case
    out += "SS";
    return;
  }
  append_utf8(static_cast<char32_t>(u_toupper(static_cast<UChar32>(c))), out);
}

void append_title(char32_t c, std::string& out) {
  if (c == 0xDF) {
    out += "Ss";
    return;
  }
  append_utf8(static_cast<char32_t>(u_totitle(static_cast<UChar32>(c))), out);
}

bool is_cased_letter(char32_t c) {
  constexpr uint32_t kMask = U_GC_LU_MASK | U_GC_LL_MASK | U_GC_LT_MASK;
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & kMask) != 0;
}

bool is_letter(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_L_MASK) != 0; }

bool is_upper(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & (U_GC_LU_MASK | U_GC_LT_MASK)) != 0;
}

bool is_lower(char32_t c) { return u_isULowercase(static_cast<UChar32>(c)) != 0; }

bool is_printable(char32_t c) {
  constexpr uint32_t kHidden = U_GC_C_MASK | U_GC_Z_MASK;
  return c == ' ' || (U_GET_GC_MASK(static_cast<UChar32>(c)) & kHidden) == 0;
}

std::string normalize(std::string_view text, NormalForm form) {
  if (ascii_run(text, 0) == text.size()) return std::string(text);  // every form keeps ASCII
  const icu::Normalizer2* normalizer = normalizer_of(form);
  UErrorCode status = U_ZERO_ERROR;
  std::string out;
  out.reserve(text.size() + 16);
  icu::StringByteSink<std::string> sink(&out);
  normalizer->normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<int32_t>(text.size())),
                            sink, nullptr, status);
  NIBBLE_CHECK(U_SUCCESS(status), "ICU normalizeUTF8: ", u_errorName(status));
  return out;
}

}  // namespace nibble::text
