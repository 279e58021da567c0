#include "formats/cut.h"

#include <cstring>

namespace nibble::formats {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Shape of the scale plane as rows of bytes; a plane that rows do not cut has one row.
PlaneWindow whole_scales(const MatrixView& view) {
  const int64_t each = scale_bytes(view.scale_kind);
  switch (view.format) {
    case FormatId::kF32:
    case FormatId::kF16:
    case FormatId::kBf16: return {};
    case FormatId::kFp8Block: {
      const int64_t row = ceil_div(view.origin_col + view.cols, view.block_cols) * each;
      return {0, ceil_div(view.origin_row + view.rows, view.block_rows), row, row};
    }
    case FormatId::kFp8Channel: return {0, view.rows, each, each};
    case FormatId::kFp8Tensor: return {0, 1, each, each};
    default: {
      const int64_t row = view.cols / block_format(view.format).group_cols * each;
      return {0, view.rows, row, row};
    }
  }
}

/// First touched block and its count for elements [begin, begin + count) whose matrix starts
/// `origin` elements into block 0; the new origin.
struct BlockSpan {
  int64_t first, count, origin;
};
BlockSpan block_span(int64_t origin, int64_t begin, int64_t count, int64_t block) {
  const int64_t first = (origin + begin) / block;
  return {first, ceil_div(origin + begin + count, block) - first, (origin + begin) % block};
}

void cut_rows(const MatrixView& view, int64_t begin, int64_t count, MatrixCut* cut) {
  cut->part.rows = count;
  cut->codes.offset = begin * cut->codes.stride;
  cut->codes.rows = count;
  if (view.format == FormatId::kFp8Block) {
    const BlockSpan span = block_span(view.origin_row, begin, count, view.block_rows);
    cut->part.origin_row = span.origin;
    cut->scales.offset = span.first * cut->scales.stride;
    cut->scales.rows = span.count;
  } else if (view.format != FormatId::kFp8Tensor && cut->scales.rows != 0) {
    cut->scales.offset = begin * cut->scales.stride;
    cut->scales.rows = count;
  }
}

void cut_columns(const MatrixView& view, int64_t begin, int64_t count, MatrixCut* cut) {
  cut->part.cols = count;
  cut->codes.offset = code_row_bytes(view.format, begin);
  cut->codes.row_bytes = code_row_bytes(view.format, count);
  const int64_t each = scale_bytes(view.scale_kind);
  const int64_t group = block_format(view.format).group_cols;
  if (view.format == FormatId::kFp8Block) {
    const BlockSpan span = block_span(view.origin_col, begin, count, view.block_cols);
    cut->part.origin_col = span.origin;
    cut->scales.offset = span.first * each;
    cut->scales.row_bytes = span.count * each;
  } else if (group != 0) {
    cut->scales.offset = begin / group * each;
    cut->scales.row_bytes = count / group * each;
  }
}

}  // namespace

Result<MatrixCut> cut_matrix(const MatrixView& view, CutAxis axis, int rank, int size) {
  NIBBLE_TRY(check_geometry(view));
  if (size < 1 || rank < 0 || rank >= size) {
    return Error(Code::kInvalidArgument,
                 cat("rank ", rank, " of ", size, ", expected 0 <= rank < size"));
  }
  const BlockFormat& format = block_format(view.format);
  const bool by_rows = axis == CutAxis::kRows;
  const int64_t extent = by_rows ? view.rows : view.cols;
  const int64_t unit = by_rows || format.group_cols == 0 ? 1 : format.group_cols;
  if (extent % size != 0 || extent / size % unit != 0) {
    return Error(Code::kInvalidArgument,
                 cat("cut_not_group: ", format.name, " [", view.rows, ", ", view.cols, "] has ",
                     extent, by_rows ? " rows" : " columns", ", expected ", size,
                     " equal shares in multiples of ", unit));
  }
  const int64_t count = extent / size;
  const int64_t code_row = code_row_bytes(view.format, view.cols);
  MatrixCut cut{view, {0, view.rows, code_row, code_row}, whole_scales(view)};
  cut.part.codes = nullptr;
  cut.part.scales = nullptr;
  if (by_rows) {
    cut_rows(view, rank * count, count, &cut);
  } else {
    cut_columns(view, rank * count, count, &cut);
  }
  return cut;
}

void copy_window(const std::byte* plane, const PlaneWindow& window, std::byte* out) {
  if (window.bytes() == 0) return;
  if (window.row_bytes == window.stride) {
    std::memcpy(out, plane + window.offset, static_cast<size_t>(window.bytes()));
    return;
  }
  for (int64_t r = 0; r < window.rows; ++r) {
    std::memcpy(out + r * window.row_bytes, plane + window.offset + r * window.stride,
                static_cast<size_t>(window.row_bytes));
  }
}

Result<QuantizedMatrix> cut_planes(const MatrixView& view, CutAxis axis, int rank, int size) {
  NIBBLE_TRY(const MatrixCut cut, cut_matrix(view, axis, rank, size));
  QuantizedMatrix out;
  out.meta = cut.part;
  out.codes.resize(static_cast<size_t>(cut.codes.bytes()));
  out.scales.resize(static_cast<size_t>(cut.scales.bytes()));
  copy_window(view.codes, cut.codes, out.codes.data());
  copy_window(view.scales, cut.scales, out.scales.data());
  return out;
}

}  // namespace nibble::formats
