#include "codec/csf_cut.h"

#include <algorithm>

namespace nibble::codec {
namespace {

Error refuse(std::string_view name, const std::string& text) {
  return Error(Code::kInvalidArgument, cat(name, ": ", text));
}

Result<void> check_cut(const CsfView& view, const CsfCut& cut, int64_t out_rows, int64_t out_cols) {
  const bool nvfp4 = view.kind() == CsfKind::kNvfp4;
  if (cut.row_begin < 0 || cut.row_begin >= cut.row_end || cut.row_end > view.rows() ||
      cut.row_begin % kCsfSlabRows != 0 || cut.row_end % kCsfSlabRows != 0) {
    return refuse("cut_rows", cat("rows [", cut.row_begin, ", ", cut.row_end, ") of ", view.rows(),
                                  "; both ends must be multiples of 16"));
  }
  if (cut.col_begin < 0 || cut.col_begin >= cut.col_end || cut.col_end > view.cols() ||
      (nvfp4 && (cut.col_begin % 2 != 0 || cut.col_end % 2 != 0))) {
    return refuse("cut_columns", cat("columns [", cut.col_begin, ", ", cut.col_end, ") of ",
                                     view.cols(), nvfp4 ? "; both ends must be even" : ""));
  }
  const int64_t rows = cut.row_end - cut.row_begin, cols = cut.col_end - cut.col_begin;
  const bool padded = out_rows != rows || out_cols != cols;
  if (padded && (!nvfp4 || out_rows < rows || out_cols < cols || out_rows % kCsfSlabRows != 0 ||
                 out_cols % 2 != 0)) {
    return refuse("cut_padding", cat(rows, " x ", cols, " padded to ", out_rows, " x ", out_cols));
  }
  return check_csf_geometry(view.kind(), out_rows, out_cols);
}

// Bits [begin, begin + cols) of `in` moved to bit 0 of `out`; the bits after them become 0.
void shift_bits(const uint8_t* in, int64_t begin, int64_t cols, uint8_t* out) {
  const int64_t shift = begin % 8, bytes = (cols + 7) / 8;
  const int64_t in_bytes = (shift + cols + 7) / 8;  // of `in`, from the first byte used
  in += begin / 8;
  for (int64_t i = 0; i < bytes; ++i) {
    const unsigned next = i + 1 < in_bytes ? in[i + 1] : 0U;
    out[i] = static_cast<uint8_t>((in[i] | next << 8) >> shift);
  }
  if (cols % 8 != 0) out[bytes - 1] = static_cast<uint8_t>(out[bytes - 1] & ((1 << cols % 8) - 1));
}

// The kept exceptions at their new positions. Ascending stays ascending.
void cut_exceptions(const CsfView& view, const CsfCut& cut, int64_t out_cols,
                    std::vector<uint32_t>& out) {
  const int64_t cols = view.cols(), kept_cols = cut.col_end - cut.col_begin;
  const int64_t begin = view.first_exception_at(cut.row_begin * cols);
  const int64_t end = view.first_exception_at(cut.row_end * cols);
  if (kept_cols == cols) out.reserve(static_cast<size_t>(end - begin));
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t word = view.exception(i), position = csf_position(word);
    const int64_t row = position / cols, col = position % cols;
    if (col < cut.col_begin || col >= cut.col_end) continue;
    const int64_t moved = (row - cut.row_begin) * out_cols + (col - cut.col_begin);
    out.push_back((word & 0xFF000000) | static_cast<uint32_t>(moved));
  }
}

}  // namespace

