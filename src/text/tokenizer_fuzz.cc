// libFuzzer: the first line is a tokenizer.json, the rest a text to encode, decode and stream.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using nibble::text::StreamDecoder;
  using nibble::text::Tokenizer;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t line = input.find('\n');
  if (line == std::string_view::npos) return 0;
  const auto tokenizer = Tokenizer::parse(input.substr(0, line), "fuzz");
  if (!tokenizer) return 0;
  const auto ids = tokenizer->encode(input.substr(line + 1), true);
  for (const int32_t id : ids) {
    NIBBLE_CHECK(id >= 0, "id ", id);
  }
  const std::string text = tokenizer->decode(ids);
  NIBBLE_CHECK(nibble::text::is_valid_utf8(text), "decode gave broken UTF-8");
  StreamDecoder stream(*tokenizer, false);
  for (const int32_t id : ids) {
    NIBBLE_CHECK(nibble::text::is_valid_utf8(stream.push(id)), "stream gave broken UTF-8");
  }
  NIBBLE_CHECK(nibble::text::is_valid_utf8(stream.finish()), "stream gave broken UTF-8");
  return 0;
}
