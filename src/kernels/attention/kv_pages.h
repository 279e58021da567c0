// Where keys and values live: fixed pages of page_tokens positions, any page for any sequence.
// One page of one layer holds, per KV head, K as [page_tokens / 16][k_dim][16] (16 positions are
// the vector lanes of a score) and V as [page_tokens][v_dim].
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::kernels {

/// kFp8: E4M3 with scale 1, saturating; on GPUs only.
enum class KvType : uint8_t { kF32, kBf16, kFp8 };
constexpr int64_t kv_type_bytes(KvType type) {
  return type == KvType::kF32 ? 4 : type == KvType::kBf16 ? 2 : 1;
}

struct KvGeometry {
  int64_t layers = 0, kv_heads = 0, k_dim = 0, v_dim = 0;
  int64_t page_tokens = 64;  // multiple of 16
  KvType type = KvType::kF32;

  int64_t head_page_elems() const { return page_tokens * (k_dim + v_dim); }
  int64_t layer_page_bytes() const { return kv_heads * head_page_elems() * kv_type_bytes(type); }
  int64_t bytes_per_token() const {
    return layers * kv_heads * (k_dim + v_dim) * kv_type_bytes(type);
  }
};

/// Non-owning. data: [layers][pages][layer_page_bytes].
struct KvPages {
  KvGeometry geometry;
  std::byte* data = nullptr;
  int64_t pages = 0;

  std::byte* head(int64_t layer, int64_t page, int64_t kv_head) const {
    return data + (layer * pages + page) * geometry.layer_page_bytes() +
           kv_head * geometry.head_page_elems() * kv_type_bytes(geometry.type);
  }
};

/// Rows [row_begin, row_begin + rows) of a step belong to one sequence and have the consecutive
/// positions position_begin, position_begin + 1, ... pages[p] is the page of positions
/// [p * page_tokens, (p + 1) * page_tokens), valid up to the last row's position.
struct SequenceRows {
  int32_t row_begin = 0, rows = 0;
  int32_t position_begin = 0;
  const int32_t* pages = nullptr;
};

}  // namespace nibble::kernels
