#include "kernels/repack/repack.h"

#include <gtest/gtest.h>

#include "kernels/cpu/tile16.h"
#include "kernels/matmul/random_matrix.h"

namespace nibble::kernels {
namespace {

using formats::FormatId;
using formats::MatrixView;
using formats::ScaleKind;
using testing::all_matrix_cases;
using testing::Matrix;
using testing::MatrixCase;

constexpr struct {
  int64_t rows, cols;
} kShapes[] = {{1, 1}, {16, 32}, {15, 31}, {17, 33}, {33, 96}, {5, 1000}, {48, 128}, {100, 77}};

/// Every bit random, NaN codes and scales included.
void randomize(Matrix& m, uint32_t seed) {
  std::mt19937 rng(seed);
  for (std::byte& b : m.codes) b = static_cast<std::byte>(rng() & 0xFFu);
  for (std::byte& b : m.scales) b = static_cast<std::byte>(rng() & 0xFFu);
}

TEST(Repack, UnpackIsTheInverseBitForBit) {
  uint32_t seed = 1;
  for (const MatrixCase& c : all_matrix_cases()) {
    if (c.format == FormatId::kF16) continue;
    for (const auto& shape : kShapes) {
      SCOPED_TRACE(cat(c.name, " ", shape.rows, "x", shape.cols));
      // 4-bit codes fill whole bytes and NF3 whole groups because the geometry says so.
      auto m = testing::random_matrix(c, shape.rows, shape.cols, ++seed);
      randomize(*m, ++seed);
      m->tile();
      ASSERT_EQ(m->tiled.layout, tensor::Layout::kTile16);
      std::vector<std::byte> codes(m->codes.size(), std::byte{0xA5});
      std::vector<std::byte> scales(m->scales.size(), std::byte{0xA5});
      unpack_tile16(m->tiled, codes, scales);
      EXPECT_EQ(codes, m->codes);
      EXPECT_EQ(scales, m->scales);
    }
  }
}

TEST(Repack, F16WidensToF32Exactly) {
  // All 65536 bit patterns.
  MatrixView v;
  v.format = FormatId::kF16;
  v.rows = 64;
  v.cols = 1024;
  Matrix m;
  m.rows_view = v;
  m.codes.resize(1 << 17);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    std::memcpy(&m.codes[i * 2], &bits, 2);
  }
  m.rows_view.codes = m.codes.data();
  m.tile();
  EXPECT_EQ(m.tiled.view.format, FormatId::kF32);
  std::vector<std::byte> codes(1 << 18), scales;
  unpack_tile16(m.tiled, codes, scales);
  for (uint32_t i = 0; i < 65536; ++i) {
    float got;
    std::memcpy(&got, &codes[i * 4], 4);
    const float want = formats::decode_f16(static_cast<uint16_t>(i));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << i;
    }
  }
}

TEST(Repack, PaddingIsZero) {
  const MatrixCase c{"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0};
  auto m = testing::random_matrix(c, 3, 32, 7);
  const TiledBytes sizes = tile16_bytes(m->rows_view);
  ASSERT_EQ(sizes.codes, 256);
  ASSERT_EQ(sizes.scales, 16);
  for (int64_t line = 0; line < 4; ++line) {
    for (int64_t lane = 3; lane < 16; ++lane) {
      for (int64_t byte = 0; byte < 4; ++byte) {
        EXPECT_EQ(m->tiled.view.codes[line * 64 + lane * 4 + byte], std::byte{0});
      }
    }
  }
  for (int64_t lane = 3; lane < 16; ++lane) {
    EXPECT_EQ(m->tiled.view.scales[lane], std::byte{0});
  }
}

TEST(Repack, NibblePlacesAreAsDocumented) {
  // Codes 0..7 of one row: even columns in the low half of the dword, odd ones in the high half.
  const MatrixCase c{"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0};
  auto m = testing::random_matrix(c, 1, 32, 7);
  const uint8_t bytes[4] = {0x10, 0x32, 0x54, 0x76};
  std::memcpy(m->codes.data(), bytes, 4);
  m->tile();
  uint32_t word;
  std::memcpy(&word, m->tiled.view.codes, 4);
  EXPECT_EQ(word, 0x75316420u);
}

TEST(Repack, RefusesBlocksThatCutASubBlock) {
  MatrixCase c{"fp8_block", FormatId::kFp8Block, ScaleKind::kF32, 8, 24, 0, 0};
  MatrixView v;
  v.format = c.format;
  v.scale_kind = c.scale_kind;
  v.rows = 8;
  v.cols = 48;
  v.block_rows = 8;
  v.block_cols = 24;
  std::vector<std::byte> codes(8 * 48), scales(8);
  v.codes = codes.data();
  v.scales = scales.data();
  const TiledBytes sizes = tile16_bytes(v);
  std::vector<std::byte> tiled_codes(static_cast<size_t>(sizes.codes));
  std::vector<std::byte> tiled_scales(static_cast<size_t>(sizes.scales));
  const auto refused = repack_tile16(v, tiled_codes, tiled_scales);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), Code::kUnsupported);
  EXPECT_NE(refused.error().message().find("fp8_block"), std::string::npos);
}

TEST(Repack, RefusesBadGeometry) {
  MatrixView v;
  v.format = FormatId::kMxfp4;
  v.scale_kind = ScaleKind::kE8M0;
  v.rows = 1;
  v.cols = 33;
  const auto refused = repack_tile16(v, {}, {});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace nibble::kernels
