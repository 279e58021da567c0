#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint_index.h"
#include "support/vector_file.h"

namespace nibble::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string length_bytes(uint64_t n) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>((n >> (8 * i)) & 0xFF);
  return out;
}

std::string file_of(const std::string& json, size_t data_bytes) {
  return length_bytes(json.size()) + json + std::string(data_bytes, 'x');
}

Result<Header> parse_file(const std::string& file) {
  return parse_header(file, static_cast<int64_t>(file.size()));
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

struct Refusal {
  const char* name;
  std::string json;
  size_t data_bytes;
  const char* error;    // the spec's name
  const char* mention;  // a part of the message that helps the user
};

TEST(SafetensorsHeader, RefusesWithTheSpecsErrorName) {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  const Refusal kCases[] = {
      {"empty header", "", 0, "header_start", "'{'"},
      {"space first", " {}", 0, "header_start", "' '"},
      {"utf-8", "{\"\xC3\":1}", 0, "header_utf8", "UTF-8"},
      {"overlong utf-8", "{\"\xC0\x80\":1}", 0, "header_utf8", "UTF-8"},
      {"cut", R"({"a":)", 0, "header_json", ""},
      {"nul padding", std::string("{}\0", 3), 0, "header_json", ""},
      {"NaN", R"({"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}})", 1, "header_json", ""},
      {"Infinity", R"({"__metadata__":{"a":Infinity}})", 0, "header_json", ""},
      {"comma at end", "{" + a + ",}", 1, "header_json", ""},
      {"control byte in name", "{\"\n\":1}", 0, "header_json", ""},
      {"two documents", "{}{}", 0, "header_json", ""},
      {"deep nesting", R"({"a":)" + std::string(5000, '[') + std::string(5000, ']') + "}", 0,
       "header_json", ""},
      {"name twice", "{" + a + "," + a + "}", 1, "duplicate_key", "'a'"},
      {"name twice through an escape",
       "{" + a + R"(,"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}})", 1,
       "duplicate_key", "'a'"},
      {"metadata twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "duplicate_key", ""},
      {"metadata key twice", R"({"__metadata__":{"k":"1","k":"2"}})", 0, "duplicate_key", "'k'"},
      {"field twice", R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1,
       "duplicate_key", "'dtype'"},
      {"metadata null", R"({"__metadata__":null})", 0, "metadata_type", "null"},
      {"metadata list", R"({"__metadata__":{"k":["v"]}})", 0, "metadata_type", "'k'"},
      {"entry is null", R"({"a":null})", 0, "entry_fields", "'a'"},
      {"field unknown", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"stride":[1]}})", 1,
       "entry_fields", "'stride'"},
      {"shape missing", R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1, "entry_fields",
       "'shape'"},
      {"dtype number", R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype_unknown",
       "8"},
      {"dtype of another world", one("F128", "[1]", "[0,16]"), 16, "dtype_unknown", "F128"},
      {"shape null", one("U8", "null", "[0,1]"), 1, "shape", "null"},
      {"shape true", one("U8", "[true]", "[0,1]"), 1, "shape", "true"},
      {"shape nested", one("U8", "[[1]]", "[0,1]"), 1, "shape", "[1]"},
      {"shape exponent", one("U8", "[1e0]", "[0,1]"), 1, "shape", ""},
      {"shape product at 2^64", one("U8", "[4294967296,4294967296]", "[0,0]"), 0, "shape_overflow",
       "[4294967296, 4294967296]"},
      {"zero after the overflow", one("U8", "[4294967296,4294967296,0]", "[0,0]"), 0,
       "shape_overflow", ""},
      {"bits at 2^63", one("U8", "[1152921504606846976]", "[0,0]"), 0, "shape_overflow", "U8"},
      {"extent at 2^63", one("U8", "[9223372036854775808]", "[0,0]"), 0, "shape_overflow", ""},
      {"offsets one", one("U8", "[1]", "[0]"), 1, "offsets", "1 numbers"},
      {"offsets text", one("U8", "[1]", R"(["0","1"])"), 1, "offsets", "position 0"},
      {"offsets reversed", one("U8", "[1]", "[1,0]"), 1, "offsets", "begin 1"},
      {"offsets huge", one("U8", "[1]", "[18446744073709551614,18446744073709551615]"), 1,
       "offsets_not_contiguous", "18446744073709551614"},
      {"odd number of 4-bit elements", one("F4", "[3,3]", "[0,5]"), 5, "sub_byte", "36 bits"},
      {"three 6-bit elements", one("F6_E3M2", "[3]", "[0,3]"), 3, "sub_byte", "18 bits"},
      {"zero extent with bytes", one("F32", "[0,4]", "[0,4]"), 4, "size_mismatch", "needs 0 bytes"},
      {"data cut", one("F32", "[2]", "[0,8]"), 7, "data_past_end", "holds 7"},
      {"data too long", one("F32", "[2]", "[0,8]"), 9, "trailing_bytes", "1 bytes"},
      {"data without tensor", "{}", 1, "trailing_bytes", "1 bytes"},
      {"hole before an empty tensor",
       R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
       2, "offsets_not_contiguous", "'b' begins at byte 2"},
  };
  for (const Refusal& c : kCases) {
    SCOPED_TRACE(c.name);
    const Result<Header> header = parse_file(file_of(c.json, c.data_bytes));
    ASSERT_FALSE(header);
    EXPECT_EQ(header.error().code(), Code::kCorruptInput);
    EXPECT_THAT(header.error().message(), StartsWith(std::string(c.error) + ": "));
    EXPECT_THAT(header.error().message(), HasSubstr(c.mention));
  }
}

