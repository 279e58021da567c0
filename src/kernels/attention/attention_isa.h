// Internal to attention: the kernels of one chunk of positions, one set per ISA.
#pragma once

#include <cstdint>

#include "kernels/attention/kv_pages.h"
#include "kernels/cpu/isa_list.h"

namespace nibble::kernels {

constexpr int64_t kAttentionChunk = 512;   // positions; part of the op's definition
constexpr int64_t kAttentionBlock = 16;    // positions of a K block, the lanes of a score
constexpr int64_t kAttentionQueries = 32;  // (row, head) pairs a task holds at most
constexpr int64_t kAttentionTile = 8;      // queries that share a pass over K and V at most

/// A softmax in progress: values [v_dim rounded up to 16], then maximum and sum. Sum 0 means that
/// no position was seen yet.
constexpr int64_t attention_state_floats(int64_t v_dim) { return (v_dim + 15) / 16 * 16 + 16; }

/// Floats of scratch that attend_chunk needs.
constexpr int64_t attention_scratch_floats(int64_t k_dim) {
  return kAttentionTile * (k_dim + kAttentionChunk);
}

/// Queries of one KV head against one chunk. Query i reads positions [begin[i], end[i]) of it.
struct AttentionChunk {
  KvType type = KvType::kF32;
  int64_t k_dim = 0, v_dim = 0;
  float scale = 1.0f;
  int64_t queries = 0;
  const float* q[kAttentionQueries];                         // [k_dim] each
  int32_t begin[kAttentionQueries], end[kAttentionQueries];  // 0..512
  const void* k[kAttentionChunk / kAttentionBlock];          // [k_dim][16], where it is read
  const void* v[kAttentionChunk / kAttentionBlock];          // [16][v_dim]
};

struct AttentionFns {
  /// states [queries, attention_state_floats]: overwritten with this chunk alone.
  void (*attend_chunk)(const AttentionChunk& chunk, float* scratch, float* states);
  /// Adds a later chunk's state.
  void (*merge_state)(float* state, const float* later, int64_t v_dim);
  /// Adds the sink (or null) and writes values / sum to out [v_dim].
  void (*finish_state)(float* state, const float* sink, int64_t v_dim, float* out);
};

#define NIBBLE_DECLARE(ns, isa)                                                  \
  namespace ns {                                                                 \
  void attend_chunk(const AttentionChunk& chunk, float* scratch, float* states); \
  void merge_state(float* state, const float* later, int64_t v_dim);             \
  void finish_state(float* state, const float* sink, int64_t v_dim, float* out); \
  }
NIBBLE_FOR_EACH_ISA(NIBBLE_DECLARE)
#undef NIBBLE_DECLARE

}  // namespace nibble::kernels
