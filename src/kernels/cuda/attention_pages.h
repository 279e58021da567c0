// Where keys and values live on the GPU: pages of 64 positions, any page for any sequence.
//
//   data: [layers][pages][kv_heads] { K [64][head_dim], V [64][head_dim] }
//
// One head of one page is one contiguous piece, K before V, in BF16 or FP8 E4M3 (scale 1). Within a
// row of head_dim values the 16-byte units are permuted (kv_unit), so that a page copied to shared
// memory as it lies is read by ldmatrix without bank conflicts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

constexpr int kKvPageTokens = 64;

enum class KvFormat : uint8_t { kBf16, kFp8E4m3 };
NIBBLE_HD constexpr int kv_format_bytes(KvFormat f) { return f == KvFormat::kBf16 ? 2 : 1; }

/// Place of 16-byte unit `unit` in row `position` (0..63) of a row of `units` units. An involution.
NIBBLE_HD constexpr int kv_unit(int units, int position, int unit) {
  const int even = units & -units, width = even < 8 ? even : 8;  // units that are permuted together
  return unit ^ ((position * width / 8) & (width - 1));
}

/// Non-owning. All offsets are 64-bit: a cache is larger than 2^31 bytes.
struct KvCache {
  std::byte* data = nullptr;  // 16-byte aligned
  int64_t layers = 0, pages = 0, kv_heads = 0, head_dim = 0;
  KvFormat format = KvFormat::kBf16;

  /// Bytes of K (and as many of V) of one head of one page.
  NIBBLE_HD int64_t head_plane_bytes() const {
    return kKvPageTokens * head_dim * kv_format_bytes(format);
  }
  /// Bytes of one page of one layer.
  NIBBLE_HD int64_t page_bytes() const { return kv_heads * 2 * head_plane_bytes(); }
  NIBBLE_HD int64_t bytes() const { return layers * pages * page_bytes(); }
  /// Offset of K of one head; V follows after head_plane_bytes().
  NIBBLE_HD int64_t head_offset(int64_t layer, int64_t page, int64_t kv_head) const {
    return (layer * pages + page) * page_bytes() + kv_head * 2 * head_plane_bytes();
  }
  /// Offset of element `dim` of row `position` (0..63) in its plane.
  NIBBLE_HD int64_t element_offset(int position, int dim) const {
    const int size = kv_format_bytes(format), row = static_cast<int>(head_dim) * size;
    const int byte = dim * size;
    return position * row + kv_unit(row / 16, position, byte / 16) * 16 + byte % 16;
  }
};

}  // namespace nibble::kernels::cuda
