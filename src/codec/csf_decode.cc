// The decoder: slab by slab, so that a slab's exceptions are patched while it is in the cache.
#include "codec/csf_kernels.h"

namespace nibble::codec {

Result<void> decode_csf_rows(const CsfView& view, int64_t row_begin, int64_t row_end,
                             std::span<uint8_t> out, CsfIsa isa) {
  if (row_begin < 0 || row_begin > row_end || row_end > view.rows() ||
      row_begin % kCsfSlabRows != 0 || row_end % kCsfSlabRows != 0) {
    return Error(Code::kInvalidArgument, cat("csf rows [", row_begin, ", ", row_end, ") of ",
                                             view.rows(), " are not whole slabs of 16"));
  }
  const int64_t cols = view.cols();
  if (out.size() != static_cast<size_t>((row_end - row_begin) * cols)) {
    return Error(Code::kInvalidArgument, cat("csf rows [", row_begin, ", ", row_end, ") of ", cols,
                                             " columns: output has ", out.size(), " bytes"));
  }
  const CsfKernels& kernels = csf_kernels(isa);
  const auto unpack = view.kind() == CsfKind::kNvfp4 ? kernels.unpack_nvfp4 : kernels.unpack_mxfp4;
  const int64_t count = view.exception_count();
  int64_t next = row_begin == 0 ? 0 : view.first_exception_at(row_begin * cols);
  uint8_t* slab_out = out.data();
  for (int64_t row = row_begin; row < row_end; row += kCsfSlabRows) {
    unpack(view.slab(row / kCsfSlabRows), cols, slab_out);
    const int64_t first = row * cols, end = first + kCsfSlabRows * cols;
    for (; next < count; ++next) {
      const uint32_t word = view.exception(next);
      if (csf_position(word) >= end) break;
      slab_out[csf_position(word) - first] = csf_value(word);
    }
    slab_out += kCsfSlabRows * cols;
  }
  return {};
}

Result<void> decode_csf(const CsfView& view, std::span<uint8_t> out, CsfIsa isa) {
  return decode_csf_rows(view, 0, view.rows(), out, isa);
}

}  // namespace nibble::codec
