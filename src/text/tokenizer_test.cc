// The tokenizer's parts on small vocabularies made here, so that a clone without the reference
// files still tests what each part means. Expected values follow the public definition of
// huggingface/tokenizers; where they were worked out by hand the comment says how.
#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/json.h"
#include "text/bpe.h"
#include "text/regex.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A byte-level file: the 256 bytes as ids 0 to 255, then what the merges make.
Json byte_level_file(const std::vector<std::pair<std::string, std::string>>& merges) {
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) {
    std::string token;
    append_utf8(byte_level_code_point(static_cast<uint8_t>(b)), token);
    vocab[token] = b;
  }
  Json list = Json::array();
  int next = 256;
  for (const auto& [left, right] : merges) {
    vocab[left + right] = next++;
    list.push_back({left, right});
  }
  Json file;
  file["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", list}};
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  file["decoder"] = {{"type", "ByteLevel"}};
  return file;
}

// Characters and what the caller adds, without byte-level.
Json plain_file(const std::vector<std::string>& tokens) {
  Json vocab = Json::object();
  int next = 0;
  for (const std::string& token : tokens) vocab[token] = next++;
  Json file;
  file["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}};
  file["decoder"] = {{"type", "Fuse"}};
  return file;
}

Tokenizer load(const Json& file) {
  auto tokenizer = Tokenizer::parse(json_dump(file), "test");
  EXPECT_TRUE(tokenizer) << tokenizer.error().message();
  return std::move(*tokenizer);
}

Error failure(const Json& file) {
  const auto tokenizer = Tokenizer::parse(json_dump(file), "test");
  EXPECT_FALSE(tokenizer);
  return tokenizer ? Error(Code::kInternal, "parsed") : tokenizer.error();
}

std::string pieces(const Tokenizer& tokenizer, std::string_view text) {
  std::string out;
  for (const int32_t id : tokenizer.encode(text)) {
    out += cat("[", tokenizer.token_bytes(id), "]");
  }
  return out;
}

TEST(Utf8, RepairsEachMaximalBrokenPart) {
  // The table "U+FFFD for Truncated Sequences" of the Unicode standard, and its neighbours.
  EXPECT_EQ(to_valid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), "\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(to_valid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(to_valid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(to_valid_utf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41\uFFFD\uFFFD\x42");
  EXPECT_EQ(unfinished_tail("a\xF0\x9F\x98"), 3U);
  EXPECT_EQ(unfinished_tail("a\xF0\x9F\x98\x80"), 0U);
  EXPECT_EQ(unfinished_tail("a\xF5"), 0U);
  EXPECT_EQ(unfinished_tail("\x80\x80\x80\x80"), 0U);
}

TEST(RegexSyntax, HasOnigurumasMeaning) {
  RegexScratch scratch;
  const auto found = [&](std::string_view pattern, std::string_view text) -> std::string {
    const auto regex = Regex::compile(pattern);
    if (!regex) return cat("error: ", regex.error().message());
    Span match;
    if (!regex->find(text, 0, scratch, match)) return "none";
    return std::string(text.substr(match.begin, match.end - match.begin));
  };
  EXPECT_EQ(found("\\s", "\u180E"), "none");  // no White_Space; PCRE2 alone matches it
  EXPECT_EQ(found("\\S+", "a\u180Eb c"), "a\u180Eb");
  EXPECT_EQ(found("[^\\s]+", "\u0085\u3000x"), "x");
  EXPECT_EQ(found("[\\S]+", " ab "), "ab");
  EXPECT_EQ(found("\\d+", "x٣४"), "٣४");
  EXPECT_EQ(found("\\p{Han}+", "ab中文、々ー"), "中文");  // U+3001 is Common, though used with Han
  EXPECT_EQ(found("[\\p{L}&&[^\\p{Han}]]+", "中abc文"), "abc");
  EXPECT_EQ(found("[^\\p{L}&&[^x]]+", "ab1x2"), "1x2");
  EXPECT_EQ(found("[a-c[x-z]]+", "qazb"), "azb");
  EXPECT_EQ(found("(?i:'S|'re)", "we'RE"), "'RE");
  EXPECT_EQ(found("a{2}+", "aaaaa"), "aaaa");  // (?:a{2})+
  EXPECT_EQ(found("a{,2}", "aaa"), "aa");
  EXPECT_EQ(found("a++b", "aaab"), "aaab");
  EXPECT_EQ(found("x{y}", "x{y}"), "x{y}");
  EXPECT_EQ(found("[]a]+", "a]a"), "a]a");
  EXPECT_EQ(found("[a-]+", "-a-"), "-a-");
  EXPECT_EQ(found("\\u4e2d|\\x{6587}", "文中"), "文");
  EXPECT_EQ(found(".+", "ab\ncd"), "ab");
  EXPECT_EQ(found("(?<n>a)b", "ab"), "ab");
  for (const char* refused : {"\\w", "\\bx", "^a", "a$", "\\p{Alpha}", "[[:alpha:]]", "(a)\\1",
                              "(?m:a)", "a{2}?", "\\X", "\\K", "[\\s-x]"}) {
    const auto regex = Regex::compile(refused);
    ASSERT_FALSE(regex) << refused;
    EXPECT_EQ(regex.error().code(), Code::kUnsupported) << refused;
  }
  for (const char* broken : {"(a", "a)", "[a", "a|*", "\\", "[z-a]", "[a&&]"}) {
    const auto regex = Regex::compile(broken);
    ASSERT_FALSE(regex) << broken;
    EXPECT_EQ(regex.error().code(), Code::kCorruptInput) << broken;
  }
}

