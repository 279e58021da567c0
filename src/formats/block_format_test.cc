// Geometry of every format, and decode_rows against a decoder that reads one element at a time.
#include "formats/block_format.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "formats/element.h"
#include "formats/scale_tile.h"

namespace nibble::formats {
namespace {

MatrixView make_view(FormatId format, int64_t rows, int64_t cols) {
  MatrixView view;
  view.format = format;
  view.scale_kind = block_format(format).scale;
  view.rows = rows;
  view.cols = cols;
  if (format == FormatId::kFp8Block) view.block_rows = view.block_cols = 128;
  if (format == FormatId::kNf3) view.nf3_levels = kNf3Levels;
  return view;
}

TEST(BlockFormat, TableAndByteCounts) {
  const struct {
    FormatId id;
    std::string_view name;
    int64_t row, scales;
  } kCases[] = {
      {FormatId::kF32, "f32", 1024, 0},
      {FormatId::kF16, "f16", 512, 0},
      {FormatId::kBf16, "bf16", 512, 0},
      {FormatId::kNvfp4, "nvfp4", 128, 160},
      {FormatId::kMxfp4, "mxfp4", 128, 80},
      {FormatId::kMxfp8, "mxfp8", 256, 80},
      {FormatId::kFp8Block, "fp8_block", 256, 8},
      {FormatId::kFp8Channel, "fp8_channel", 256, 20},
      {FormatId::kFp8Tensor, "fp8_tensor", 256, 4},
      {FormatId::kNf3, "nf3", 96, 80},
  };
  ASSERT_EQ(std::size(kCases), static_cast<size_t>(kFormatCount));
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    EXPECT_EQ(block_format(c.id).id, c.id);
    EXPECT_EQ(block_format(c.id).name, c.name);
    EXPECT_EQ(code_row_bytes(c.id, 256), c.row);
    const MatrixView view = make_view(c.id, 10, 256);
    EXPECT_TRUE(check_geometry(view));
    EXPECT_EQ(scale_plane_bytes(view), c.scales);
  }
  MatrixView far = make_view(FormatId::kMxfp8, int64_t{1} << 40, 64);  // live counts beyond 2^31
  EXPECT_TRUE(check_geometry(far));
  EXPECT_EQ(scale_plane_bytes(far), int64_t{1} << 41);
}

TEST(BlockFormat, RefusesBrokenGeometry) {
  const auto refused = [](const MatrixView& view, std::string_view text) {
    const Result<void> result = check_geometry(view);
    ASSERT_FALSE(result) << text;
    EXPECT_EQ(result.error().code(), Code::kInvalidArgument);
    EXPECT_NE(result.error().message().find(text), std::string::npos) << result.error().message();
  };
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatId id = static_cast<FormatId>(i);
    refused(make_view(id, 0, 64), block_format(id).name);
    refused(make_view(id, 4, -64), block_format(id).name);
    refused(make_view(id, int64_t{1} << 40, int64_t{1} << 40), block_format(id).name);
    MatrixView wrong = make_view(id, 4, 64);
    wrong.scale_kind = id == FormatId::kNvfp4 ? ScaleKind::kE8M0 : ScaleKind::kE4M3;
    if (id == FormatId::kNf3) wrong.scale_kind = ScaleKind::kF32;
    refused(wrong, "scale kind");
  }
  refused(make_view(FormatId::kNvfp4, 4, 24), "columns_not_group");
  refused(make_view(FormatId::kMxfp4, 4, 48), "columns_not_group");
  refused(make_view(FormatId::kMxfp8, 4, 48), "columns_not_group");
  refused(make_view(FormatId::kNf3, 4, 40), "columns_not_group");
  MatrixView block = make_view(FormatId::kFp8Block, 4, 7);
  EXPECT_TRUE(check_geometry(block));
  block.origin_col = 128;
  refused(block, "origin");
  block.block_cols = 0;
  refused(block, "block");
  block.block_cols = std::numeric_limits<int64_t>::max();
  refused(block, "block");
  MatrixView nf3 = make_view(FormatId::kNf3, 4, 32);
  nf3.nf3_bias_log2 = kMaxNf3BiasLog2 + 1;
  refused(nf3, "bias");
  nf3.nf3_bias_log2 = 4;
  EXPECT_TRUE(check_geometry(nf3));
  nf3.nf3_levels[3] = nf3.nf3_levels[2];
  refused(nf3, "level 3");
  nf3.nf3_levels[3] = std::numeric_limits<float>::quiet_NaN();
  refused(nf3, "level 3");
}

