#include "codec/csf.h"

#include <gtest/gtest.h>

#include <set>

#include "codec/csf_inventory.h"
#include "codec/csf_test_vectors.h"

namespace nibble::codec {
namespace {

using namespace nibble::codec::testing;

constexpr CsfKind kKinds[] = {CsfKind::kNvfp4, CsfKind::kMxfp4};

class CsfVectors : public ::testing::Test {
 protected:
  const std::vector<Case>& cases(const std::string& op) {
    static const VectorSet set = VectorSet::load();
    EXPECT_FALSE(set.cases(op).empty()) << op;
    return set.cases(op);
  }
};

TEST_F(CsfVectors, RoundTrip) {
  for (const Case& c : cases("csf.round_trip")) {
    SCOPED_TRACE(c.id);
    const CsfKind kind = kind_of(c);
    const int64_t rows = param(c, "rows"), cols = param(c, "columns");
    const Bytes scale = c.in("scale").as<uint8_t>();
    const Blob fixed = c.out("fixed"), exceptions = c.out("exceptions");
    const CsfPlane want = plane_of(kind, rows, cols, fixed, exceptions);
    EXPECT_EQ(reference_encode(kind, rows, cols, scale), want);
    const Result<CsfView> view = read_csf(kind, rows, cols, stored_of(fixed, exceptions));
    ASSERT_TRUE(view) << view.error().message();
    EXPECT_TRUE(is_canonical_csf(*view));
    for (const CsfIsa isa : csf_isas()) {
      SCOPED_TRACE(csf_isa_name(isa));
      EXPECT_EQ(encode(kind, rows, cols, scale, isa), want);
      Bytes out(scale.size());
      ASSERT_TRUE(decode_csf(*view, out, isa));
      EXPECT_EQ(out, scale);
    }
  }
}

TEST_F(CsfVectors, DecodeLegalStreams) {
  for (const Case& c : cases("csf.decode")) {
    SCOPED_TRACE(c.id);
    const Blob fixed = c.in("fixed"), exceptions = c.in("exceptions");
    const Result<CsfView> view =
        read_csf(kind_of(c), param(c, "rows"), param(c, "columns"), stored_of(fixed, exceptions));
    ASSERT_TRUE(view) << view.error().message();
    const Bytes scale = c.out("scale").as<uint8_t>();
    for (const CsfIsa isa : csf_isas()) {
      Bytes out(scale.size());
      ASSERT_TRUE(decode_csf(*view, out, isa));
      EXPECT_EQ(out, scale) << csf_isa_name(isa);
    }
    EXPECT_EQ(is_canonical_csf(*view), c.params.at("canonical").get<bool>());
  }
}

TEST_F(CsfVectors, Refuse) {
  for (const Case& c : cases("csf.refuse")) {
    SCOPED_TRACE(c.id);
    const Blob fixed = c.in("fixed"), exceptions = c.in("exceptions");
    const Result<CsfView> view =
        read_csf(kind_of(c), param(c, "rows"), param(c, "columns"), stored_of(fixed, exceptions));
    ASSERT_FALSE(view);
    EXPECT_EQ(view.error().code(), Code::kCorruptInput);
    EXPECT_TRUE(names(view.error(), c.error)) << view.error().message() << " for " << c.error;
  }
}

TEST_F(CsfVectors, Geometry) {
  for (const Case& c : cases("csf.geometry")) {
    SCOPED_TRACE(c.id);
    const Result<void> fits = check_csf_geometry(kind_of(c), param(c, "rows"), param(c, "columns"));
    EXPECT_EQ(fits.has_value(), c.error.empty());
    if (!fits) {
      EXPECT_TRUE(names(fits.error(), c.error)) << fits.error().message();
    }
  }
}

TEST_F(CsfVectors, Inventory) {
  for (const Case& c : cases("csf.inventory")) {
    SCOPED_TRACE(c.id);
    const auto stored = c.params.at("names").get<std::set<std::string>>();
    const Result<CsfForm> form =
        judge_csf_names(kind_of(c, "codec"), c.params.at("scale").get<std::string>(),
                        [&](std::string_view name) { return stored.contains(std::string(name)); });
    EXPECT_EQ(form.has_value(), c.error.empty());
    if (form) {
      EXPECT_EQ(*form, stored.size() == 2 ? CsfForm::kCompressed : CsfForm::kPlain);
    } else {
      EXPECT_TRUE(names(form.error(), c.error)) << form.error().message();
    }
  }
}

TEST(Csf, GeometryRefusesInOrderAndWithoutOverflow) {
  const struct {
    CsfKind kind;
    int64_t rows, cols;
    const char* error;
  } kCases[] = {
      {CsfKind::kNvfp4, -16, 2, "rows_not_16"},
      {CsfKind::kNvfp4, 16, 0, "rows_not_16"},
      {CsfKind::kMxfp4, 16, -1, "rows_not_16"},
      {CsfKind::kNvfp4, 17, 3, "rows_not_16"},
      {CsfKind::kNvfp4, int64_t{1} << 62, 3, "columns_odd"},
      {CsfKind::kMxfp4, int64_t{1} << 62, INT64_MAX, "position_limit"},
      {CsfKind::kMxfp4, 16, (1 << 20) + 1, "position_limit"},
  };
  for (const auto& c : kCases) {
    const Result<void> fits = check_csf_geometry(c.kind, c.rows, c.cols);
    ASSERT_FALSE(fits) << c.error;
    EXPECT_TRUE(names(fits.error(), c.error)) << fits.error().message();
  }
  EXPECT_TRUE(check_csf_geometry(CsfKind::kMxfp4, 16, 1));
}

TEST(Csf, ConstantRowsHaveTheSpecsBases) {
  const struct {
    CsfKind kind;
    uint8_t value, base;
  } kCases[] = {{CsfKind::kNvfp4, 56, 41}, {CsfKind::kMxfp4, 56, 55},   {CsfKind::kNvfp4, 0, 0},
                {CsfKind::kMxfp4, 0, 0},   {CsfKind::kNvfp4, 255, 240}, {CsfKind::kMxfp4, 255, 254},
                {CsfKind::kNvfp4, 15, 0},  {CsfKind::kNvfp4, 16, 1},    {CsfKind::kMxfp4, 1, 0}};
  for (const auto& c : kCases) {
    const CsfPlane out = encode(c.kind, 16, 2, Bytes(32, c.value));
    EXPECT_EQ(out.fixed[0], c.base);
    EXPECT_TRUE(out.exceptions.empty());
  }
}

// The faults of one stream decide in the spec's order, whatever else is wrong with it.
TEST(Csf, FirstFaultDecides) {
  // MXFP4, 16 x 9: bases 0..15, then two bytes a row.
  Bytes fixed(48, 0);
  std::vector<uint32_t> words = {5, 4, 144};
  std::vector<int64_t> fixed_shape = {1, 47}, exception_shape = {3, 1};
  fixed[7] = 255;
  fixed[16 + 2 * 3 + 1] = 2;
  bool fixed_is_u8 = false, exceptions_are_u32 = false;
  int64_t rows = 24, cols = 9;
  auto read = [&] {
    CsfStored facts{fixed_is_u8, exceptions_are_u32, fixed_shape, exception_shape, fixed, {}};
    facts.exceptions = {reinterpret_cast<const uint8_t*>(words.data()), words.size() * 4};
    return read_csf(CsfKind::kMxfp4, rows, cols, facts);
  };
  auto expect = [&](const std::string& name) {
    const Result<CsfView> view = read();
    ASSERT_FALSE(view) << name;
    EXPECT_TRUE(names(view.error(), name)) << view.error().message();
  };
  expect("rows_not_16");
  rows = 16;
  cols = 1 << 21;
  expect("position_limit");
  cols = 9;
  expect("fixed_dtype");
  fixed_is_u8 = true;
  expect("exception_dtype");
  exceptions_are_u32 = true;
  expect("fixed_shape");
  fixed_shape = {1, 48};
  expect("exception_shape");
  exception_shape = {3};
  expect("base_range");
  fixed[7] = 254;
  expect("tail_bits");
  fixed[16 + 2 * 3 + 1] = 1;
  expect("exception_order");
  words[1] = 6;
  expect("exception_range");
  words[2] = 143;
  EXPECT_TRUE(read());
  words.push_back(0);  // a payload longer than its shape says
  expect("exception_shape");
}

// The whole encoder against the spec's three steps, on every ISA: 120,000 planes.
class CsfRandom : public ::testing::TestWithParam<CsfKind> {};

TEST_P(CsfRandom, EncodesAsTheSpecSaysAndDecodesBack) {
  const CsfKind kind = GetParam();
  std::mt19937 rng(kind == CsfKind::kNvfp4 ? 1 : 2);
  int64_t planes = 0, without = 0, dense = 0;
  for (int round = 0; round < 60000; ++round) {
    const int64_t rows = rng() % 8 == 0 ? 32 : 16;
    int64_t cols = 1 + static_cast<int64_t>(rng() % (rng() % 16 == 0 ? 150 : 20));
    if (kind == CsfKind::kNvfp4) cols += cols % 2;
    const int sort = static_cast<int>(rng() % (kPlaneSorts + 2)) - 2;
    const Bytes plane = random_plane(sort, rows, cols, rng);
    const CsfPlane want = reference_encode(kind, rows, cols, plane);
    ASSERT_EQ(reference_decode(want), plane);
    for (const CsfIsa isa : csf_isas()) {
      const CsfPlane got = encode(kind, rows, cols, plane, isa);
      ASSERT_EQ(got, want) << csf_isa_name(isa) << " round " << round << " sort " << sort;
      ASSERT_EQ(decode(got, isa), plane) << csf_isa_name(isa) << " round " << round;
    }
    const Result<CsfView> again = reread(want, rows, cols);
    ASSERT_TRUE(again) << again.error().message();
    ++planes;
    without += want.exceptions.empty();
    dense += 2 * want.exceptions.size() > plane.size();
  }
  EXPECT_EQ(planes, 60000);
  EXPECT_GT(without, 3000);  // the sorts do reach both ends
  EXPECT_GT(dense, 1500);
}

TEST_P(CsfRandom, DecodesEveryLegalStream) {
  const CsfKind kind = GetParam();
  std::mt19937 rng(kind == CsfKind::kNvfp4 ? 3 : 4);
  int canonical = 0;
  for (int round = 0; round < 2000; ++round) {
    const int64_t rows = 16 * (1 + static_cast<int64_t>(rng() % 3));
    int64_t cols = 1 + static_cast<int64_t>(rng() % (round % 4 == 0 ? 140 : 40));
    if (kind == CsfKind::kNvfp4) cols += cols % 2;
    const CsfPlane stream = random_legal_stream(kind, rows, cols, rng);
    const Result<CsfView> view = reread(stream, rows, cols);
    ASSERT_TRUE(view) << view.error().message();
    const Bytes want = reference_decode(stream);
    for (const CsfIsa isa : csf_isas()) {
      ASSERT_EQ(decode(stream, isa), want) << csf_isa_name(isa) << " round " << round;
      const int64_t from = 16 * static_cast<int64_t>(rng() % static_cast<uint64_t>(rows / 16));
      const int64_t to =
          from + 16 * static_cast<int64_t>(rng() % static_cast<uint64_t>((rows - from) / 16 + 1));
      Bytes part(static_cast<size_t>((to - from) * cols));
      ASSERT_TRUE(decode_csf_rows(*view, from, to, part, isa));
      ASSERT_EQ(part, slice(want, cols, from, to, 0, cols));
    }
    const bool is_canonical = is_canonical_csf(*view);
    ASSERT_EQ(is_canonical, reference_encode(kind, rows, cols, want) == stream);
    canonical += is_canonical;
    const CsfPlane again = encode(kind, rows, cols, want);
    ASSERT_TRUE(is_canonical_csf(again.view()));
  }
  EXPECT_LT(canonical, 20);
}

// Any damage is refused, or leaves a legal stream that decodes inside its bounds.
TEST_P(CsfRandom, FlippedBytesAreRefusedOrStillLegal) {
  const CsfKind kind = GetParam();
  std::mt19937 rng(kind == CsfKind::kNvfp4 ? 5 : 6);
  int refused = 0, accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const int64_t rows = 16 * (1 + static_cast<int64_t>(rng() % 2));
    int64_t cols = 1 + static_cast<int64_t>(rng() % 30);
    if (kind == CsfKind::kNvfp4) cols += cols % 2;
    CsfPlane stream = encode(kind, rows, cols, random_plane(-1, rows, cols, rng));
    for (int flips = 1 + static_cast<int>(rng() % 3); flips > 0; --flips) {
      const auto bit = static_cast<uint8_t>(1U << rng() % 8);
      if (stream.exceptions.empty() || rng() % 2 == 0) {
        stream.fixed[rng() % stream.fixed.size()] ^= bit;
      } else {
        stream.exceptions[rng() % stream.exceptions.size()] ^= uint32_t{bit} << 8 * (rng() % 4);
      }
    }
    const Result<CsfView> view = reread(stream, rows, cols);
    if (!view) {
      ++refused;
      continue;
    }
    ++accepted;
    const Bytes want = reference_decode(stream);
    for (const CsfIsa isa : csf_isas()) ASSERT_EQ(decode(stream, isa), want);
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted, 1000);
}

// Every byte value against every base, and rows longer than a few vectors.
TEST_P(CsfRandom, LongRowsAgreeOnEveryIsa) {
  const CsfKind kind = GetParam();
  std::mt19937 rng(kind == CsfKind::kNvfp4 ? 7 : 8);
  for (const int64_t cols : {126, 128, 130, 448, 1022, 1024, 2050}) {
    for (int sort = -1; sort < kPlaneSorts; ++sort) {
      const Bytes plane = random_plane(sort, 48, cols, rng);
      const CsfPlane want = reference_encode(kind, 48, cols, plane);
      for (const CsfIsa isa : csf_isas()) {
        ASSERT_EQ(encode(kind, 48, cols, plane, isa), want) << csf_isa_name(isa) << ' ' << cols;
        ASSERT_EQ(decode(want, isa), plane) << csf_isa_name(isa) << ' ' << cols;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, CsfRandom, ::testing::ValuesIn(kKinds),
                         [](const auto& kind) { return std::string(csf_kind_name(kind.param)); });

TEST(Csf, LastPositionOfTheLargestPlane) {
  const int64_t rows = 1 << 16, cols = 256;
  Bytes plane(static_cast<size_t>(rows * cols), 100);
  plane.back() = 3;
  const CsfPlane out = encode(CsfKind::kNvfp4, rows, cols, plane);
  ASSERT_EQ(out.exceptions.size(), 1U);
  EXPECT_EQ(out.exceptions[0], 3U << 24 | 0xFFFFFF);
  EXPECT_EQ(decode(out), plane);
  EXPECT_TRUE(out.view().shrinks());
}

TEST(Csf, UnalignedExceptionsAndSizes) {
  std::mt19937 rng(9);
  const Bytes plane = random_plane(4, 16, 32, rng);
  const CsfPlane stored = encode(CsfKind::kMxfp4, 16, 32, plane);
  EXPECT_FALSE(stored.view().shrinks());  // random bytes: nearly every cell is an exception
  EXPECT_EQ(stored.view().stored_bytes(),
            static_cast<int64_t>(stored.fixed.size() + 4 * stored.exceptions.size()));
  Bytes file(1 + 4 * stored.exceptions.size());
  std::memcpy(file.data() + 1, stored.exceptions.data(), file.size() - 1);
  const int64_t fixed_shape[] = {1, 16 * 5};
  const int64_t exception_shape[] = {static_cast<int64_t>(stored.exceptions.size())};
  CsfStored facts;
  facts.fixed_shape = fixed_shape;
  facts.exception_shape = exception_shape;
  facts.fixed = stored.fixed;
  facts.exceptions = std::span(file).subspan(1);
  const Result<CsfView> view = read_csf(CsfKind::kMxfp4, 16, 32, facts);
  ASSERT_TRUE(view);
  Bytes out(plane.size());
  ASSERT_TRUE(decode_csf(*view, out));
  EXPECT_EQ(out, plane);
}

TEST(Csf, WrongCallsAreErrors) {
  EXPECT_FALSE(encode_csf(CsfKind::kNvfp4, 16, 2, Bytes(31)));
  EXPECT_FALSE(encode_csf(CsfKind::kNvfp4, 15, 2, Bytes(30)));
  const CsfPlane stored = encode(CsfKind::kNvfp4, 32, 2, Bytes(64, 9));
  Bytes out(32, 77);
  EXPECT_FALSE(decode_csf(stored.view(), out));
  EXPECT_FALSE(decode_csf_rows(stored.view(), 8, 24, out));
  EXPECT_FALSE(decode_csf_rows(stored.view(), 32, 48, out));
  EXPECT_FALSE(decode_csf_rows(stored.view(), -16, 0, out));
  EXPECT_EQ(out, Bytes(32, 77));
  EXPECT_TRUE(decode_csf_rows(stored.view(), 16, 32, out));
  EXPECT_EQ(out, Bytes(32, 9));
}

TEST(Csf, NamesAreThoseOfContainers) {
  EXPECT_EQ(csf_codec_name(CsfKind::kNvfp4), "byte-window4-fixed-stream-u24-exceptions/1");
  EXPECT_EQ(csf_codec_name(CsfKind::kMxfp4), "row-base-offset1-u24-exceptions/1");
  EXPECT_EQ(csf_fixed_name(CsfKind::kMxfp4, "a.s"), "a.s.mxfp4_csf_fixed");
  EXPECT_EQ(csf_exceptions_name(CsfKind::kNvfp4, "a.s"), "a.s.nvfp4_csf_exceptions");
}

}  // namespace
}  // namespace nibble::codec
