// Geometry, names and the reader's checks.
#include "codec/csf.h"

#include <algorithm>

namespace nibble::codec {
namespace {

Error fault(std::string_view name, const std::string& text) {
  return Error(Code::kCorruptInput, cat(name, ": ", text));
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += cat(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

Result<void> check_shapes(CsfKind kind, int64_t rows, int64_t cols, const CsfStored& stored) {
  if (!stored.fixed_is_u8) return fault("fixed_dtype", "the fixed tensor is not U8");
  if (!stored.exceptions_are_u32) {
    return fault("exception_dtype", "the exceptions tensor is not U32");
  }
  const int64_t want[2] = {rows / kCsfSlabRows, csf_slab_bytes(kind, cols)};
  if (!std::ranges::equal(stored.fixed_shape, want)) {
    return fault("fixed_shape", cat("expected ", shape_text(want), " for a plane of ", rows, " x ",
                                    cols, ", found ", shape_text(stored.fixed_shape)));
  }
  const auto want_bytes = static_cast<size_t>(csf_fixed_bytes(kind, rows, cols));
  if (stored.fixed.size() != want_bytes) {
    return fault("fixed_shape",
                 cat("expected ", want_bytes, " bytes, found ", stored.fixed.size()));
  }
  if (stored.exception_shape.size() != 1) {
    return fault("exception_shape",
                 cat("expected one dimension, found ", shape_text(stored.exception_shape)));
  }
  // Compared this way round, a hostile extent cannot overflow.
  const size_t bytes = stored.exceptions.size();
  if (bytes % 4 != 0 || stored.exception_shape[0] != static_cast<int64_t>(bytes / 4)) {
    return fault("exception_shape",
                 cat("shape ", shape_text(stored.exception_shape), " over ", bytes, " bytes"));
  }
  return {};
}

Result<void> check_bases(const CsfView& view) {
  const int limit = csf_max_base(view.kind());
  for (int64_t s = 0; s < view.slabs(); ++s) {
    const uint8_t* bases = view.slab(s);
    for (int64_t r = 0; r < kCsfSlabRows; ++r) {
      if (bases[r] > limit) {
        return fault("base_range",
                     cat("row ", s * kCsfSlabRows + r, ": base ", bases[r], " is above ", limit));
      }
    }
  }
  return {};
}

Result<void> check_tail_bits(const CsfView& view) {
  const int64_t used = view.cols() % 8;
  if (view.kind() != CsfKind::kMxfp4 || used == 0) return {};
  const int64_t width = csf_row_bytes(view.kind(), view.cols());
  for (int64_t s = 0; s < view.slabs(); ++s) {
    const uint8_t* packed = view.slab(s) + kCsfSlabRows;
    for (int64_t r = 0; r < kCsfSlabRows; ++r) {
      if (packed[r * width + width - 1] >> used != 0) {
        return fault("tail_bits", cat("row ", s * kCsfSlabRows + r, ": a bit at or beyond column ",
                                      view.cols(), " is set"));
      }
    }
  }
  return {};
}

Result<void> check_exceptions(const CsfView& view) {
  const int64_t n = view.exception_count();
  for (int64_t i = 1; i < n; ++i) {
    const uint32_t before = csf_position(view.exception(i - 1)),
                   at = csf_position(view.exception(i));
    if (before >= at) {
      return fault("exception_order", cat("exception ", i, ": position ", at, " follows ", before));
    }
  }
  if (n > 0 && csf_position(view.exception(n - 1)) >= view.rows() * view.cols()) {
    return fault("exception_range", cat("position ", csf_position(view.exception(n - 1)),
                                        " in a plane of ", view.rows() * view.cols(), " bytes"));
  }
  return {};
}

}  // namespace

std::string_view csf_kind_name(CsfKind kind) { return kind == CsfKind::kNvfp4 ? "nvfp4" : "mxfp4"; }

std::string_view csf_codec_name(CsfKind kind) {
  return kind == CsfKind::kNvfp4 ? "byte-window4-fixed-stream-u24-exceptions/1"
                                 : "row-base-offset1-u24-exceptions/1";
}

Result<void> check_csf_geometry(CsfKind kind, int64_t rows, int64_t cols) {
  auto bad = [&](std::string_view name, std::string_view want) {
    return Error(Code::kInvalidArgument,
                 cat(name, ": a plane of ", rows, " x ", cols, " bytes; ", want));
  };
  if (rows <= 0 || cols <= 0 || rows % kCsfSlabRows != 0) {
    return bad("rows_not_16", "rows must be a positive multiple of 16, columns positive");
  }
  if (kind == CsfKind::kNvfp4 && cols % 2 != 0) return bad("columns_odd", "columns must be even");
  if (rows > kCsfMaxPositions / cols) return bad("position_limit", "at most 2^24 are allowed");
  return {};
}

int64_t CsfView::first_exception_at(int64_t position) const {
  int64_t low = 0, high = exception_count_;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (csf_position(exception(middle)) < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

Result<CsfView> read_csf(CsfKind kind, int64_t rows, int64_t cols, const CsfStored& stored) {
  if (const Result<void> fits = check_csf_geometry(kind, rows, cols); !fits) {
    return Error(Code::kCorruptInput, fits.error().message());
  }
  NIBBLE_TRY(check_shapes(kind, rows, cols, stored));
  const CsfView view(kind, rows, cols, stored.fixed, stored.exceptions.data(),
                     stored.exception_shape[0]);
  NIBBLE_TRY(check_bases(view));
  NIBBLE_TRY(check_tail_bits(view));
  NIBBLE_TRY(check_exceptions(view));
  return view;
}

}  // namespace nibble::codec