TEST(Bpe, MergesByRankThenFromTheLeft) {
  const Tokenizer tokenizer = load(byte_level_file({{"b", "c"}, {"a", "b"}, {"a", "a"}}));
  EXPECT_EQ(pieces(tokenizer, "abc"), "[a][bc]");
  EXPECT_EQ(pieces(tokenizer, "aaa"), "[aa][a]");
  EXPECT_EQ(pieces(tokenizer, "aaab"), "[aa][ab]");
}

// Long words take the heap, short ones the scan: both must agree, and stay fast.
TEST(Bpe, LongWordsMergeLikeShortOnes) {
  const Tokenizer tokenizer =
      load(byte_level_file({{"a", "b"}, {"b", "a"}, {"ab", "ab"}, {"a", "a"}, {"abab", "abab"}}));
  uint64_t state = 7;
  for (int round = 0; round < 200; ++round) {
    std::string word;
    for (int i = 0; i < 120; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      word += (state >> 40) % 3 == 0 ? 'b' : 'a';
    }
    // The plain definition: the leftmost pair of the lowest rank, again and again.
    const std::vector<std::pair<std::string, std::string>> merges = {
        {"a", "b"}, {"b", "a"}, {"ab", "ab"}, {"a", "a"}, {"abab", "abab"}};
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    while (true) {
      size_t best = parts.size();
      size_t best_rank = merges.size();
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        for (size_t rank = 0; rank < best_rank; ++rank) {
          if (merges[rank] == std::pair(parts[i], parts[i + 1])) {
            best = i;
            best_rank = rank;
          }
        }
      }
      if (best == parts.size()) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    std::string expected;
    for (const std::string& part : parts) expected += "[" + part + "]";
    ASSERT_EQ(pieces(tokenizer, word), expected);
    ASSERT_EQ(pieces(tokenizer, word.substr(0, 30)),
              pieces(tokenizer, word.substr(0, 30)));  // second time from the cache
  }
  const std::string huge(400'000, 'a');
  const std::vector<int32_t> ids = tokenizer.encode(huge);
  EXPECT_EQ(ids.size(), huge.size() / 2);
  EXPECT_EQ(tokenizer.decode(ids), huge);
}

TEST(Bpe, IgnoreMergesTakesWholeWords) {
  Json file = byte_level_file({{"a", "b"}, {"b", "c"}});
  file["model"]["vocab"]["abc"] = 300;
  EXPECT_EQ(pieces(load(file), "abc"), "[ab][c]");
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(pieces(load(file), "abc"), "[abc]");
}

TEST(Bpe, UnknownCharacters) {
  Json file = plain_file({"<unk>", "a", "b", "<0xC3>", "<0xA9>"});
  EXPECT_THAT(load(file).encode("axxb"), ElementsAre(1, 2));  // dropped without unk_token
  file["model"]["unk_token"] = "<unk>";
  EXPECT_THAT(load(file).encode("axxb"), ElementsAre(1, 0, 0, 2));
  file["model"]["fuse_unk"] = true;
  EXPECT_THAT(load(file).encode("axxbx"), ElementsAre(1, 0, 2, 0));
  file["model"]["byte_fallback"] = true;
  EXPECT_THAT(load(file).encode("aéx"), ElementsAre(1, 3, 4, 0));
}

TEST(PreTokenizer, SplitBehaviours) {
  Json file = byte_level_file({{"a", "a"},
                               {"-", "-"},
                               {"a", "-"},
                               {"-", "a"},
                               {"a-", "-"},
                               {"aa", "-"},
                               {"--", "a"},
                               {"-", "aa"}});
  const auto with = [&](const char* behavior, bool invert) {
    file["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern", {{"String", "-"}}},
           {"behavior", behavior},
           {"invert", invert}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
    return pieces(load(file), "aa--aa-");
  };
  // Words, as the library's documentation of the five behaviours gives them; BPE keeps to words.
  EXPECT_EQ(with("Isolated", false), "[aa][-][-][aa][-]");
  EXPECT_EQ(with("Removed", false), "[aa][aa]");
  EXPECT_EQ(with("MergedWithPrevious", false), "[aa-][-][aa-]");
  EXPECT_EQ(with("MergedWithNext", false), "[aa][-][-aa][-]");
  EXPECT_EQ(with("Contiguous", false), "[aa][--][aa][-]");
  EXPECT_EQ(with("Removed", true), "[-][-][-]");
}

TEST(PreTokenizer, DigitsPunctuationWhitespace) {
  Json file = plain_file({"1", "2", "x", "!", " "});
  file["model"]["vocab"]["12"] = 5;
  file["model"]["vocab"]["!!"] = 6;
  file["model"]["merges"] = {"1 2", "! !"};  // the older form
  EXPECT_THAT(load(file).encode("12"), ElementsAre(5));
  file["pre_tokenizer"] = {{"type", "Digits"}, {"individual_digits", true}};
  EXPECT_THAT(load(file).encode("x12"), ElementsAre(2, 0, 1));
  file["pre_tokenizer"] = {{"type", "Digits"}, {"individual_digits", false}};
  EXPECT_THAT(load(file).encode("x12"), ElementsAre(2, 5));
  file["pre_tokenizer"] = {{"type", "Punctuation"}, {"behavior", "Isolated"}};
  EXPECT_THAT(load(file).encode("x!!"), ElementsAre(2, 3, 3));
  file["pre_tokenizer"] = {{"type", "Punctuation"}, {"behavior", "Contiguous"}};
  EXPECT_THAT(load(file).encode("x!!"), ElementsAre(2, 6));
  file["pre_tokenizer"] = {{"type", "WhitespaceSplit"}};
  EXPECT_THAT(load(file).encode(" 12  x "), ElementsAre(5, 2));
}

TEST(PreTokenizer, ByteLevelPrefixSpaceAndGpt2Split) {
  Json file = byte_level_file({{"Ġ", "a"}, {"a", "Ġ"}});
  EXPECT_EQ(pieces(load(file), "a a"), "[a][ a]");
  file["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(pieces(load(file), "a a"), "[ a][ a]");
  file["pre_tokenizer"]["add_prefix_space"] = false;
  file["pre_tokenizer"]["use_regex"] = false;
  EXPECT_EQ(pieces(load(file), "aa a"), "[a][a][ a]");
}

// The scheme of Llama 2: spaces as U+2581, bytes for what is unknown.
TEST(Metaspace, NormalizerAndDecoderOfLlama2) {
  Json file = plain_file({"<unk>", "▁", "a", "b", "<0xE4>", "<0xB8>", "<0xAD>"});
  file["model"]["unk_token"] = "<unk>";
  file["model"]["byte_fallback"] = true;
  file["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Prepend"}, {"prepend", "▁"}},
        {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}}}}};
  file["decoder"] = {{"type", "Sequence"},
                     {"decoders",
                      {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                       {{"type", "ByteFallback"}},
                       {{"type", "Fuse"}},
                       {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  const Tokenizer tokenizer = load(file);
  const std::vector<int32_t> ids = {1, 2, 1, 1, 3, 4, 5, 6};
  EXPECT_EQ(tokenizer.encode("a  b中"), ids);
  EXPECT_EQ(tokenizer.decode(ids), "a  b中");
  StreamDecoder stream(tokenizer);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  EXPECT_EQ(text + stream.finish(), "a  b中");
  const std::vector<int32_t> broken = {2, 4, 5, 3};
  EXPECT_EQ(tokenizer.decode(broken), "a\uFFFD\uFFFDb");  // a broken run: one a byte
}

TEST(Metaspace, PreTokenizerAndDecoder) {
  Json file = plain_file({"▁", "a", "b"});
  file["model"]["vocab"]["▁a"] = 3;
  file["model"]["merges"] = {"▁ a"};
  file["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}};
  file["decoder"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}};
  const Tokenizer tokenizer = load(file);
  const std::vector<int32_t> ids = {3, 2, 0, 3};
  EXPECT_EQ(tokenizer.encode("ab  a"), ids);
  EXPECT_EQ(tokenizer.decode(ids), "ab  a");
  StreamDecoder stream(tokenizer);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  EXPECT_EQ(text + stream.finish(), "ab  a");
}

TEST(Normalizer, Forms) {
  Json file = plain_file({"é", "e", "\u0301", "f", "i", "ﬁ", "x"});
  file["normalizer"] = {{"type", "NFC"}};
  EXPECT_THAT(load(file).encode("e\u0301ﬁ"), ElementsAre(0, 5));
  file["normalizer"] = {{"type", "NFD"}};
  EXPECT_THAT(load(file).encode("éﬁ"), ElementsAre(1, 2, 5));
  file["normalizer"] = {{"type", "NFKC"}};
  EXPECT_THAT(load(file).encode("e\u0301ﬁ"), ElementsAre(0, 3, 4));
  file["normalizer"] = {{"type", "NFKD"}};
  EXPECT_THAT(load(file).encode("éﬁ"), ElementsAre(1, 2, 3, 4));
  file["normalizer"] = {{"type", "Lowercase"}};
  EXPECT_THAT(load(file).encode("ÉFIX"), ElementsAre(0, 3, 4, 6));
  file["normalizer"] = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}};
  EXPECT_THAT(load(file).encode(" \u3000x"), ElementsAre(6));
  file["normalizer"] = {{"type", "Replace"}, {"pattern", {{"Regex", "[0-9]+"}}}, {"content", "x"}};
  EXPECT_THAT(load(file).encode("12e345"), ElementsAre(6, 1, 6));
}

Json added(int id, const char* content, bool special) {
  return {{"id", id},        {"content", content}, {"special", special},  {"normalized", false},
          {"lstrip", false}, {"rstrip", false},    {"single_word", false}};
}

TEST(AddedTokens, AreFoundLongestFirst) {
  Json file = byte_level_file({});
  file["added_tokens"] = {added(256, "<|a|>", true), added(257, "<|a|>b", false),
                          added(258, "<|", false)};
  const Tokenizer tokenizer = load(file);
  EXPECT_THAT(tokenizer.encode("<|a|>b<|a|><|x"), ElementsAre(257, 256, 258, 'x'));
  EXPECT_EQ(tokenizer.vocab_size(), 259);
  EXPECT_TRUE(tokenizer.is_special(256));
  EXPECT_FALSE(tokenizer.is_special(257));
  EXPECT_FALSE(tokenizer.is_special(-1));
  EXPECT_EQ(tokenizer.token_id("<|a|>"), 256);
  EXPECT_EQ(tokenizer.token_id("nothing"), std::nullopt);
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{256, 257, 999, -5}), "<|a|><|a|>b");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{256, 257}, true), "<|a|>b");
}

