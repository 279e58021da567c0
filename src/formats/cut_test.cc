// A cut share must decode to the same floats as that part of the whole, for every format and rank.
#include "formats/cut.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

namespace nibble::formats {
namespace {

struct Owned {
  QuantizedMatrix matrix;
  explicit Owned(MatrixView meta, uint32_t seed) {
    std::mt19937 rng(seed);
    matrix.meta = meta;
    matrix.codes.resize(static_cast<size_t>(meta.rows * code_row_bytes(meta.format, meta.cols)));
    matrix.scales.resize(static_cast<size_t>(scale_plane_bytes(meta)));
    for (std::byte& b : matrix.codes) b = static_cast<std::byte>(rng() & 255);
    for (std::byte& b : matrix.scales) b = static_cast<std::byte>(rng() & 255);
  }
};

MatrixView make_view(FormatId format, int64_t rows, int64_t cols) {
  MatrixView view;
  view.format = format;
  view.scale_kind = block_format(format).scale;
  view.rows = rows;
  view.cols = cols;
  view.global = 0.25f;
  if (format == FormatId::kFp8Block) {
    view.block_rows = 20;
    view.block_cols = 48;
    view.origin_row = 7;
    view.origin_col = 40;
  }
  if (format == FormatId::kNf3) view.nf3_levels = kNf3Levels;
  return view;
}

std::vector<float> decode_all(const MatrixView& view) {
  std::vector<float> out(static_cast<size_t>(view.rows * view.cols));
  decode_rows(view, 0, view.rows, out.data());
  return out;
}

TEST(Cut, EveryShareDecodesAsThatPartOfTheWhole) {
  const int64_t rows = 48, cols = 192;
  for (int f = 0; f < kFormatCount; ++f) {
    const Owned whole(make_view(static_cast<FormatId>(f), rows, cols), static_cast<uint32_t>(f));
    const std::vector<float> values = decode_all(whole.matrix.view());
    for (const CutAxis axis : {CutAxis::kRows, CutAxis::kColumns}) {
      for (const int size : {1, 2, 3}) {
        for (int rank = 0; rank < size; ++rank) {
          SCOPED_TRACE(cat(block_format(static_cast<FormatId>(f)).name, " rank ", rank, " of ",
                           size, axis == CutAxis::kRows ? " rows" : " columns"));
          const auto part = cut_planes(whole.matrix.view(), axis, rank, size);
          ASSERT_TRUE(part) << part.error().message();
          const MatrixView view = part->view();
          ASSERT_TRUE(check_geometry(view));
          EXPECT_EQ(static_cast<int64_t>(part->codes.size()),
                    view.rows * code_row_bytes(view.format, view.cols));
          ASSERT_EQ(static_cast<int64_t>(part->scales.size()), scale_plane_bytes(view));
          const int64_t row0 = axis == CutAxis::kRows ? rank * rows / size : 0;
          const int64_t col0 = axis == CutAxis::kRows ? 0 : rank * cols / size;
          EXPECT_EQ(view.rows, axis == CutAxis::kRows ? rows / size : rows);
          EXPECT_EQ(view.cols, axis == CutAxis::kRows ? cols : cols / size);
          const std::vector<float> got = decode_all(view);
          int wrong = 0;
          for (int64_t r = 0; r < view.rows; ++r) {
            for (int64_t c = 0; c < view.cols; ++c) {
              const float want = values[static_cast<size_t>((row0 + r) * cols + col0 + c)];
              const float have = got[static_cast<size_t>(r * view.cols + c)];
              wrong += std::isnan(want)
                           ? !std::isnan(have)
                           : std::bit_cast<uint32_t>(have) != std::bit_cast<uint32_t>(want);
            }
          }
          EXPECT_EQ(wrong, 0);
        }
      }
    }
  }
}

TEST(Cut, RefusesSharesThatSplitAGroupOrAreUnequal) {
  const struct {
    FormatId format;
    int64_t rows, cols;
    CutAxis axis;
    int size;
  } kCases[] = {
      {FormatId::kNvfp4, 8, 48, CutAxis::kColumns, 2},
      {FormatId::kMxfp4, 8, 96, CutAxis::kColumns, 2},
      {FormatId::kMxfp8, 8, 96, CutAxis::kColumns, 2},
      {FormatId::kNf3, 8, 96, CutAxis::kColumns, 2},
      {FormatId::kNvfp4, 9, 64, CutAxis::kRows, 2},
      {FormatId::kBf16, 9, 7, CutAxis::kColumns, 2},
      {FormatId::kMxfp4, 2, 32, CutAxis::kRows, 4},
  };
  for (const auto& c : kCases) {
    const auto cut = cut_matrix(make_view(c.format, c.rows, c.cols), c.axis, 0, c.size);
    ASSERT_FALSE(cut) << block_format(c.format).name;
    EXPECT_EQ(cut.error().code(), Code::kInvalidArgument);
    EXPECT_EQ(cut.error().message().rfind("cut_not_group", 0), 0u) << cut.error().message();
  }
  for (const auto& [rank, size] : {std::array<int, 2>{2, 2}, {-1, 2}, {0, 0}, {0, -1}}) {
    const auto cut = cut_matrix(make_view(FormatId::kNvfp4, 8, 64), CutAxis::kRows, rank, size);
    ASSERT_FALSE(cut);
    EXPECT_EQ(cut.error().code(), Code::kInvalidArgument);
  }
  EXPECT_FALSE(cut_matrix(make_view(FormatId::kNvfp4, 8, 24), CutAxis::kRows, 0, 2));
}

TEST(Cut, WindowsReachBeyondTwoGiB) {
  const MatrixView view = make_view(FormatId::kNvfp4, int64_t{1} << 20, int64_t{1} << 14);
  const auto cut = cut_matrix(view, CutAxis::kRows, 3, 4);
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->codes.offset, int64_t{3} << 31);  // 3/4 of 2^20 rows of 2^13 bytes
  EXPECT_EQ(cut->scales.offset, int64_t{3} << 28);
  EXPECT_EQ(cut->part.global, view.global);
}

}  // namespace
}  // namespace nibble::formats
