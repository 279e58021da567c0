// Causal grouped-query attention over paged keys and values, for ragged batches that mix prefill
// chunks and decode rows.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/attention/kv_pages.h"
#include "kernels/exec.h"

namespace nibble::kernels {

struct RopeParams {
  int64_t rotary_dim = 0;           // even; the first rotary_dim dimensions of a head rotate
  const float* inv_freq = nullptr;  // [rotary_dim / 2]
  bool interleaved = false;         // pairs (2i, 2i+1) instead of (i, i + rotary_dim / 2)
  float scale = 1.0f;               // multiplies cos and sin (YaRN attention factor)
};

/// Prepares q, k, v of a step: optional RMSNorm per head (q_norm, k_norm [head dim] or null), RoPE
/// at each row's position, then writes K and V into their pages (rounded to the page type). q is
/// changed in place; q [rows, heads * k_dim], k [rows, kv_heads * k_dim], v [rows, kv_heads *
/// v_dim].
struct AttentionPrepareArgs {
  float* q = nullptr;
  float* k = nullptr;
  const float* v = nullptr;
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;
  int64_t heads = 0;
  int64_t layer = 0;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  float norm_eps = 1e-5f;
  RopeParams rope;
  std::span<const SequenceRows> sequences;
};
void attention_prepare(const Exec& exec, const AttentionPrepareArgs& args, const KvPages& pages);

/// out[row, head] = softmax(scale * q . K) V over positions 0..own (or the last `window`). Heads
/// h * heads / kv_heads share a KV head. With kBf16 pages, q is not rounded; scores and sums are
/// FP32.
///
/// Numerics: per (row, head), positions in ascending blocks of 16 from position 0, online softmax
/// per block, values in ascending position; so the bits depend neither on chunking, batch nor
/// threads. exp is the house's own (kernels/cpu/vec_math.h), equal on every ISA.
struct AttentionArgs {
  const float* q = nullptr;  // [rows, heads * k_dim]
  int64_t q_stride = 0;
  float* out = nullptr;  // [rows, heads * v_dim]
  int64_t out_stride = 0;
  int64_t heads = 0;
  int64_t layer = 0;
  float scale = 1.0f;
  int64_t window = 0;            // 0: no sliding window
  const float* sinks = nullptr;  // [heads] extra logits in the softmax sum, or null
  std::span<const SequenceRows> sequences;
};
void attention(const Exec& exec, const AttentionArgs& args, const KvPages& pages);
int64_t attention_workspace_bytes(int64_t rows, int64_t heads, const KvGeometry& geometry,
                                  int threads);

}  // namespace nibble::kernels
