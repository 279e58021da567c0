// Tensor-parallel cuts of stored planes: the equal share of one rank, by rows or by columns. Only
// arithmetic and copies; a share that would split a group is refused, nothing is ever requantized.
// Scalars (the NVFP4 global, a tensor scale) are copied. Source: containers spec, section 9.
// Compressed scale planes are cut by `codec`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "formats/block_format.h"
#include "formats/quantize.h"

namespace nibble::formats {

enum class CutAxis : uint8_t { kRows, kColumns };

/// Rows of bytes inside a plane: row r is [offset + r * stride, offset + r * stride + row_bytes).
struct PlaneWindow {
  int64_t offset = 0;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride = 0;

  int64_t bytes() const { return rows * row_bytes; }
};

/// One rank's share. The windows say where its planes lie in the planes of the whole, so a loader
/// can read them from a file without holding the whole.
struct MatrixCut {
  MatrixView part;  // geometry and scalars of the share; its planes are null
  PlaneWindow codes;
  PlaneWindow scales;  // zero rows where the format has no scales
};

/// Share of `rank` (0 .. size-1). Any row may start a share, as may any column of a format without
/// column groups; block FP8 keeps every touched block's scale and the place inside the first block.
/// Errors: kInvalidArgument; the text starts with "cut_not_group" if the shares would be unequal or
/// would split a group. The planes of `view` are not read.
Result<MatrixCut> cut_matrix(const MatrixView& view, CutAxis axis, int rank, int size);

/// Copies a window of `plane` to dense rows, out [window.bytes()].
void copy_window(const std::byte* plane, const PlaneWindow& window, std::byte* out);

/// cut_matrix with its planes copied.
Result<QuantizedMatrix> cut_planes(const MatrixView& view, CutAxis axis, int rank, int size);

}  // namespace nibble::formats
