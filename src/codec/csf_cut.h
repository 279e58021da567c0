// Cutting, padding, joining and clamping planes in compressed form, without decoding them.
// Leaves to `plan` which rank gets what, and to the caller in which order gate and up are stacked.
// Source: csf spec, sections 4 and 7.
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "codec/csf.h"

namespace nibble::codec {

struct CsfCut {
  int64_t row_begin = 0, row_end = 0;
  int64_t col_begin = 0, col_end = 0;
  int64_t out_rows = 0, out_cols = 0;  // padded size (NVFP4 only); 0: exactly the cut
};

/// The byte that padding decodes to: E4M3 1.0 in appended rows. Appended columns of a kept row
/// decode to that row's base.
constexpr uint8_t kCsfPadBase = 0x38;

/// The sub-plane [row_begin, row_end) x [col_begin, col_end), bases copied, not refitted: a cut of
/// rows alone stays canonical (its rows are whole), a cut of columns is legal but often is not.
/// Errors: kInvalidArgument starting with cut_rows (not multiples of 16, empty or outside),
/// cut_columns (empty, outside or, NVFP4, odd), cut_padding (MXFP4, smaller than the cut, rows not
/// a multiple of 16 or columns odd), position_limit (padded size).
Result<CsfPlane> cut_csf(const CsfView& view, const CsfCut& cut);

/// Row blocks of equal kind and width joined into one plane, in the order given (gate with up).
/// Canonical parts give a canonical plane.
/// Errors: kInvalidArgument if there are no parts or kinds or widths differ; position_limit.
Result<CsfPlane> stack_csf(std::span<const CsfView> parts);

/// An MXFP4 plane with every byte above 247 lowered to 247, which one A8 kernel family needs in its
/// prepared copy. Errors: kInvalidArgument for NVFP4.
Result<CsfPlane> clamp_csf_247(const CsfView& view);

}  // namespace nibble::codec