TEST(SafetensorsHeader, RefusesBadLengths) {
  const struct {
    const char* name;
    std::string prefix;
    int64_t file_size;
    const char* error;
  } kCases[] = {
      {"empty file", "", 0, "file_too_short: "},
      {"seven bytes", std::string(7, '\0'), 7, "file_too_short: "},
      {"one above the limit", length_bytes(100'000'001), 1LL << 40, "header_too_large: "},
      {"2^64 - 1", length_bytes(UINT64_MAX), 1LL << 40, "header_too_large: "},
      {"one past the end", length_bytes(3) + "{}", 10, "header_past_end: "},
      {"prefix shorter than the header", length_bytes(20) + "{}", 1000, "header_past_end: "},
      {"no header", length_bytes(0), 8, "header_start: "},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    const Result<Header> header = parse_header(c.prefix, c.file_size);
    ASSERT_FALSE(header);
    EXPECT_THAT(header.error().message(), StartsWith(c.error));
  }
}

TEST(SafetensorsHeader, AcceptsScalarsEmptiesAndUnalignedData) {
  const std::string json =
      R"({"z":{"dtype":"F32","shape":[0,18446744073709],"data_offsets":[9,9]},)"
      R"("s":{"dtype":"F64","shape":[],"data_offsets":[1,9]},)"
      R"("u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("n":{"dtype":"F4","shape":[2,3],"data_offsets":[9,12]},)"
      R"("e":{"dtype":"U8","shape":[4,0],"data_offsets":[9,9]},)"
      R"("__metadata__":{"k":"v","":""}}   )";
  const auto data_begin = static_cast<int64_t>(8 + json.size());
  const Result<Header> header = parse_file(file_of(json, 12));
  ASSERT_TRUE(header) << header.error().message();
  EXPECT_EQ(header->data_begin, data_begin);
  std::vector<std::string> names;
  for (const TensorInfo& tensor : header->tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("u", "s", "e", "z", "n"));  // by begin, then end, then name
  const TensorInfo& scalar = header->tensors[1];
  EXPECT_EQ(scalar.offset, data_begin + 1);
  EXPECT_EQ(scalar.bytes, 8);
  EXPECT_EQ(element_count(scalar), 1);
  EXPECT_EQ(element_count(header->tensors[3]), 0);
  EXPECT_EQ(header->tensors[4].bytes, 3);
  EXPECT_THAT(header->metadata, ElementsAre(std::pair<std::string, std::string>("k", "v"),
                                            std::pair<std::string, std::string>("", "")));
}

TEST(SafetensorsHeader, KnowsTheBytesOfEveryType) {
  const struct {
    const char* dtype;
    int64_t bytes;  // of 8 elements
  } kCases[] = {{"BOOL", 8},    {"U8", 8},      {"I8", 8},          {"F8_E4M3", 8},
                {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
                {"I16", 16},    {"U16", 16},    {"F16", 16},        {"BF16", 16},
                {"I32", 32},    {"U32", 32},    {"F32", 32},        {"I64", 64},
                {"U64", 64},    {"F64", 64},    {"C64", 64},        {"F4", 4},
                {"F6_E2M3", 6}, {"F6_E3M2", 6}};
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.dtype);
    const std::string json = one(c.dtype, "[2,4]", "[0," + std::to_string(c.bytes) + "]");
    const Result<Header> header = parse_file(file_of(json, static_cast<size_t>(c.bytes)));
    ASSERT_TRUE(header) << header.error().message();
    EXPECT_EQ(formats::dtype_name(header->tensors[0].dtype), c.dtype);
  }
}