TEST(AddedTokens, StripAndSingleWord) {
  Json file = plain_file({"a", " ", "<m>"});
  Json token = added(3, "<x>", true);
  token["lstrip"] = true;
  token["rstrip"] = true;
  Json word = added(4, "ab", false);
  word["single_word"] = true;
  file["model"]["vocab"]["b"] = 5;
  file["added_tokens"] = {token, word};
  const Tokenizer tokenizer = load(file);
  EXPECT_THAT(tokenizer.encode("a  <x>\n <x> a"), ElementsAre(0, 3, 3, 0));
  EXPECT_THAT(tokenizer.encode("ab aab ab"), ElementsAre(4, 1, 0, 0, 5, 1, 4));
}

TEST(AddedTokens, NormalizedOnesAreSoughtInNormalizedText) {
  Json file = plain_file({"a", "b"});
  file["normalizer"] = {{"type", "Lowercase"}};
  Json normalized = added(2, "AB", false);
  normalized["normalized"] = true;
  file["added_tokens"] = {normalized, added(3, "BA", true)};
  const Tokenizer tokenizer = load(file);
  EXPECT_THAT(tokenizer.encode("ab"), ElementsAre(2));
  EXPECT_THAT(tokenizer.encode("aB"), ElementsAre(2));
  EXPECT_THAT(tokenizer.encode("BAba"), ElementsAre(3, 1, 0));
}