Result<CsfPlane> cut_csf(const CsfView& view, const CsfCut& cut) {
  // Zero means "as the cut"; computed only after the ranges are known to be sane.
  const bool sane =
      cut.row_begin >= 0 && cut.row_end >= 0 && cut.col_begin >= 0 && cut.col_end >= 0;
  const int64_t out_rows =
      cut.out_rows != 0 ? cut.out_rows : (sane ? cut.row_end - cut.row_begin : 0);
  const int64_t out_cols =
      cut.out_cols != 0 ? cut.out_cols : (sane ? cut.col_end - cut.col_begin : 0);
  NIBBLE_TRY(check_cut(view, cut, out_rows, out_cols));
  const CsfKind kind = view.kind();
  const int64_t width = csf_row_bytes(kind, view.cols()), out_width = csf_row_bytes(kind, out_cols);
  const int64_t cols = cut.col_end - cut.col_begin;
  CsfPlane out{kind, out_rows, out_cols, {}, {}};
  out.fixed.resize(static_cast<size_t>(csf_fixed_bytes(kind, out_rows, out_cols)));
  uint8_t* to = out.fixed.data();
  for (int64_t row = cut.row_begin; row < cut.row_end; row += kCsfSlabRows) {
    const uint8_t* from = view.slab(row / kCsfSlabRows);
    std::copy_n(from, kCsfSlabRows, to);
    for (int64_t r = 0; r < kCsfSlabRows; ++r) {
      const uint8_t* packed = from + kCsfSlabRows + r * width;
      uint8_t* packed_to = to + kCsfSlabRows + r * out_width;
      if (kind == CsfKind::kNvfp4) {
        std::copy_n(packed + cut.col_begin / 2, cols / 2, packed_to);
      } else {
        shift_bits(packed, cut.col_begin, cols, packed_to);
      }
    }
    to += csf_slab_bytes(kind, out_cols);
  }
  for (int64_t row = cut.row_end - cut.row_begin; row < out_rows; row += kCsfSlabRows) {
    std::fill_n(to, kCsfSlabRows, kCsfPadBase);
    to += csf_slab_bytes(kind, out_cols);
  }
  cut_exceptions(view, cut, out_cols, out.exceptions);
  return out;
}

Result<CsfPlane> stack_csf(std::span<const CsfView> parts) {
  if (parts.empty()) return Error(Code::kInvalidArgument, "csf stack: no parts");
  const CsfKind kind = parts[0].kind();
  const int64_t cols = parts[0].cols();
  int64_t rows = 0, words = 0;
  for (const CsfView& part : parts) {
    if (part.kind() != kind || part.cols() != cols) {
      return Error(Code::kInvalidArgument,
                   cat("csf stack: ", csf_kind_name(kind), " of ", cols, " columns with ",
                       csf_kind_name(part.kind()), " of ", part.cols()));
    }
    rows += part.rows();
    words += part.exception_count();
  }
  NIBBLE_TRY(check_csf_geometry(kind, rows, cols));
  CsfPlane out{kind, rows, cols, {}, {}};
  out.fixed.reserve(static_cast<size_t>(csf_fixed_bytes(kind, rows, cols)));
  out.exceptions.reserve(static_cast<size_t>(words));
  int64_t rows_before = 0;
  for (const CsfView& part : parts) {
    out.fixed.insert(out.fixed.end(), part.fixed().begin(), part.fixed().end());
    const auto moved = static_cast<uint32_t>(rows_before * cols);
    for (int64_t i = 0; i < part.exception_count(); ++i) {
      out.exceptions.push_back(part.exception(i) + moved);
    }
    rows_before += part.rows();
  }
  return out;
}

Result<CsfPlane> clamp_csf_247(const CsfView& view) {
  constexpr uint8_t kTop = 247;
  if (view.kind() != CsfKind::kMxfp4) {
    return Error(Code::kInvalidArgument, "csf clamp to 247 is for MXFP4 planes only");
  }
  CsfPlane out{view.kind(), view.rows(), view.cols(), {}, {}};
  out.fixed.assign(view.fixed().begin(), view.fixed().end());
  const int64_t width = csf_row_bytes(view.kind(), view.cols());
  for (int64_t s = 0; s < view.slabs(); ++s) {
    uint8_t* slab = out.fixed.data() + s * csf_slab_bytes(view.kind(), view.cols());
    for (int64_t r = 0; r < kCsfSlabRows; ++r) {
      if (slab[r] < kTop) continue;
      slab[r] = kTop;
      std::fill_n(slab + kCsfSlabRows + r * width, width, uint8_t{0});
    }
  }
  out.exceptions.reserve(static_cast<size_t>(view.exception_count()));
  for (int64_t i = 0; i < view.exception_count(); ++i) {
    const uint32_t word = view.exception(i);
    const uint32_t value = std::min(csf_value(word), kTop);
    out.exceptions.push_back(value << 24 | csf_position(word));
  }
  return out;
}

}  // namespace nibble::codec
