#include "formats/block_format.h"

#include <cmath>
#include <limits>
#include <string>

#include "base/check.h"

namespace nibble::formats {
namespace {

constexpr std::array<BlockFormat, kFormatCount> kFormats = {{
    {FormatId::kF32, "f32", 32, 0, ScaleKind::kNone, false},
    {FormatId::kF16, "f16", 16, 0, ScaleKind::kNone, false},
    {FormatId::kBf16, "bf16", 16, 0, ScaleKind::kNone, false},
    {FormatId::kNvfp4, "nvfp4", 4, 16, ScaleKind::kE4M3, true},
    {FormatId::kMxfp4, "mxfp4", 4, 32, ScaleKind::kE8M0, false},
    {FormatId::kMxfp8, "mxfp8", 8, 32, ScaleKind::kE8M0, false},
    {FormatId::kFp8Block, "fp8_block", 8, 0, ScaleKind::kF32, false},
    {FormatId::kFp8Channel, "fp8_channel", 8, 0, ScaleKind::kBf16, false},
    {FormatId::kFp8Tensor, "fp8_tensor", 8, 0, ScaleKind::kF32, false},
    {FormatId::kNf3, "nf3", 3, 32, ScaleKind::kE4M3, false},
}};

constexpr bool rows_in_order() {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    if (static_cast<size_t>(kFormats[i].id) != i) return false;
  }
  return true;
}
static_assert(rows_in_order());

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool scale_kind_allowed(const MatrixView& view) {
  const ScaleKind kind = view.scale_kind;
  const bool wide = kind == ScaleKind::kF32 || kind == ScaleKind::kBf16;
  switch (view.format) {
    case FormatId::kFp8Block: return wide || kind == ScaleKind::kE8M0;
    case FormatId::kFp8Channel:
    case FormatId::kFp8Tensor: return wide;
    default: return kind == block_format(view.format).scale;
  }
}

Result<void> check_block(const MatrixView& view) {
  constexpr int64_t kMaxSide = int64_t{1} << 40;
  if (view.block_rows <= 0 || view.block_rows > kMaxSide || view.block_cols <= 0 ||
      view.block_cols > kMaxSide) {
    return Error(Code::kInvalidArgument,
                 cat("fp8_block: block of ", view.block_rows, " x ", view.block_cols,
                     " elements, expected sides from 1 to ", kMaxSide));
  }
  if (view.origin_row < 0 || view.origin_row >= view.block_rows || view.origin_col < 0 ||
      view.origin_col >= view.block_cols) {
    return Error(Code::kInvalidArgument, cat("fp8_block: origin (", view.origin_row, ", ",
                                             view.origin_col, ") lies outside the first block of ",
                                             view.block_rows, " x ", view.block_cols));
  }
  return {};
}

Result<void> check_nf3(const MatrixView& view) {
  if (view.nf3_bias_log2 < -kMaxNf3BiasLog2 || view.nf3_bias_log2 > kMaxNf3BiasLog2) {
    return Error(Code::kInvalidArgument,
                 cat("nf3: scale bias 2^", view.nf3_bias_log2, ", expected an exponent within ",
                     -kMaxNf3BiasLog2, "..", kMaxNf3BiasLog2));
  }
  return check_nf3_levels(view.nf3_levels);
}

}  // namespace

const std::array<float, 8> kNf3Levels = {-1.0f,         -0.60546875f, -0.35546875f, -0.1279296875f,
                                         0.1279296875f, 0.35546875f,  0.60546875f,  1.0f};

const BlockFormat& block_format(FormatId id) {
  const size_t index = static_cast<size_t>(id);
  NIBBLE_CHECK(index < kFormats.size(), "format ", index);
  return kFormats[index];
}

int64_t code_row_bytes(FormatId format, int64_t cols) {
  return cols / 8 * block_format(format).code_bits + cols % 8 * block_format(format).code_bits / 8;
}

int64_t scale_bytes(ScaleKind kind) {
  switch (kind) {
    case ScaleKind::kNone: return 0;
    case ScaleKind::kE4M3:
    case ScaleKind::kE8M0: return 1;
    case ScaleKind::kBf16: return 2;
    case ScaleKind::kF32: return 4;
  }
  NIBBLE_CHECK(false, "scale kind ", static_cast<int>(kind));
  return 0;
}

int64_t scale_plane_bytes(const MatrixView& view) {
  const int64_t each = scale_bytes(view.scale_kind);
  switch (view.format) {
    case FormatId::kF32:
    case FormatId::kF16:
    case FormatId::kBf16: return 0;
    case FormatId::kFp8Block:
      return ceil_div(view.origin_row + view.rows, view.block_rows) *
             ceil_div(view.origin_col + view.cols, view.block_cols) * each;
    case FormatId::kFp8Channel: return view.rows * each;
    case FormatId::kFp8Tensor: return each;
    default: return view.rows * (view.cols / block_format(view.format).group_cols) * each;
  }
}

Result<void> check_nf3_levels(const std::array<float, 8>& levels) {
  for (size_t i = 0; i < levels.size(); ++i) {
    if (!std::isfinite(levels[i]) || (i > 0 && !(levels[i - 1] < levels[i]))) {
      return Error(Code::kInvalidArgument,
                   cat("levels_not_ascending: nf3 level ", i, " is ", levels[i],
                       ", expected eight finite ascending levels"));
    }
  }
  return {};
}

Result<void> check_geometry(const MatrixView& view) {
  const BlockFormat& format = block_format(view.format);
  if (view.rows <= 0 || view.cols <= 0) {
    return Error(Code::kInvalidArgument, cat(format.name, ": shape [", view.rows, ", ", view.cols,
                                             "], expected positive sizes"));
  }
  // Every byte count below stays far from overflow: at most 4 bytes an element, codes or scales.
  constexpr int64_t kMaxElems = std::numeric_limits<int64_t>::max() / 64;
  if (view.rows > kMaxElems / view.cols) {
    return Error(Code::kInvalidArgument, cat(format.name, ": shape [", view.rows, ", ", view.cols,
                                             "] has more than ", kMaxElems, " elements"));
  }
  if (format.group_cols != 0 && view.cols % format.group_cols != 0) {
    return Error(Code::kInvalidArgument,
                 cat("columns_not_group: ", format.name, " has ", view.cols,
                     " columns, expected a multiple of ", format.group_cols));
  }
  if (!scale_kind_allowed(view)) {
    return Error(Code::kInvalidArgument,
                 cat(format.name, ": scale kind ", static_cast<int>(view.scale_kind),
                     " does not belong to the format"));
  }
  if (view.format == FormatId::kFp8Block) return check_block(view);
  if (view.format == FormatId::kNf3) return check_nf3(view);
  return {};
}

}  // namespace nibble::formats
