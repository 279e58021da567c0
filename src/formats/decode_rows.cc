// The reference decoder: one function per shape of scale, each in the operation order of the
// formats spec, section 2. The two products of NVFP4 round separately, so they are never merged.
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "formats/block_format.h"
#include "formats/element.h"

namespace nibble::formats {
namespace {

uint8_t byte_at(const std::byte* bytes, int64_t i) { return std::to_integer<uint8_t>(bytes[i]); }

/// n E2M1 codes, n even, all times `scale`.
void decode_e2m1_run(const std::byte* codes, int64_t n, float scale, float* out) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const uint8_t byte = byte_at(codes, i);
    out[2 * i] = kE2M1Values[byte & 15] * scale;
    out[2 * i + 1] = kE2M1Values[byte >> 4] * scale;
  }
}

void decode_e4m3_run(const std::byte* codes, int64_t n, float scale, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = kE4M3Values[byte_at(codes, i)] * scale;
}

/// n NF3 codes, n a multiple of 8.
void decode_nf3_run(const std::byte* codes, int64_t n, const std::array<float, 8>& levels,
                    float scale, float* out) {
  for (int64_t i = 0; i < n / 8; ++i) {
    const uint32_t word = static_cast<uint32_t>(byte_at(codes, 3 * i)) |
                          static_cast<uint32_t>(byte_at(codes, 3 * i + 1)) << 8 |
                          static_cast<uint32_t>(byte_at(codes, 3 * i + 2)) << 16;
    for (int j = 0; j < 8; ++j) out[8 * i + j] = levels[word >> (3 * j) & 7] * scale;
  }
}

/// Formats with a scale byte per group of columns; `row` counts from the view's first row.
void decode_grouped_row(const MatrixView& view, int64_t row, float* out) {
  const int64_t group = block_format(view.format).group_cols;
  const int64_t groups = view.cols / group;
  const int64_t group_bytes = code_row_bytes(view.format, group);
  const std::byte* codes = view.codes + row * groups * group_bytes;
  const std::byte* scales = view.scales + row * groups;
  const float unbias = std::ldexp(1.0f, -view.nf3_bias_log2);
  for (int64_t g = 0; g < groups; ++g, codes += group_bytes, out += group) {
    const uint8_t byte = byte_at(scales, g);
    switch (view.format) {
      case FormatId::kNvfp4:
        decode_e2m1_run(codes, group, decode_e4m3(byte) * view.global, out);
        break;
      case FormatId::kMxfp4: decode_e2m1_run(codes, group, decode_e8m0(byte), out); break;
      case FormatId::kMxfp8: decode_e4m3_run(codes, group, decode_e8m0(byte), out); break;
      default:
        decode_nf3_run(codes, group, view.nf3_levels, decode_e4m3(byte) * unbias, out);
        break;
    }
  }
}

void decode_fp8_block_row(const MatrixView& view, int64_t row, float* out) {
  const int64_t across = (view.origin_col + view.cols + view.block_cols - 1) / view.block_cols;
  const int64_t first_scale = (view.origin_row + row) / view.block_rows * across;
  const std::byte* codes = view.codes + row * view.cols;
  int64_t col = 0;
  for (int64_t b = 0; b < across; ++b) {
    int64_t end = (b + 1) * view.block_cols - view.origin_col;
    if (end > view.cols) end = view.cols;
    decode_e4m3_run(codes + col, end - col,
                    scale_value(view.scale_kind, view.scales, first_scale + b), out + col);
    col = end;
  }
}

void decode_row(const MatrixView& view, int64_t row, float* out) {
  const std::byte* codes = view.codes + row * code_row_bytes(view.format, view.cols);
  switch (view.format) {
    case FormatId::kF32: std::memcpy(out, codes, static_cast<size_t>(view.cols) * 4); return;
    case FormatId::kF16: decode_f16_row(codes, view.cols, out); return;
    case FormatId::kBf16: decode_bf16_row(codes, view.cols, out); return;
    case FormatId::kNvfp4:
    case FormatId::kMxfp4:
    case FormatId::kMxfp8:
    case FormatId::kNf3: decode_grouped_row(view, row, out); return;
    case FormatId::kFp8Block: decode_fp8_block_row(view, row, out); return;
    case FormatId::kFp8Channel:
      decode_e4m3_run(codes, view.cols, scale_value(view.scale_kind, view.scales, row), out);
      return;
    case FormatId::kFp8Tensor:
      decode_e4m3_run(codes, view.cols, scale_value(view.scale_kind, view.scales, 0), out);
      return;
  }
}

}  // namespace

float scale_value(ScaleKind kind, const std::byte* plane, int64_t index) {
  switch (kind) {
    case ScaleKind::kE4M3: return decode_e4m3(byte_at(plane, index));
    case ScaleKind::kE8M0: return decode_e8m0(byte_at(plane, index));
    case ScaleKind::kF32: {
      float value;
      std::memcpy(&value, plane + 4 * index, 4);
      return value;
    }
    case ScaleKind::kBf16: {
      uint16_t bits;
      std::memcpy(&bits, plane + 2 * index, 2);
      return decode_bf16(bits);
    }
    case ScaleKind::kNone: break;
  }
  NIBBLE_CHECK(false, "scale kind ", static_cast<int>(kind));
  return 0.0f;
}

void decode_rows(const MatrixView& view, int64_t row_begin, int64_t row_count, float* out) {
  NIBBLE_CHECK(row_begin >= 0 && row_count >= 0 && row_count <= view.rows - row_begin, row_begin,
               " + ", row_count, " of ", view.rows);
  for (int64_t r = 0; r < row_count; ++r) decode_row(view, row_begin + r, out + r * view.cols);
}

}  // namespace nibble::formats
