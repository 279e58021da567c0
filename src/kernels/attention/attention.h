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

/// cos and sin of every row's position, the same for all layers of a step: out [rows, rotary_dim]
/// holds rotary_dim / 2 cosines then as many sines, times rope.scale. Rows are those of
/// `sequences`. The angle is the FP32 product position * inv_freq, as transformers computes it; its
/// cosine is correctly rounded but for the last bit of libm's double one.
void rope_table(const Exec& exec, const RopeParams& rope, std::span<const SequenceRows> sequences,
                float* out);

/// Prepares q, k, v of a step: optional RMSNorm per head (q_norm, k_norm [k_dim] or null), RoPE
/// at each row's position, then writes K and V into their pages (rounded to the page type, nearest
/// even). q and k are changed in place; q [rows, heads * k_dim], k [rows, kv_heads * k_dim],
/// v [rows, kv_heads * v_dim], each with a row stride in elements.
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
  RopeParams rope;                 // rotary_dim 0: no rotation
  const float* cos_sin = nullptr;  // rope_table of these sequences, or null: computed here
  std::span<const SequenceRows> sequences;
};
void attention_prepare(const Exec& exec, const AttentionPrepareArgs& args, const KvPages& pages);

/// out[row, head] = softmax(scale * q . K) V over positions 0..own (or the last `window`, own
/// included). Heads h * kv_heads / heads share a KV head; heads is a multiple of kv_heads.
///
/// Numerics: per (row, head), the positions fall into chunks of 512 (absolute: 0..511, 512..1023,
/// ...). In a chunk each score is an FMA over ascending dims, then times scale; the chunk's maximum
/// is subtracted before exp (kernels/cpu/vec.h); the weights are summed in 16 lanes
/// (position mod 16), the values in ascending position. Chunks are merged in ascending order, the
/// sink last. So the bits depend neither on chunking, batch, pages nor threads, and every ISA
/// agrees. With kBf16 pages q is not rounded; scores and sums are FP32.
/// |out - ref| <= max|v| (2 e + (n + 32) 2^-23) over n positions, with the scores' error
/// e = k_dim 2^-23 scale max sum|q k|.
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

/// Scratch that rope_table, attention_prepare and attention take for up to `rows` rows, at most.
int64_t attention_workspace_bytes(int64_t rows, int64_t heads, const KvGeometry& geometry,
                                  int threads);

}  // namespace nibble::kernels
