// What the quantizers share: checks of the source, the plane buffers and the walk over rows.
// Private to this folder.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/result.h"
#include "base/thread_pool.h"
#include "formats/quantize.h"

namespace nibble::formats::internal {

constexpr int32_t kInfinityBits = 0x7F800000;

/// Bits of the largest magnitude of n floats. As integers these order as the magnitudes do, with
/// every NaN above infinity, so a result >= kInfinityBits says that a value is not finite.
inline int32_t amax_bits(const float* values, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = static_cast<int32_t>(std::bit_cast<uint32_t>(values[i]) & 0x7FFFFFFFu);
    most = most > bits ? most : bits;
  }
  return most;
}

/// Checks `meta` and that `count` values fill it, then sizes the planes (zeroed).
Result<QuantizedMatrix> make_planes(const MatrixView& meta, size_t count, std::string_view name);

/// The error for the first value of `values` that is not finite; there must be one.
Error non_finite(std::span<const float> values, std::string_view name);

/// Calls body(begin, end) for ranges that cover [0, rows) once, in parallel where a pool is given.
template <typename Body>
void for_row_ranges(ThreadPool* pool, int64_t rows, int64_t cols, Body&& body) {
  constexpr int64_t kElemsPerTask = int64_t{1} << 16;  // some 50 us of work, far above a hand-over
  if (pool == nullptr) {
    body(int64_t{0}, rows);
    return;
  }
  const int64_t step = std::max<int64_t>(1, kElemsPerTask / std::max<int64_t>(1, cols));
  pool->parallel_for((rows + step - 1) / step, [&](int64_t task, int) {
    body(task * step, std::min(rows, (task + 1) * step));
  });
}

/// Walks the groups of every row: group(src, b, codes, scale) reads `Group` floats, writes their
/// codes and scale byte; b is their largest magnitude, finite. Errors: kCorruptInput at the first
/// value that is not finite.
template <int Group, typename Fn>
Result<void> quantize_groups(std::span<const float> w, std::string_view name, ThreadPool* pool,
                             QuantizedMatrix* out, Fn&& group) {
  const int64_t groups = out->meta.cols / Group;
  const int64_t group_bytes = code_row_bytes(out->meta.format, Group);
  std::atomic<bool> finite{true};
  for_row_ranges(pool, out->meta.rows, out->meta.cols, [&](int64_t begin, int64_t end) {
    int32_t most = 0;
    for (int64_t g = begin * groups; g < end * groups; ++g) {
      const float* src = w.data() + g * Group;
      const int32_t bits = amax_bits(src, Group);
      most = most > bits ? most : bits;
      if (bits >= kInfinityBits) [[unlikely]]
        break;
      group(src, std::bit_cast<float>(static_cast<uint32_t>(bits)),
            out->codes.data() + g * group_bytes, out->scales.data() + g);
    }
    if (most >= kInfinityBits) finite.store(false, std::memory_order_relaxed);
  });
  if (!finite.load(std::memory_order_relaxed)) return non_finite(w, name);
  return {};
}

}  // namespace nibble::formats::internal
