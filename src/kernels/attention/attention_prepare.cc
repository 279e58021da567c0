// What happens to q, k and v between the projections and attention: head norm, RoPE, KV write.
// Plain code on every ISA but for the norm: these are a few operations per element, and the sine
// and cosine of a step are computed once for all layers (rope_table).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/attention/attention.h"
#include "kernels/attention/row_blocks.h"
#include "kernels/norm/norm_isa.h"

namespace nibble::kernels {
namespace {

// Rows of a task. Aligned in position to 16, the lanes of a K block, so that no two tasks write to
// the same cache line of K.
constexpr int64_t kTaskRows = 16;

void fill_cos_sin(const RopeParams& rope, int64_t position, float* out) {
  const int64_t half = rope.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * rope.inv_freq[i];
    out[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * rope.scale;
    out[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * rope.scale;
  }
}

void rotate_half_split(float* x, int64_t half, const float* cos_sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    const float c = cos_sin[i], s = cos_sin[half + i];
    x[i] = a * c - b * s;
    x[half + i] = b * c + a * s;
  }
}

void rotate_interleaved(float* x, int64_t half, const float* cos_sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    const float c = cos_sin[i], s = cos_sin[half + i];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = b * c + a * s;
  }
}

void rotate_heads(const RopeParams& rope, const float* cos_sin, int64_t heads, int64_t k_dim,
                  float* x) {
  if (rope.rotary_dim == 0) return;
  const auto rotate = rope.interleaved ? rotate_interleaved : rotate_half_split;
  for (int64_t h = 0; h < heads; ++h) rotate(x + h * k_dim, rope.rotary_dim / 2, cos_sin);
}

/// Nearest, ties to even; NaN becomes 0x7FC0.
uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
float convert(float x, float*) { return x; }
uint16_t convert(float x, uint16_t*) { return to_bf16(x); }

/// One position of one KV head: K spread over its block's lanes, V as a row.
template <typename T>
void write_head(const KvGeometry& g, std::byte* head, int64_t at, const float* k, const float* v) {
  T* k_out = reinterpret_cast<T*>(head) + at / 16 * 16 * g.k_dim + at % 16;
  T* v_out = reinterpret_cast<T*>(head) + g.page_tokens * g.k_dim + at * g.v_dim;
  for (int64_t d = 0; d < g.k_dim; ++d) k_out[d * 16] = convert(k[d], k_out);
  for (int64_t d = 0; d < g.v_dim; ++d) v_out[d] = convert(v[d], v_out);
}

void write_row(const AttentionPrepareArgs& args, const KvPages& pages, const SequenceRows& sequence,
               int64_t position, const float* k, const float* v) {
  const KvGeometry& g = pages.geometry;
  const int64_t page = sequence.pages[position / g.page_tokens];
  const int64_t at = position % g.page_tokens;
  for (int64_t h = 0; h < g.kv_heads; ++h) {
    std::byte* head = pages.head(args.layer, page, h);
    if (g.type == KvType::kF32) {
      write_head<float>(g, head, at, k + h * g.k_dim, v + h * g.v_dim);
    } else {
      write_head<uint16_t>(g, head, at, k + h * g.k_dim, v + h * g.v_dim);
    }
  }
}

void norm_heads(RmsNormRowsFn kernel, const AttentionPrepareArgs& args, const float* weight,
                int64_t heads, int64_t k_dim, float* x) {
  if (weight == nullptr) return;
  kernel({.x = x,
          .delta = nullptr,
          .weight = weight,
          .out = x,
          .rows = heads,
          .n = k_dim,
          .eps = args.norm_eps});
}

void check_rope(const RopeParams& rope) {
  NIBBLE_CHECK(rope.rotary_dim >= 0 && rope.rotary_dim % 2 == 0, "rotary dim ", rope.rotary_dim);
  NIBBLE_CHECK(rope.rotary_dim == 0 || rope.inv_freq != nullptr);
}

}  // namespace

void rope_table(const Exec& exec, const RopeParams& rope, std::span<const SequenceRows> sequences,
                float* out) {
  NIBBLE_CHECK(exec.pool != nullptr && exec.workspace != nullptr);
  check_rope(rope);
  if (rope.rotary_dim == 0) return;
  WorkspaceScope scope(*exec.workspace);
  const RowBlocks blocks(*exec.workspace, sequences, kTaskRows, /*aligned=*/false);
  exec.pool->parallel_for(blocks.count(), [&](int64_t index, int) {
    const RowBlock block = blocks[index];
    for (int64_t r = block.first; r < block.first + block.rows; ++r) {
      fill_cos_sin(rope, block.sequence->position_begin + r,
                   out + (block.sequence->row_begin + r) * rope.rotary_dim);
    }
  });
}

void attention_prepare(const Exec& exec, const AttentionPrepareArgs& args, const KvPages& pages) {
  const KvGeometry& g = pages.geometry;
  NIBBLE_CHECK(exec.pool != nullptr && exec.workspace != nullptr);
  NIBBLE_CHECK(args.heads > 0 && args.q_stride >= args.heads * g.k_dim, args.heads, " heads");
  NIBBLE_CHECK(args.k_stride >= g.kv_heads * g.k_dim && args.v_stride >= g.kv_heads * g.v_dim,
               args.k_stride, " ", args.v_stride);
  NIBBLE_CHECK(args.layer >= 0 && args.layer < g.layers, "layer ", args.layer, " of ", g.layers);
  NIBBLE_CHECK(g.page_tokens > 0 && g.page_tokens % 16 == 0, g.page_tokens);
  check_rope(args.rope);
  NIBBLE_CHECK(args.rope.rotary_dim <= g.k_dim, args.rope.rotary_dim, " of ", g.k_dim);
  WorkspaceScope scope(*exec.workspace);
  const RowBlocks blocks(*exec.workspace, args.sequences, kTaskRows, /*aligned=*/true);
  const RmsNormRowsFn norm = rms_norm_rows_kernel(exec.isa);
  float* scratch = exec.workspace->take<float>(exec.pool->threads() * g.k_dim);
  exec.pool->parallel_for(blocks.count(), [&](int64_t index, int worker) {
    const RowBlock block = blocks[index];
    for (int64_t r = block.first; r < block.first + block.rows; ++r) {
      const int64_t row = block.sequence->row_begin + r;
      const int64_t position = block.sequence->position_begin + r;
      const float* cos_sin = scratch + worker * g.k_dim;
      if (args.cos_sin != nullptr) {
        cos_sin = args.cos_sin + row * args.rope.rotary_dim;
      } else {
        fill_cos_sin(args.rope, position, scratch + worker * g.k_dim);
      }
      float* q = args.q + row * args.q_stride;
      float* k = args.k + row * args.k_stride;
      norm_heads(norm, args, args.q_norm, args.heads, g.k_dim, q);
      norm_heads(norm, args, args.k_norm, g.kv_heads, g.k_dim, k);
      rotate_heads(args.rope, cos_sin, args.heads, g.k_dim, q);
      rotate_heads(args.rope, cos_sin, g.kv_heads, g.k_dim, k);
      write_row(args, pages, *block.sequence, position, k, args.v + row * args.v_stride);
    }
  });
}

}  // namespace nibble::kernels
