#include "codec/csf_cut.h"

#include <gtest/gtest.h>

#include "codec/csf_test_vectors.h"

namespace nibble::codec {
namespace {

using namespace nibble::codec::testing;

const VectorSet& vectors() {
  static const VectorSet set = VectorSet::load();
  return set;
}

CsfCut cut_of(const Case& c) {
  CsfCut cut;
  cut.row_begin = c.params.at("row_range").at(0).get<int64_t>();
  cut.row_end = c.params.at("row_range").at(1).get<int64_t>();
  cut.col_begin = c.params.at("column_range").at(0).get<int64_t>();
  cut.col_end = c.params.at("column_range").at(1).get<int64_t>();
  cut.out_rows = c.params.value("out_rows", int64_t{0});
  cut.out_cols = c.params.value("out_columns", int64_t{0});
  return cut;
}

TEST(CsfCutVectors, Cut) {
  ASSERT_FALSE(vectors().cases("csf.cut").empty());
  int padded = 0;
  for (const Case& c : vectors().cases("csf.cut")) {
    SCOPED_TRACE(c.id);
    const CsfCut cut = cut_of(c);
    const Blob fixed = c.in("fixed"), exceptions = c.in("exceptions");
    const Result<CsfView> view =
        read_csf(kind_of(c), param(c, "rows"), param(c, "columns"), stored_of(fixed, exceptions));
    ASSERT_TRUE(view) << view.error().message();
    const Result<CsfPlane> got = cut_csf(*view, cut);
    ASSERT_TRUE(got) << got.error().message();
    const Blob scale = c.out("scale");
    EXPECT_EQ(*got, plane_of(kind_of(c), scale.shape.at(0), scale.shape.at(1), c.out("fixed"),
                             c.out("exceptions")));
    EXPECT_EQ(decode(*got), scale.as<uint8_t>());
    padded += cut.out_rows != 0;
  }
  EXPECT_EQ(padded, 3);
}

TEST(CsfCutVectors, Refuse) {
  ASSERT_FALSE(vectors().cases("csf.cut_refuse").empty());
  for (const Case& c : vectors().cases("csf.cut_refuse")) {
    SCOPED_TRACE(c.id);
    const int64_t rows = param(c, "rows"), cols = param(c, "columns");
    const CsfPlane plane = encode(kind_of(c), rows, cols, Bytes(static_cast<size_t>(rows * cols)));
    const Result<CsfPlane> got = cut_csf(plane.view(), cut_of(c));
    ASSERT_FALSE(got);
    EXPECT_TRUE(names(got.error(), c.error)) << got.error().message();
  }
}

TEST(CsfCutVectors, Stack) {
  ASSERT_FALSE(vectors().cases("csf.stack").empty());
  for (const Case& c : vectors().cases("csf.stack")) {
    SCOPED_TRACE(c.id);
    const CsfKind kind = kind_of(c);
    const int64_t first_rows = c.params.at("rows").at(0).get<int64_t>();
    const int64_t second_rows = c.params.at("rows").at(1).get<int64_t>();
    const int64_t cols = param(c, "columns");
    const CsfPlane first =
        plane_of(kind, first_rows, cols, c.in("first.fixed"), c.in("first.exceptions"));
    const CsfPlane second =
        plane_of(kind, second_rows, cols, c.in("second.fixed"), c.in("second.exceptions"));
    const Result<CsfPlane> got = stack_csf(std::vector{first.view(), second.view()});
    ASSERT_TRUE(got) << got.error().message();
    EXPECT_EQ(*got,
              plane_of(kind, first_rows + second_rows, cols, c.out("fixed"), c.out("exceptions")));
    const Bytes scale = c.out("scale").as<uint8_t>();
    EXPECT_EQ(decode(*got), scale);
    EXPECT_EQ(encode(kind, first_rows + second_rows, cols, scale), *got);
  }
}

TEST(CsfCutVectors, Clamp247) {
  ASSERT_FALSE(vectors().cases("csf.clamp_247").empty());
  for (const Case& c : vectors().cases("csf.clamp_247")) {
    SCOPED_TRACE(c.id);
    const int64_t rows = param(c, "rows"), cols = param(c, "columns");
    const CsfPlane plane = plane_of(CsfKind::kMxfp4, rows, cols, c.in("fixed"), c.in("exceptions"));
    const Result<CsfPlane> got = clamp_csf_247(plane.view());
    ASSERT_TRUE(got);
    EXPECT_EQ(*got, plane_of(CsfKind::kMxfp4, rows, cols, c.out("fixed"), c.out("exceptions")));
    EXPECT_EQ(decode(*got), c.out("scale").as<uint8_t>());
  }
}

TEST(CsfCut, ClampOfRandomStreams) {
  std::mt19937 rng(21);
  for (int round = 0; round < 2000; ++round) {
    const int64_t cols = 1 + static_cast<int64_t>(rng() % 30);
    const CsfPlane stream = random_legal_stream(CsfKind::kMxfp4, 32, cols, rng);
    Bytes want = reference_decode(stream);
    for (uint8_t& v : want) v = std::min<uint8_t>(v, 247);
    const Result<CsfPlane> got = clamp_csf_247(stream.view());
    ASSERT_TRUE(got);
    ASSERT_TRUE(reread(*got, 32, cols));
    ASSERT_EQ(reference_decode(*got), want);
  }
  EXPECT_FALSE(clamp_csf_247(encode(CsfKind::kNvfp4, 16, 2, Bytes(32)).view()));
}

// Any cut decodes to the sliced source. A cut of rows keeps whole rows, and the best base of a row
// depends on that row alone, so it also equals the encoding of the sliced source; a cut of columns
// copies bases that fit the whole row, so its bytes may differ (spec: bases are not refitted).
TEST(CsfCut, RandomCutsDecodeToTheSlice) {
  std::mt19937 rng(22);
  int same = 0, other = 0;
  for (int round = 0; round < 6000; ++round) {
    const CsfKind kind = round % 2 == 0 ? CsfKind::kNvfp4 : CsfKind::kMxfp4;
    const int64_t step = kind == CsfKind::kNvfp4 ? 2 : 1;
    auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
    const int64_t rows = 16 * (1 + below(4)), cols = step * (1 + below(round % 7 == 0 ? 80 : 20));
    const bool legal_only = round % 5 == 0;
    const CsfPlane stream = legal_only
                                ? random_legal_stream(kind, rows, cols, rng)
                                : encode(kind, rows, cols, random_plane(-1, rows, cols, rng));
    const Bytes plane = reference_decode(stream);
    CsfCut cut;
    cut.row_begin = 16 * below(rows / 16);
    cut.row_end = cut.row_begin + 16 * (1 + below((rows - cut.row_begin) / 16));
    cut.col_begin = step * below(cols / step);
    cut.col_end = cut.col_begin + step * (1 + below((cols - cut.col_begin) / step));
    if (round % 3 == 0) {
      cut.col_begin = 0;
      cut.col_end = cols;
    }
    const Result<CsfPlane> got = cut_csf(stream.view(), cut);
    ASSERT_TRUE(got) << got.error().message();
    const Bytes want = slice(plane, cols, cut.row_begin, cut.row_end, cut.col_begin, cut.col_end);
    const Result<CsfView> checked = reread(*got, got->rows, got->cols);
    ASSERT_TRUE(checked) << checked.error().message();
    ASSERT_EQ(reference_decode(*got), want);
    if (legal_only) continue;
    const bool equal = reference_encode(kind, got->rows, got->cols, want) == *got;
    if (cut.col_begin == 0 && cut.col_end == cols) {
      ASSERT_TRUE(equal);
    }
    ++(equal ? same : other);
  }
  EXPECT_GT(same, 1000);
  EXPECT_GT(other, 1000);
}

TEST(CsfCut, RandomPaddedCuts) {
  std::mt19937 rng(23);
  auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 1500; ++round) {
    const int64_t rows = 48, cols = 2 * (2 + below(12));
    const CsfPlane stream = random_legal_stream(CsfKind::kNvfp4, rows, cols, rng);
    const Bytes plane = reference_decode(stream);
    CsfCut cut{16 * below(2), 48, 2 * below(2), cols, 0, 0};
    const int64_t kept_rows = cut.row_end - cut.row_begin, kept_cols = cut.col_end - cut.col_begin;
    cut.out_rows = kept_rows + 16 * below(3);
    cut.out_cols = kept_cols + 2 * below(4);
    const Result<CsfPlane> got = cut_csf(stream.view(), cut);
    ASSERT_TRUE(got) << got.error().message();
    ASSERT_EQ(got->rows, cut.out_rows);
    ASSERT_TRUE(reread(*got, cut.out_rows, cut.out_cols));
    const Bytes out = reference_decode(*got);
    for (int64_t r = 0; r < cut.out_rows; ++r) {
      for (int64_t c = 0; c < cut.out_cols; ++c) {
        const uint8_t base =
            got->fixed[static_cast<size_t>(r / 16 * 16 * (1 + cut.out_cols / 2) + r % 16)];
        uint8_t want = r < kept_rows ? base : 0x38;
        if (r < kept_rows && c < kept_cols) {
          want = plane[static_cast<size_t>((cut.row_begin + r) * cols + cut.col_begin + c)];
        }
        ASSERT_EQ(out[static_cast<size_t>(r * cut.out_cols + c)], want) << r << ' ' << c;
      }
    }
  }
}

TEST(CsfCut, RefusesPaddingThatCannotBe) {
  const CsfPlane nvfp4 = encode(CsfKind::kNvfp4, 32, 8, Bytes(256, 60));
  const CsfPlane mxfp4 = encode(CsfKind::kMxfp4, 32, 8, Bytes(256, 60));
  const struct {
    const CsfPlane* plane;
    CsfCut cut;
    const char* error;
  } kCases[] = {
      {&nvfp4, {0, 32, 0, 8, 16, 8}, "cut_padding"},
      {&nvfp4, {0, 32, 0, 8, 32, 6}, "cut_padding"},
      {&nvfp4, {0, 32, 0, 8, 40, 8}, "cut_padding"},
      {&nvfp4, {0, 32, 0, 8, 32, 9}, "cut_padding"},
      {&nvfp4, {0, 32, 0, 8, -16, 8}, "cut_padding"},
      {&mxfp4, {0, 32, 0, 8, 48, 8}, "cut_padding"},
      {&nvfp4, {0, 32, 0, 8, 1 << 22, 8}, "position_limit"},
      {&nvfp4, {-16, 32, 0, 8, 0, 0}, "cut_rows"},
      {&nvfp4, {0, 32, -2, 8, 0, 0}, "cut_columns"},
      {&nvfp4, {0, INT64_MAX, 0, 8, 0, 0}, "cut_rows"},
      {&nvfp4, {INT64_MIN, INT64_MAX, 0, 8, 0, 0}, "cut_rows"},
      {&mxfp4, {0, 32, 3, INT64_MAX, 0, 0}, "cut_columns"},
  };
  for (const auto& c : kCases) {
    const Result<CsfPlane> got = cut_csf(c.plane->view(), c.cut);
    ASSERT_FALSE(got) << c.error;
    EXPECT_TRUE(names(got.error(), c.error)) << got.error().message();
    EXPECT_EQ(got.error().code(), Code::kInvalidArgument);
  }
  EXPECT_TRUE(cut_csf(mxfp4.view(), {0, 32, 0, 8, 32, 8}));  // the same size is no padding
}

// Gate and up are cut by rows, down by columns, for every number of ranks that divides the plane;
// the shares then stack (rows) or sit side by side (columns) to the source again.
TEST(CsfCut, TensorParallelShares) {
  std::mt19937 rng(24);
  int checked = 0;
  for (const CsfKind kind : {CsfKind::kNvfp4, CsfKind::kMxfp4}) {
    for (const int64_t ranks : {2, 3, 4, 6, 8, 12, 16}) {
      for (const auto& [rows, cols] :
           {std::pair<int64_t, int64_t>{768, 96}, {1536, 48}, {256, 64}, {192, 24}}) {
        const Bytes plane = random_plane(-1, rows, cols, rng);
        const CsfPlane whole = encode(kind, rows, cols, plane);
        if (rows % (16 * ranks) == 0) {
          std::vector<CsfPlane> shares;
          for (int64_t r = 0; r < ranks; ++r) {
            const int64_t from = rows / ranks * r, to = rows / ranks * (r + 1);
            const Result<CsfPlane> part = cut_csf(whole.view(), {from, to, 0, cols, 0, 0});
            ASSERT_TRUE(part);
            const Bytes want = slice(plane, cols, from, to, 0, cols);
            ASSERT_EQ(decode(*part), want);
            ASSERT_EQ(*part, encode(kind, to - from, cols, want));
            shares.push_back(*part);
          }
          std::vector<CsfView> views;
          for (const CsfPlane& share : shares) views.push_back(share.view());
          const Result<CsfPlane> joined = stack_csf(views);
          ASSERT_TRUE(joined);
          ASSERT_EQ(*joined, whole);
          ++checked;
        }
        if (cols % (ranks * (kind == CsfKind::kNvfp4 ? 2 : 1)) == 0) {
          for (int64_t r = 0; r < ranks; ++r) {
            const int64_t from = cols / ranks * r, to = cols / ranks * (r + 1);
            const Result<CsfPlane> part = cut_csf(whole.view(), {0, rows, from, to, 0, 0});
            ASSERT_TRUE(part);
            ASSERT_EQ(decode(*part), slice(plane, cols, 0, rows, from, to));
            ASSERT_TRUE(reread(*part, rows, to - from));
          }
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 60);
}

TEST(CsfCut, StackRefusesUnequalParts) {
  const CsfPlane a = encode(CsfKind::kNvfp4, 16, 4, Bytes(64)),
                 b = encode(CsfKind::kNvfp4, 16, 6, Bytes(96)),
                 c = encode(CsfKind::kMxfp4, 16, 4, Bytes(64)),
                 wide = encode(CsfKind::kMxfp4, 16, 1 << 20, Bytes(1 << 24));
  EXPECT_FALSE(stack_csf(std::vector{a.view(), b.view()}));
  EXPECT_FALSE(stack_csf(std::vector{a.view(), c.view()}));
  EXPECT_FALSE(stack_csf({}));
  const Result<CsfPlane> over = stack_csf(std::vector{wide.view(), wide.view()});
  ASSERT_FALSE(over);
  EXPECT_TRUE(names(over.error(), "position_limit"));
}

}  // namespace
}  // namespace nibble::codec