TEST(SafetensorsHeader, EveryCutOfAGoodFileIsRefused) {
  const std::string file = file_of(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  ASSERT_TRUE(parse_file(file));
  for (size_t n = 0; n < file.size(); ++n) {
    EXPECT_FALSE(parse_file(file.substr(0, n))) << n;
  }
}

TEST(SafetensorsHeader, ErrorTextIsBoundedAndPrintable) {
  const std::string json = "{\"" + std::string(5000, 'n') + "\\u001b[31m\":3}";
  const Result<Header> header = parse_file(file_of(json, 0));
  ASSERT_FALSE(header);
  EXPECT_LT(header.error().message().size(), 600u);
  const Result<Header> escape = parse_file(file_of("{\"\\u001b[31m\":3}", 0));
  ASSERT_FALSE(escape);
  EXPECT_THAT(escape.error().message(), HasSubstr("\\x1b[31m"));
}

TEST(SafetensorsHeader, ReadHeaderNamesTheFileBehindTheError) {
  const std::string path =
      (std::filesystem::path(::testing::TempDir()) / "header_test_bad.safetensors").string();
  for (const std::string& bytes : {std::string("abc"), file_of(one("U8", "[1]", "[0,1]"), 2)}) {
    std::ofstream(path, std::ios::binary) << bytes;
    Result<File> file = File::open(path);
    ASSERT_TRUE(file);
    const Result<Header> header = read_header(*file);
    ASSERT_FALSE(header);
    EXPECT_THAT(header.error().message(), HasSubstr(path));
    EXPECT_THAT(header.error().message(),
                StartsWith(bytes.size() < 8 ? "file_too_short: " : "trailing_bytes: "));
  }
  std::remove(path.c_str());
}

uint8_t hex_digit(char c) { return static_cast<uint8_t>(c <= '9' ? c - '0' : c - 'a' + 10); }

TEST(SafetensorsHeader, AcceptVectors) {
  const auto set = nibble::testing::VectorSet::load();
  ASSERT_FALSE(set.cases("file.accept").empty());
  for (const auto& c : set.cases("file.accept")) {
    SCOPED_TRACE(c.id);
    const std::vector<std::byte> blob = c.in("blob").bytes;
    const std::string file(reinterpret_cast<const char*>(blob.data()), blob.size());
    const Result<Header> header = parse_file(file);
    ASSERT_TRUE(header) << header.error().message();
    const auto& want = c.params.at("tensors");
    ASSERT_EQ(header->tensors.size(), want.size());
    for (const TensorInfo& tensor : header->tensors) {
      SCOPED_TRACE(tensor.name);
      ASSERT_TRUE(want.contains(tensor.name));
      const auto& facts = want.at(tensor.name);
      EXPECT_EQ(formats::dtype_name(tensor.dtype), facts.at(0).get<std::string>());
      EXPECT_EQ(tensor.shape, facts.at(1).get<std::vector<int64_t>>());
      const std::string hex = facts.at(2).get<std::string>();
      std::string bytes;
      for (size_t i = 0; i + 1 < hex.size(); i += 2) {
        bytes += static_cast<char>(hex_digit(hex[i]) * 16 + hex_digit(hex[i + 1]));
      }
      EXPECT_EQ(file.substr(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes)),
                bytes);
    }
    std::map<std::string, std::string> metadata(header->metadata.begin(), header->metadata.end());
    EXPECT_EQ(metadata, (c.params.at("metadata").get<std::map<std::string, std::string>>()));
  }
}

TEST(SafetensorsHeader, RefuseVectors) {
  const auto set = nibble::testing::VectorSet::load();
  ASSERT_FALSE(set.cases("file.refuse").empty());
  for (const auto& c : set.cases("file.refuse")) {
    SCOPED_TRACE(c.id);
    const std::vector<std::byte> blob = c.in("blob").bytes;
    const Result<Header> header =
        parse_file(std::string(reinterpret_cast<const char*>(blob.data()), blob.size()));
    ASSERT_FALSE(header);
    EXPECT_THAT(header.error().message(), StartsWith(c.error + ": "));
  }
}

}  // namespace
}  // namespace nibble::checkpoint