/// Reads bit fields straight from the plane: an element at a time, the formula as written.
float slow_decode(const MatrixView& v, int64_t r, int64_t c) {
  const int64_t at = r * v.cols + c;
  const auto byte = [](const std::byte* plane, int64_t i) {
    return std::to_integer<uint32_t>(plane[i]);
  };
  const auto field = [&](int bits) {  // codes are one long little-endian bit string
    uint32_t code = 0;
    for (int b = 0; b < bits; ++b) {
      const int64_t place = at * bits + b;
      code |= (byte(v.codes, place / 8) >> (place % 8) & 1u) << b;
    }
    return code;
  };
  const auto scale = [&](int64_t i) -> float {
    uint32_t raw = 0;
    for (int64_t b = scale_bytes(v.scale_kind) - 1; b >= 0; --b) {
      raw = raw << 8 | byte(v.scales, i * scale_bytes(v.scale_kind) + b);
    }
    switch (v.scale_kind) {
      case ScaleKind::kE4M3: return decode_e4m3(static_cast<uint8_t>(raw));
      case ScaleKind::kE8M0: return decode_e8m0(static_cast<uint8_t>(raw));
      case ScaleKind::kBf16: return std::bit_cast<float>(raw << 16);
      case ScaleKind::kF32: return std::bit_cast<float>(raw);
      case ScaleKind::kNone: break;
    }
    return 1.0f;
  };
  switch (v.format) {
    case FormatId::kF32: return std::bit_cast<float>(field(32));
    case FormatId::kF16: return decode_f16(static_cast<uint16_t>(field(16)));
    case FormatId::kBf16: return decode_bf16(static_cast<uint16_t>(field(16)));
    case FormatId::kNvfp4: {
      const float s = scale(at / 16) * v.global;
      return decode_e2m1(static_cast<uint8_t>(field(4))) * s;
    }
    case FormatId::kMxfp4: return decode_e2m1(static_cast<uint8_t>(field(4))) * scale(at / 32);
    case FormatId::kMxfp8: return decode_e4m3(static_cast<uint8_t>(field(8))) * scale(at / 32);
    case FormatId::kFp8Block: {
      const int64_t across = (v.origin_col + v.cols + v.block_cols - 1) / v.block_cols;
      const int64_t block =
          (v.origin_row + r) / v.block_rows * across + (v.origin_col + c) / v.block_cols;
      return decode_e4m3(static_cast<uint8_t>(field(8))) * scale(block);
    }
    case FormatId::kFp8Channel: return decode_e4m3(static_cast<uint8_t>(field(8))) * scale(r);
    case FormatId::kFp8Tensor: return decode_e4m3(static_cast<uint8_t>(field(8))) * scale(0);
    case FormatId::kNf3: {
      const float s = scale(at / 32) / std::exp2(static_cast<float>(v.nf3_bias_log2));
      return v.nf3_levels[field(3)] * s;
    }
  }
  return 0.0f;
}

/// Random bytes: every code, every scale byte with its NaN and negative ones, wild FP32 scales.
void compare_with_slow(MatrixView view, uint32_t seed) {
  std::mt19937 rng(seed);
  ASSERT_TRUE(check_geometry(view));
  const int64_t code_bytes = view.rows * code_row_bytes(view.format, view.cols);
  // Planes start at odd addresses: no alignment is promised.
  std::vector<std::byte> codes(static_cast<size_t>(code_bytes) + 1);
  std::vector<std::byte> scales(static_cast<size_t>(scale_plane_bytes(view)) + 1);
  for (std::byte& b : codes) b = static_cast<std::byte>(rng() & 255);
  for (std::byte& b : scales) b = static_cast<std::byte>(rng() & 255);
  view.codes = codes.data() + 1;
  view.scales = scales.data() + 1;
  const int64_t begin = view.rows / 3;
  const int64_t count = view.rows - begin;
  std::vector<float> out(static_cast<size_t>(count * view.cols) + 1, 12345.0f);
  decode_rows(view, begin, count, out.data());
  int wrong = 0, nans = 0;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < view.cols; ++c) {
      const float got = out[static_cast<size_t>(r * view.cols + c)];
      const float want = slow_decode(view, begin + r, c);
      nans += std::isnan(want);
      wrong += std::isnan(want) ? !std::isnan(got)
                                : std::bit_cast<uint32_t>(got) != std::bit_cast<uint32_t>(want);
    }
  }
  EXPECT_EQ(wrong, 0) << block_format(view.format).name;
  EXPECT_EQ(out.back(), 12345.0f);  // wrote nothing past the rows
  EXPECT_LT(nans, count * view.cols);
}