TEST(PostProcessor, AddsWhenAsked) {
  Json file = byte_level_file({});
  file["added_tokens"] = {added(256, "<s>", true), added(257, "</s>", true)};
  file["post_processor"] = {{"type", "Sequence"},
                            {"processors",
                             {{{"type", "ByteLevel"}},
                              {{"type", "TemplateProcessing"},
                               {"single",
                                {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                                 {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                                 {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}}},
                               {"special_tokens",
                                {{"<s>", {{"id", "<s>"}, {"ids", {256}}}},
                                 {"</s>", {{"id", "</s>"}, {"ids", {257}}}}}}}}}};
  const Tokenizer tokenizer = load(file);
  EXPECT_THAT(tokenizer.encode("a"), ElementsAre('a'));
  EXPECT_THAT(tokenizer.encode("a", true), ElementsAre(256, 'a', 257));
  EXPECT_THAT(tokenizer.encode("", true), ElementsAre(256, 257));
}

TEST(Tokenizer, RefusesWhatItDoesNotKnowByName) {
  const Json good = byte_level_file({});
  for (const auto& [part, value] :
       std::vector<std::pair<std::string, Json>>{{"normalizer", {{"type", "BertNormalizer"}}},
                                                 {"pre_tokenizer", {{"type", "BertPreTokenizer"}}},
                                                 {"decoder", {{"type", "WordPiece"}}},
                                                 {"post_processor", {{"type", "BertProcessing"}}},
                                                 {"model", {{"type", "Unigram"}}}}) {
    Json file = good;
    file[part] = value;
    const Error error = failure(file);
    EXPECT_EQ(error.code(), Code::kUnsupported) << part;
    EXPECT_THAT(error.message(), HasSubstr(value.at("type").get<std::string>()));
  }
  Json file = good;
  file["model"]["dropout"] = 0.1;
  EXPECT_EQ(failure(file).code(), Code::kUnsupported);
  file = good;
  file["model"]["continuing_subword_prefix"] = "##";
  EXPECT_EQ(failure(file).code(), Code::kUnsupported);
}

TEST(Tokenizer, RefusesBrokenFiles) {
  EXPECT_EQ(Tokenizer::parse("{", "x").error().code(), Code::kCorruptInput);
  EXPECT_EQ(Tokenizer::parse("[]", "x").error().code(), Code::kCorruptInput);
  EXPECT_EQ(Tokenizer::parse("{}", "x").error().code(), Code::kCorruptInput);
  Json file = byte_level_file({});
  file["model"]["merges"] = {"a b c"};
  EXPECT_EQ(failure(file).code(), Code::kCorruptInput);
  file["model"]["merges"] = {"a b"};  // the result is unknown
  EXPECT_EQ(failure(file).code(), Code::kCorruptInput);
  file = byte_level_file({});
  file["model"]["vocab"]["far"] = 2147483647;
  EXPECT_EQ(failure(file).code(), Code::kCorruptInput);
  EXPECT_EQ(Tokenizer::open("/nonexistent/tokenizer.json").error().code(), Code::kNotFound);
}

TEST(Tokenizer, InvalidUtf8IsReplacedFirst) {
  const Tokenizer tokenizer = load(byte_level_file({}));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a\xFF\xF0\x9F")), "a\uFFFD\uFFFD");
  EXPECT_THAT(tokenizer.encode(""), IsEmpty());
  EXPECT_EQ(tokenizer.decode({}), "");
}

TEST(Tokenizer, EncodesTheSameFromManyThreads) {
  const Tokenizer tokenizer = load(byte_level_file({{"a", "b"}, {"ab", "ab"}, {"Ġ", "ab"}}));
  std::string text;
  for (int i = 0; i < 3000; ++i) text += cat(" ab", i, i % 7 == 0 ? "ababab" : "", "é");
  const std::vector<int32_t> expected = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::vector<int> same(4, 0);
  for (size_t t = 0; t < same.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 5; ++round) same[t] += tokenizer.encode(text) == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(same, ElementsAre(5, 5, 5, 5));
}

}  // namespace
}  // namespace nibble::text
