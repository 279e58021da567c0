// StreamDecoder and StopFilter: whatever the pieces, together they give the same text.
#include <gtest/gtest.h>

#include "base/json.h"
#include "text/bpe.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

// Bytes as ids 0 to 255, four tokens of several bytes, and a special token.
Tokenizer byte_tokenizer() {
  Json vocab = Json::object();
  const auto spell = [](std::string_view bytes) {
    std::string token;
    for (const char c : bytes) append_utf8(byte_level_code_point(static_cast<uint8_t>(c)), token);
    return token;
  };
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    vocab[spell({&byte, 1})] = b;
  }
  vocab[spell("\xF0\x9F")] = 256;
  vocab[spell("\x98\x80")] = 257;
  vocab[spell(" ha")] = 258;
  vocab[spell("\x80x\xE4")] = 259;
  Json file;
  file["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}};
  file["pre_tokenizer"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  file["decoder"] = {{"type", "ByteLevel"}};
  file["added_tokens"] = {{{"id", 260}, {"content", "<|end|>"}, {"special", true}}};
  auto tokenizer = Tokenizer::parse(json_dump(file), "test");
  EXPECT_TRUE(tokenizer) << tokenizer.error().message();
  return std::move(*tokenizer);
}

struct Random {
  uint64_t state;
  uint32_t below(uint32_t n) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<uint32_t>(state >> 33) % n;
  }
};

// An emoji cut into two tokens, Chinese from byte tokens, and a tail that never ends.
TEST(StreamDecoder, WaitsForWholeCharacters) {
  const Tokenizer tokenizer = byte_tokenizer();
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(256), "");
  EXPECT_EQ(stream.push(257), "😀");
  EXPECT_EQ(stream.push(0xE4), "");
  EXPECT_EQ(stream.push(0xB8), "");
  EXPECT_EQ(stream.push(0xAD), "中");
  EXPECT_EQ(stream.push(260), "");  // special, skipped
  EXPECT_EQ(stream.push(256), "");
  EXPECT_EQ(stream.push(0x98), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
  const std::vector<int32_t> ids = {256, 257, 0xE4, 0xB8, 0xAD, 260, 256, 0x98};
  EXPECT_EQ(tokenizer.decode(ids, true), "😀中\uFFFD");
}

TEST(StreamDecoder, BrokenBytesDoNotWait) {
  const Tokenizer tokenizer = byte_tokenizer();
  StreamDecoder stream(tokenizer, false);
  EXPECT_EQ(stream.push(0xFF), "\uFFFD");
  EXPECT_EQ(stream.push(0xF0), "");
  EXPECT_EQ(stream.push('a'), "\uFFFDa");
  EXPECT_EQ(stream.push(260), "<|end|>");
  EXPECT_EQ(stream.push(1000), "");
  EXPECT_EQ(stream.push(-1), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(StreamDecoder, EqualsDecodeForRandomIds) {
  const Tokenizer tokenizer = byte_tokenizer();
  Random random{3};
  for (int round = 0; round < 20000; ++round) {
    std::vector<int32_t> ids;
    const uint32_t count = random.below(12);
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t kind = random.below(4);
      ids.push_back(static_cast<int32_t>(kind == 0   ? random.below(261)
                                         : kind == 1 ? 256 + random.below(5)
                                         : kind == 2 ? 0x80 + random.below(0x80)
                                                     : 0xE0 + random.below(0x16)));
    }
    for (const bool skip : {false, true}) {
      StreamDecoder stream(tokenizer, skip);
      std::string text;
      for (const int32_t id : ids) {
        const std::string piece = stream.push(id);
        ASSERT_TRUE(is_valid_utf8(piece));
        text += piece;
      }
      ASSERT_EQ(text + stream.finish(), tokenizer.decode(ids, skip));
    }
  }
}

std::string filtered(const std::vector<std::string>& stops, std::string_view text, Random* random,
                     bool* stopped = nullptr) {
  StopFilter filter(stops);
  std::string out;
  for (size_t pos = 0; pos < text.size();) {
    const size_t size = random == nullptr ? text.size() : random->below(4);
    out += filter.push(text.substr(pos, size));
    pos += size;
  }
  out += filter.finish();
  if (stopped != nullptr) *stopped = filter.stopped();
  return out;
}

TEST(StopFilter, EndsBeforeTheStopString) {
  StopFilter filter({" ha ha ha", "STOP"});
  EXPECT_EQ(filter.push("well ha"), "well");
  EXPECT_EQ(filter.push(" ha no"), " ha ha no");
  EXPECT_EQ(filter.push(" ha ha ha and more"), "");
  EXPECT_TRUE(filter.stopped());
  EXPECT_EQ(filter.push("nothing"), "");
  EXPECT_EQ(filter.finish(), "");
}

TEST(StopFilter, GivesBackWhatWasHeld) {
  StopFilter filter({"</s>"});
  EXPECT_EQ(filter.push("a</"), "a");
  EXPECT_EQ(filter.finish(), "</");
  EXPECT_FALSE(filter.stopped());
  StopFilter none({});
  EXPECT_EQ(none.push("abc"), "abc");
  StopFilter empty({""});
  EXPECT_EQ(empty.push("abc"), "abc");
  EXPECT_FALSE(empty.stopped());
}

TEST(StopFilter, AnyChunkingGivesTheSameText) {
  Random random{11};
  for (int round = 0; round < 30000; ++round) {
    std::vector<std::string> stops(1 + random.below(3));
    for (std::string& stop : stops) {
      const uint32_t size = 1 + random.below(4);
      for (uint32_t i = 0; i < size; ++i) stop += static_cast<char>('a' + random.below(2));
    }
    std::string text;
    const uint32_t size = random.below(16);
    for (uint32_t i = 0; i < size; ++i) text += static_cast<char>('a' + random.below(3));
    // By definition: cut before the stop string that is complete first, the longer of two.
    std::string expected = text;
    bool expect_stop = false;
    for (size_t end = 1; end <= text.size() && !expect_stop; ++end) {
      for (const std::string& stop : stops) {
        if (!std::string_view(text).substr(0, end).ends_with(stop)) continue;
        const std::string cut = text.substr(0, end - stop.size());
        if (!expect_stop || cut.size() < expected.size()) expected = cut;
        expect_stop = true;
      }
    }
    bool stopped = false;
    ASSERT_EQ(filtered(stops, text, nullptr, &stopped), expected) << text;
    ASSERT_EQ(stopped, expect_stop);
    for (int again = 0; again < 3; ++again) {
      ASSERT_EQ(filtered(stops, text, &random, &stopped), expected) << text;
      ASSERT_EQ(stopped, expect_stop);
    }
  }
}

}  // namespace
}  // namespace nibble::text
