// Test and bench material: a ragged batch with random q, k, v on the device, its KV pages in random
// order, and the exact result of single rows. Not part of the library.
#pragma once

#include <cmath>
#include <numeric>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/test_device.h"

namespace nibble::kernels::cuda::test {

struct HeadShape {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  KvFormat format = KvFormat::kBf16;
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
  std::string name() const {
    return cat(heads, "/", kv_heads, "x", head_dim, format == KvFormat::kBf16 ? " bf16" : " fp8");
  }
};

/// `rows` rows of one sequence at positions context .. context + rows - 1.
struct Span {
  int64_t context = 0, rows = 0;
};

/// The arrays of a StepView on the device.
class Step {
 public:
  Step(const std::vector<Span>& spans, const std::vector<std::vector<int32_t>>& pages) {
    std::vector<int32_t> begin = {0};
    size_t stride = 1;
    for (const auto& p : pages) stride = std::max(stride, p.size());
    std::vector<int32_t> table(pages.size() * stride, -1);
    for (size_t s = 0; s < spans.size(); ++s) {
      for (int64_t i = 0; i < spans[s].rows; ++i) {
        host_positions.push_back(static_cast<int32_t>(spans[s].context + i));
        host_sequence.push_back(static_cast<int32_t>(s));
      }
      begin.push_back(static_cast<int32_t>(host_positions.size()));
      std::copy(pages[s].begin(), pages[s].end(), table.begin() + static_cast<int64_t>(s * stride));
    }
    table_ = Device<int32_t>(table);
    begin_ = Device<int32_t>(begin);
    sequence_ = Device<int32_t>(host_sequence);
    positions_ = Device<int32_t>(host_positions);
    view.positions = positions_.get();
    view.row_sequence = sequence_.get();
    view.seq_row_begin = begin_.get();
    view.page_table = table_.get();
    view.table_stride = static_cast<int32_t>(stride);
    view.rows = static_cast<int32_t>(host_positions.size());
    view.sequences = static_cast<int32_t>(spans.size());
  }
  /// Makes a row padding.
  void hide(int64_t row) {
    host_positions[static_cast<size_t>(row)] = -1;
    positions_.upload(host_positions);
  }
  std::vector<int32_t> host_positions, host_sequence;
  StepView view;

 private:
  Device<int32_t> table_, begin_, sequence_, positions_;
};

/// Pages for sequences of `tokens` positions each, taken at random from [first, first + count).
inline std::vector<std::vector<int32_t>> deal_pages(Random& random,
                                                    const std::vector<int64_t>& tokens,
                                                    int64_t first, int64_t count) {
  std::vector<int32_t> free(static_cast<size_t>(count));
  std::iota(free.begin(), free.end(), static_cast<int32_t>(first));
  std::vector<std::vector<int32_t>> pages;
  for (const int64_t n : tokens) {
    pages.emplace_back();
    for (int64_t i = 0; i < (n + kKvPageTokens - 1) / kKvPageTokens; ++i) {
      std::swap(free[static_cast<size_t>(random.below(static_cast<int64_t>(free.size())))],
                free.back());
      pages.back().push_back(free.back());
      free.pop_back();
    }
  }
  return pages;
}

inline float e4m3_to_float(uint8_t b) {
  const int exponent = b >> 3 & 15, mantissa = b & 7;
  const float value = exponent == 15 && mantissa == 7 ? NAN
                      : exponent == 0                 ? std::ldexp(static_cast<float>(mantissa), -9)
                                      : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return b & 0x80 ? -value : value;
}

/// A cache and one layer of it, read back as floats.
class HostKv {
 public:
  HostKv(const KvCache& cache, int64_t layer, const std::vector<int32_t>& pages)
      : cache_(cache), bytes_(pages.size() * static_cast<size_t>(cache.page_bytes())) {
    for (size_t p = 0; p < pages.size(); ++p) {
      must(cudaMemcpy(bytes_.data() + p * static_cast<size_t>(cache.page_bytes()),
                      cache.data + cache.head_offset(layer, pages[p], 0),
                      static_cast<size_t>(cache.page_bytes()), cudaMemcpyDeviceToHost),
           "read a page");
    }
  }
  bool same(const HostKv& other) const { return bytes_ == other.bytes_; }
  float at(bool value, int64_t position, int64_t kv_head, int64_t dim) const {
    const int64_t offset =
        position / kKvPageTokens * cache_.page_bytes() +
        (2 * kv_head + (value ? 1 : 0)) * cache_.head_plane_bytes() +
        cache_.element_offset(static_cast<int>(position % kKvPageTokens), static_cast<int>(dim));
    if (cache_.format == KvFormat::kFp8E4m3) {
      return e4m3_to_float(static_cast<uint8_t>(bytes_[static_cast<size_t>(offset)]));
    }
    uint16_t bits;
    std::memcpy(&bits, &bytes_[static_cast<size_t>(offset)], 2);
    return bf16_to_float(bits);
  }

 private:
  KvCache cache_;
  std::vector<std::byte> bytes_;
};

/// softmax(scale * q . K) V of one row and head in double, from what the cache holds.
inline std::vector<double> exact_attention(const HostKv& kv, const HeadShape& shape,
                                           const uint16_t* q, int64_t kv_head, int64_t position) {
  const int64_t n = shape.head_dim;
  std::vector<double> score(static_cast<size_t>(position + 1)), out(static_cast<size_t>(n));
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i <= position; ++i) {
    double s = 0;
    for (int64_t d = 0; d < n; ++d) {
      s += static_cast<double>(bf16_to_float(q[d])) * kv.at(false, i, kv_head, d);
    }
    score[static_cast<size_t>(i)] = s * shape.scale();
    top = std::max(top, s * shape.scale());
  }
  for (int64_t i = 0; i <= position; ++i) {
    const double w = std::exp(score[static_cast<size_t>(i)] - top);
    sum += w;
    for (int64_t d = 0; d < n; ++d) out[static_cast<size_t>(d)] += w * kv.at(true, i, kv_head, d);
  }
  for (double& v : out) v /= sum;
  return out;
}

}  // namespace nibble::kernels::cuda::test
