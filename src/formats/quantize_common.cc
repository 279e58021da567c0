#include "formats/quantize_common.h"

#include <cmath>

#include "base/check.h"

namespace nibble::formats {

MatrixView QuantizedMatrix::view() const {
  MatrixView view = meta;
  view.codes = codes.data();
  view.scales = scales.data();
  return view;
}

Result<float> finite_amax(std::span<const float> values, std::string_view name, ThreadPool* pool) {
  std::atomic<int32_t> most{0};
  internal::for_row_ranges(
      pool, static_cast<int64_t>(values.size()), 1, [&](int64_t begin, int64_t end) {
        const int32_t bits = internal::amax_bits(values.data() + begin, end - begin);
        int32_t seen = most.load(std::memory_order_relaxed);
        while (bits > seen && !most.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
        }
      });
  const int32_t bits = most.load(std::memory_order_relaxed);
  if (bits >= internal::kInfinityBits) return internal::non_finite(values, name);
  return std::bit_cast<float>(static_cast<uint32_t>(bits));
}

namespace internal {

Result<QuantizedMatrix> make_planes(const MatrixView& meta, size_t count, std::string_view name) {
  if (const Result<void> geometry = check_geometry(meta); !geometry) {
    // In front of the tensor's name: the text starts with the rule that was broken.
    return Error(geometry.error().code(),
                 cat(geometry.error().message(), " (tensor '", name, "')"));
  }
  if (static_cast<int64_t>(count) != meta.rows * meta.cols) {
    return Error(Code::kInvalidArgument, cat("tensor '", name, "': ", count, " values for shape [",
                                             meta.rows, ", ", meta.cols, "]"));
  }
  QuantizedMatrix out;
  out.meta = meta;
  out.codes.resize(static_cast<size_t>(meta.rows * code_row_bytes(meta.format, meta.cols)));
  out.scales.resize(static_cast<size_t>(scale_plane_bytes(meta)));
  return out;
}

Error non_finite(std::span<const float> values, std::string_view name) {
  size_t index = 0;
  while (index < values.size() && std::isfinite(values[index])) ++index;
  NIBBLE_CHECK(index < values.size(), "every value is finite");
  return Error(Code::kCorruptInput, cat("non_finite_input: tensor '", name, "' holds ",
                                        values[index], " at element ", index));
}

}  // namespace internal
}  // namespace nibble::formats