TEST(DecodeRows, EqualsTheSlowDecoderForEveryFormat) {
  for (int i = 0; i < kFormatCount; ++i) {
    MatrixView view = make_view(static_cast<FormatId>(i), 70, 288);
    view.global = 0.0123f;
    compare_with_slow(view, 100 + static_cast<uint32_t>(i));
  }
  MatrixView nvfp4 = make_view(FormatId::kNvfp4, 300, 64);
  for (const float global : {1.0f, 1e-42f, 3e36f, 3.96e-5f}) {
    nvfp4.global = global;
    compare_with_slow(nvfp4, 1);
  }
  MatrixView nf3 = make_view(FormatId::kNf3, 300, 32);
  nf3.nf3_bias_log2 = 4;
  compare_with_slow(nf3, 2);
}

TEST(DecodeRows, BlockFp8HandlesOriginPartialBlocksAndEveryScaleKind) {
  uint32_t seed = 50;
  for (const ScaleKind kind : {ScaleKind::kF32, ScaleKind::kBf16, ScaleKind::kE8M0}) {
    for (const auto& [br, bc, r0, c0] : {std::array<int64_t, 4>{128, 128, 0, 0},
                                         {20, 96, 8, 64},
                                         {1, 1, 0, 0},
                                         {7, 300, 6, 299},
                                         {3, 5, 2, 4}}) {
      MatrixView view = make_view(FormatId::kFp8Block, 33, 131);
      view.scale_kind = kind;
      view.block_rows = br;
      view.block_cols = bc;
      view.origin_row = r0;
      view.origin_col = c0;
      compare_with_slow(view, ++seed);
    }
  }
  MatrixView channel = make_view(FormatId::kFp8Channel, 33, 131);
  channel.scale_kind = ScaleKind::kF32;
  compare_with_slow(channel, ++seed);
}

TEST(DecodeRows, NanScaleMakesTheWholeGroupNan) {
  for (const FormatId id : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8, FormatId::kNf3}) {
    MatrixView view = make_view(id, 1, 64);
    const std::vector<std::byte> codes(static_cast<size_t>(code_row_bytes(id, 64)), std::byte{0});
    std::vector<std::byte> scales(static_cast<size_t>(scale_plane_bytes(view)), std::byte{0x38});
    scales[0] = std::byte{0xFF};
    view.codes = codes.data();
    view.scales = scales.data();
    float out[64];
    decode_rows(view, 0, 1, out);
    for (int c = 0; c < 64; ++c) {
      EXPECT_EQ(std::isnan(out[c]), c < block_format(id).group_cols) << block_format(id).name << c;
    }
  }
}

TEST(ScaleTile, OffsetsAreDistinctAndTheOrderIsUndone) {
  for (const auto& [rows, cols] :
       {std::array<int64_t, 2>{1, 1}, {128, 4}, {129, 5}, {100, 6}, {256, 12}, {300, 3}}) {
    std::vector<std::byte> plane(static_cast<size_t>(rows * cols)), back(plane.size());
    for (size_t i = 0; i < plane.size(); ++i) plane[i] = static_cast<std::byte>(i % 251 + 1);
    const int64_t bytes = scale_tile_bytes(rows, cols);
    EXPECT_EQ(bytes % 512, 0);
    std::vector<std::byte> tiles(static_cast<size_t>(bytes), std::byte{0xEE});
    scales_to_tiles(plane.data(), rows, cols, tiles.data());
    int64_t zeros = 0;
    for (const std::byte b : tiles) zeros += b == std::byte{0};
    EXPECT_EQ(zeros, bytes - rows * cols);  // the plane has no zero, so the rest is padding
    scales_from_tiles(tiles.data(), rows, cols, back.data());
    EXPECT_EQ(back, plane);
  }
  EXPECT_EQ(scale_tile_offset(1, 0, 4), 16);
  EXPECT_EQ(scale_tile_offset(32, 1, 4), 5);
  EXPECT_EQ(scale_tile_offset(128, 0, 8), 1024);
  EXPECT_EQ(scale_tile_offset(0, 4, 8), 512);
}

}  // namespace
}  // namespace nibble::formats
