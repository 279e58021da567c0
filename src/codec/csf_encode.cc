// The canonical encoder.
#include <algorithm>

#include "codec/csf_kernels.h"

namespace nibble::codec {

Result<CsfPlane> encode_csf(CsfKind kind, int64_t rows, int64_t cols,
                            std::span<const uint8_t> plane, CsfIsa isa) {
  NIBBLE_TRY(check_csf_geometry(kind, rows, cols));
  if (plane.size() != static_cast<size_t>(rows * cols)) {
    return Error(Code::kInvalidArgument, cat("csf plane of ", rows, " x ", cols, ": expected ",
                                             rows * cols, " bytes, found ", plane.size()));
  }
  const CsfKernels& kernels = csf_kernels(isa);
  const auto pack = kind == CsfKind::kNvfp4 ? kernels.pack_nvfp4 : kernels.pack_mxfp4;
  const int64_t width = csf_row_bytes(kind, cols);
  CsfPlane out{kind, rows, cols, {}, {}};
  out.fixed.resize(static_cast<size_t>(csf_fixed_bytes(kind, rows, cols)));
  std::vector<uint32_t> words(static_cast<size_t>(cols + kCsfWordSlack));
  const uint8_t* row = plane.data();
  uint8_t* slab = out.fixed.data();
  for (int64_t r = 0; r < rows; ++r, row += cols) {
    const int64_t in_slab = r % kCsfSlabRows;
    const int base = kernels.best_base(row, cols, csf_window(kind));
    slab[in_slab] = static_cast<uint8_t>(base);
    const int64_t found = pack(row, cols, base, static_cast<uint32_t>(r * cols),
                               slab + kCsfSlabRows + in_slab * width, words.data());
    out.exceptions.insert(out.exceptions.end(), words.begin(), words.begin() + found);
    if (in_slab == kCsfSlabRows - 1) slab += csf_slab_bytes(kind, cols);
  }
  return out;
}

bool is_canonical_csf(const CsfView& view) {
  std::vector<uint8_t> plane(static_cast<size_t>(view.rows() * view.cols()));
  NIBBLE_CHECK(decode_csf(view, plane).has_value());
  const Result<CsfPlane> again = encode_csf(view.kind(), view.rows(), view.cols(), plane);
  NIBBLE_CHECK(again.has_value());
  if (!std::ranges::equal(again->fixed, view.fixed())) return false;
  const CsfView other = again->view();
  if (other.exception_count() != view.exception_count()) return false;
  for (int64_t i = 0; i < other.exception_count(); ++i) {
    if (other.exception(i) != view.exception(i)) return false;
  }
  return true;
}

}  // namespace nibble::codec
