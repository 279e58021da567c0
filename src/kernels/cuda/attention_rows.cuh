// Attention of single rows (decode): a CTA takes up to 16 query heads of one KV head and some
// blocks of one row's positions; its eight warps share each block, 8 positions a warp for the
// scores and 16 dims a warp for the values. With several CTAs a row, the last to arrive folds the
// partial results in ascending order.
//
// The fused form also prepares its row: every CTA norms and rotates its own query heads (cheap, and
// hidden behind the copies of K and V), and the CTA of the newest block adds the row's own K and V
// to its copy and to the page. It starts copying before the kernel before it has ended.
#pragma once

#include "kernels/cuda/attention_head.cuh"
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.h"

namespace nibble::kernels::cuda {

struct RowUnit {
  int row = -1, sequence = 0;  // row -1: nothing to do
  int kv_head = 0, part = 0, first_head = 0, heads = 0;
  int position = 0, begin = 0, end = 0;  // blocks [begin, end)
  int splits = 1, split = 0;
  int64_t slot = 0;  // of the row's first partial result
  int counter = 0;
};

/// Everything is the same for all threads of the CTA.
__device__ __forceinline__ RowUnit find_row_unit(const AttentionLaunch& a, int index) {
  RowUnit u;
  const int kv_heads = static_cast<int>(a.cache.kv_heads), columns = kv_heads * a.parts;
  const int column = index % columns, rest = index / columns;
  const int row_unit = rest % a.row_units;
  u.split = rest / a.row_units;
  int row = row_unit;
  if (a.by_sequence) {
    const int s = row_unit / a.few_rows, j = row_unit % a.few_rows;
    const int first = a.step.seq_row_begin[s], count = a.step.seq_row_begin[s + 1] - first;
    if (count > a.few_rows || j >= count) return u;
    row = first + j;
  }
  u.position = __ldcg(a.step.positions + row);
  u.sequence = __ldcg(a.step.row_sequence + row);
  u.kv_head = column / a.parts;
  u.part = column % a.parts;
  u.first_head = u.kv_head * a.group + u.part * kRowHeads;
  u.heads = min(kRowHeads, a.group - u.part * kRowHeads);
  const int blocks = u.position < 0 ? 1 : u.position / kKvPageTokens + 1;
  u.splits = (blocks + a.unit_blocks - 1) / a.unit_blocks;
  if (u.splits > a.splits) {  // no room for partial results
    u.splits = 1;
    u.end = blocks;
  } else {
    u.begin = u.split * a.unit_blocks;
    u.end = min(blocks, u.begin + a.unit_blocks);
  }
  if (u.split >= u.splits) return u;
  u.slot = static_cast<int64_t>(row_unit) * a.splits;
  u.counter = row_unit * columns + column;
  u.row = row;
  return u;
}

/// Adds a later state, with four of its values, to one.
__device__ __forceinline__ void fold_quad(float& m, float& sum, float4& to, float2 later,
                                          const float4& v) {
  const FoldWeights w = fold_sums(m, sum, later.x, later.y);
  to.x = fold_value(to.x, v.x, w);
  to.y = fold_value(to.y, v.y, w);
  to.z = fold_value(to.z, v.z, w);
  to.w = fold_value(to.w, v.w, w);
}

/// Folds partial results in ascending order: blocks into groups (by_block), groups into the result.
/// load_sum(i) and load_value(i) give part i's maximum and sum, and four of its values.
template <typename LoadSum, typename LoadValue>
__device__ __forceinline__ float4 fold_parts(int parts, bool by_block, const LoadSum& load_sum,
                                             const LoadValue& load_value, float& sum) {
  float m = -INFINITY;
  sum = 0.0f;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = 0; first < parts; first += kGroupBlocks) {
    float2 s[kGroupBlocks];
    float4 v[kGroupBlocks];
#pragma unroll
    for (int i = 0; i < kGroupBlocks; ++i) {
      const int at = min(first + i, parts - 1);
      s[i] = load_sum(at);
      v[i] = load_value(at);
    }
    if (by_block) {
      float group_m = -INFINITY, group_sum = 0.0f;
      float4 group = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kGroupBlocks; ++i) {
        if (first + i < parts) fold_quad(group_m, group_sum, group, s[i], v[i]);
      }
      fold_quad(m, sum, total, make_float2(group_m, group_sum), group);
    } else {
#pragma unroll
      for (int i = 0; i < kGroupBlocks; ++i) {
        if (first + i < parts) fold_quad(m, sum, total, s[i], v[i]);
      }
    }
  }
  return total;
}

/// Four values of a head's result.
__device__ __forceinline__ void store_quad(uint16_t* out, const float4& total, float sum) {
  const float inverse = __fdiv_rn(1.0f, sum);
  store_bf16_pair(out, finish_value(total.x, inverse), finish_value(total.y, inverse));
  store_bf16_pair(out + 2, finish_value(total.z, inverse), finish_value(total.w, inverse));
}

/// Folds a row's partial results in global memory.
template <int kHeadDim>
__device__ __forceinline__ void fold_partials(const AttentionLaunch& a, const RowUnit& u) {
  constexpr int kQuads = kHeadDim / 4;
  for (int item = static_cast<int>(threadIdx.x); item < u.heads * kQuads;
       item += kAttentionThreads) {
    const int head = u.first_head + item / kQuads, quad = item % kQuads;
    const float2* sums = a.partial_sums + u.slot * a.heads + head;
    const float4* values =
        reinterpret_cast<const float4*>(a.partial) + (u.slot * a.heads + head) * kQuads + quad;
    float sum;
    const float4 total = fold_parts(
        u.splits, a.unit_blocks == 1,
        [&](int i) { return __ldcg(sums + static_cast<int64_t>(i) * a.heads); },
        [&](int i) { return __ldcg(values + static_cast<int64_t>(i) * a.heads * kQuads); }, sum);
    store_quad(a.out + (static_cast<int64_t>(u.row) * a.heads + head) * kHeadDim + 4 * quad, total,
               sum);
  }
}

/// What the fused kernel keeps of its row in shared memory.
template <typename Tile, int kHeadDim>
struct PreparedRow {
  static constexpr int kStride = kHeadDim + 8;  // 16 bytes more: no bank conflicts
  __align__(16) float heads[kAttentionThreads / 32][kHeadDim];
  __align__(16) uint16_t q[kRowHeads][kStride];
  __align__(16) std::byte kv[2][Tile::kRow];  // K and V of the row, as in its page
  float2 angles[kHeadDim / 2];
  float norms[2][kHeadDim];  // weights of the head norms of q and k
};

/// What a row needs beside the kernel before's results.
template <typename Tile, int kHeadDim>
__device__ __forceinline__ void load_row_constants(const AttentionLaunch& a, int position,
                                                   PreparedRow<Tile, kHeadDim>& row) {
  const AttentionPrepareArgs& args = a.prepare;
  for (int d = static_cast<int>(threadIdx.x); d < 2 * kHeadDim; d += kAttentionThreads) {
    const float* from = d < kHeadDim ? args.q_norm : args.k_norm;
    if (from != nullptr) row.norms[d / kHeadDim][d % kHeadDim] = from[d % kHeadDim];
  }
  for (int i = static_cast<int>(threadIdx.x); i < args.rotary_dim / 2; i += kAttentionThreads) {
    row.angles[i] = rope_angle(args, position, args.inv_freq[i]);
  }
}

/// Norm, RoPE and conversion of the unit's query heads and, with_kv, of its K and V; the first part
/// writes those to their page, too. A warp takes heads in turn, the next one's values on their way.
template <typename Tile, int kHeadDim>
__device__ __forceinline__ void prepare_row(const AttentionLaunch& a, const RowUnit& u,
                                            bool with_kv, int page, int warp, int lane,
                                            PreparedRow<Tile, kHeadDim>& row) {
  constexpr int kLoads = (kHeadDim + 127) / 128, kWarps = kAttentionThreads / 32;
  const AttentionPrepareArgs& args = a.prepare;
  const float* qkv = args.qkv + u.row * args.row_stride;
  float* x = row.heads[warp];
  const int at = u.position % kKvPageTokens, tasks = u.heads + (with_kv ? 2 : 0);
  float4 loaded[kLoads];
  const auto load = [&](int task) {
    const int source = task < u.heads    ? u.first_head + task
                       : task == u.heads ? a.heads + u.kv_head
                                         : a.heads + u.kv_head + static_cast<int>(a.cache.kv_heads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int d = 128 * i + 4 * lane;
      if (task < tasks && d < kHeadDim) {
        loaded[i] = *reinterpret_cast<const float4*>(qkv + source * kHeadDim + d);
      }
    }
  };
  load(warp);
  for (int task = warp; task < tasks; task += kWarps) {
    const bool query = task<u.heads, value = task> u.heads;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int d = 128 * i + 4 * lane;
      if (d < kHeadDim) *reinterpret_cast<float4*>(x + d) = loaded[i];
    }
    load(task + kWarps);
    __syncwarp();
    if (!value) {
      if ((query ? args.q_norm : args.k_norm) != nullptr) {
        norm_head(x, row.norms[query ? 0 : 1], kHeadDim, args.norm_eps, lane);
      }
      for (int i = lane; i < args.rotary_dim / 2; i += 32) rotate_pair(args, x, i, row.angles[i]);
      __syncwarp();
    }
    std::byte* plane =
        a.cache.data + a.cache.head_offset(a.layer, page, u.kv_head) + (value ? Tile::kPlane : 0);
    for (int d = 2 * lane; d < kHeadDim; d += 64) {
      if (query) {
        *reinterpret_cast<__nv_bfloat162*>(&row.q[task][d]) = __floats2bfloat162_rn(x[d], x[d + 1]);
      } else {
        write_page_pair(a.cache, row.kv[value] - at * Tile::kRow, at, d, x[d], x[d + 1]);
        if (u.part == 0) write_page_pair(a.cache, plane, at, d, x[d], x[d + 1]);
      }
    }
    __syncwarp();
  }
}

/// Shared memory that the warps need to agree on a block's weights.
struct BlockExchange {
  __align__(16) float maxima[16][kAttentionThreads / 32];
  __align__(16) uint32_t weights[4][32][4];  // A operands of the four steps
};
/// A block's weights as A operands, and per row (h: row g + 8 h) factor * maximum and the sum in
/// sum[2 h].
struct BlockWeights {
  uint32_t p[4][4];
  float peak[2], sum[4];
};

/// Scores and weights of one block, by eight warps. own: the row's own position in the block.
/// sync(): their barrier.
template <typename Tile, typename Sync>
__device__ __forceinline__ void block_weights(const uint32_t (&q)[Tile::kSteps][4], uint32_t k,
                                              int own, float factor, int warp, int lane,
                                              BlockExchange& exchange, BlockWeights& w,
                                              const Sync& sync) {
  const int g = lane / 4, t = lane % 4;
  float s[1][4];
  block_scores<Tile>(q, k, warp, lane, s);
  mask_scores(s, warp, lane, own, own);
  const float low = quad_maximum(s, 0), high = quad_maximum(s, 1);
  if (t == 0) {
    exchange.maxima[g][warp] = low;
    exchange.maxima[g + 8][warp] = high;
  }
  sync();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float4* row = reinterpret_cast<const float4*>(exchange.maxima[g + 8 * h]);
    const float4 x = row[0], y = row[1];
    const float top =
        fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), fmaxf(fmaxf(y.x, y.y), fmaxf(y.z, y.w)));
    w.peak[h] = __fmul_rn(top, factor);
  }
  *reinterpret_cast<uint2*>(&exchange.weights[warp / 2][lane][2 * (warp % 2)]) =
      make_uint2(weight_pair(s[0][0], s[0][1], factor, w.peak[0]),
                 weight_pair(s[0][2], s[0][3], factor, w.peak[1]));
  sync();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = *reinterpret_cast<const uint4*>(exchange.weights[i][lane]);
    w.p[i][0] = v.x, w.p[i][1] = v.y, w.p[i][2] = v.z, w.p[i][3] = v.w;
  }
  block_sums(w.p, w.sum);
}

/// The row's own K and V, which no copy has, into its block's copy at `stage`. The caller syncs.
template <typename Tile>
__device__ __forceinline__ void add_own_row(const std::byte (&own)[2][Tile::kRow], int position,
                                            uint8_t* stage, int thread) {
  constexpr int kUnits = Tile::kRow / 16;
  if (thread < 2 * kUnits) {
    const int plane = thread / kUnits, unit = thread % kUnits;
    reinterpret_cast<uint4*>(stage + plane * Tile::kPlane +
                             position % kKvPageTokens * Tile::kRow)[unit] =
        reinterpret_cast<const uint4*>(own[plane])[unit];
  }
}

template <int kHeadDim, KvFormat kFormat, bool kFused>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_rows_kernel(const AttentionLaunch a) {
  using Tile = KvTile<kHeadDim, kFormat>;
  using Row = PreparedRow<Tile, kHeadDim>;
  constexpr int kWarps = kAttentionThreads / 32;
  constexpr int kPairs = (Tile::kSteps + kWarps - 1) / kWarps;  // of one warp
  extern __shared__ __align__(128) uint8_t kv[];
  __shared__ BlockExchange exchange;
  __shared__ __align__(16) std::byte row_memory[kFused ? sizeof(Row) : 16];
  __shared__ int flag;
  Row& prepared = *reinterpret_cast<Row*>(row_memory);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t kv_at = smem_address(kv);
  bool waiting = kFused;  // for the kernel before: q, k and v of this step
  if (!kFused) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }

  const int units = max(a.splits, 1) * a.row_units * static_cast<int>(a.cache.kv_heads) * a.parts;
  for (int index = blockIdx.x; index < units; index += gridDim.x) {
    const RowUnit u = find_row_unit(a, index);
    const int newest = u.position / kKvPageTokens;  // block of the row itself
    const int32_t* table =
        a.step.page_table + static_cast<int64_t>(u.sequence) * a.step.table_stride;
    const auto copy = [&](int block, int page) {
      copy_block<Tile>(kv_at + static_cast<uint32_t>(block % Tile::kStages * 2 * Tile::kPlane),
                       a.cache.data + a.cache.head_offset(a.layer, page, u.kv_head),
                       u.position - block * kKvPageTokens - (kFused ? 1 : 0));
    };
    const bool live = u.row >= 0 && u.position >= 0;
    int next_page = 0, newest_page = 0;
    if (live) {
      copy(u.begin, __ldcg(table + u.begin));
      next_page = __ldcg(table + min(u.begin + 1, u.end - 1));
      if constexpr (kFused) {
        newest_page = __ldcg(table + newest);
        load_row_constants(a, u.position, prepared);
      }
    }
    if (waiting) {
      wait_for_previous_kernel();
      allow_next_kernel();
      waiting = false;
    }
    if (u.row < 0) continue;
    const int64_t first_out = (static_cast<int64_t>(u.row) * a.heads + u.first_head) * kHeadDim;
    if (!live) {
      for (int i = threadIdx.x; i < u.heads * kHeadDim; i += kAttentionThreads) {
        a.out[first_out + i] = 0;
      }
      continue;
    }
    uint32_t q[Tile::kSteps][4];
    const uint16_t* rows = a.q + first_out;
    int stride = kHeadDim;
    if constexpr (kFused) {
      __syncthreads();
      prepare_row(a, u, u.end == newest + 1, newest_page, warp, lane, prepared);
      __syncthreads();
      rows = prepared.q[0];
      stride = Row::kStride;
    }
    load_queries<Tile>(g < u.heads ? rows + g * stride : nullptr,
                       g + 8 < u.heads ? rows + (g + 8) * stride : nullptr, lane, q);

    float m[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // all groups before
    float group_m[2] = {-INFINITY, -INFINITY}, group_sum[2] = {0.0f, 0.0f};
    float total[kPairs][2][4] = {}, group[kPairs][2][4] = {};
    for (int block = u.begin; block < u.end; ++block) {
      copy_wait_all();
      __syncthreads();
      if (Tile::kStages == 2 && block + 1 < u.end) {
        copy(block + 1, next_page);
        next_page = __ldcg(table + min(block + 2, u.end - 1));
      }
      const uint32_t k = kv_at + static_cast<uint32_t>(block % Tile::kStages * 2 * Tile::kPlane);
      if constexpr (kFused) {
        if (block == newest) {
          add_own_row<Tile>(prepared.kv, u.position, kv + (k - kv_at),
                            static_cast<int>(threadIdx.x));
          __syncthreads();
        }
      }
      BlockWeights b;
      block_weights<Tile>(q, k, u.position - block * kKvPageTokens, a.factor, warp, lane, exchange,
                          b, [] { __syncthreads(); });
      FoldWeights w[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w[h] = fold_sums(group_m[h], group_sum[h], b.peak[h], b.sum[2 * h]);
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (warp + i * kWarps >= Tile::kSteps) continue;
        float o[2][4];
        block_values<Tile>(b.p, k + Tile::kPlane, warp + i * kWarps, lane, o);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float& to = group[i][j / 4][j % 4];
          to = fold_value(to, o[j / 4][j % 4], w[j % 4 / 2]);
        }
      }
      if (block % kGroupBlocks == kGroupBlocks - 1 || block + 1 == u.end) {
#pragma unroll
        for (int h = 0; h < 2; ++h) w[h] = fold_sums(m[h], sum[h], group_m[h], group_sum[h]);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            float& from = group[i][j / 4][j % 4];
            float& to = total[i][j / 4][j % 4];
            to = fold_value(to, from, w[j % 4 / 2]);
            from = 0.0f;
          }
        }
        group_m[0] = group_m[1] = -INFINITY;
        group_sum[0] = group_sum[1] = 0.0f;
      }
      if (Tile::kStages == 1 && block + 1 < u.end) {
        __syncthreads();
        copy(block + 1, next_page);
        next_page = __ldcg(table + min(block + 2, u.end - 1));
      }
    }

    const bool whole = u.splits == 1;
    const int64_t slot = (u.slot + u.split) * a.heads + u.first_head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = g + 8 * h;
      if (head >= u.heads) continue;
      const float inverse = __fdiv_rn(1.0f, sum[h]);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (warp + i * kWarps >= Tile::kSteps) continue;
        for_values<Tile>(total[i], warp + i * kWarps, lane, h, [&](int dim, float x, float y) {
          if (whole) {
            store_bf16_pair(a.out + first_out + head * kHeadDim + dim, finish_value(x, inverse),
                            finish_value(y, inverse));
          } else {
            *reinterpret_cast<float2*>(a.partial + (slot + head) * kHeadDim + dim) =
                make_float2(x, y);
          }
        });
      }
      if (!whole && warp == 0 && t == 0) a.partial_sums[slot + head] = make_float2(m[h], sum[h]);
    }
    if (!whole && arrive_last(a.counters + u.counter, u.splits, &flag)) {
      fold_partials<kHeadDim>(a, u);
    }
    __syncthreads();  // before the next unit writes shared memory
  }
}

template <int kHeadDim, KvFormat kFormat, bool kFused>
cudaError_t launch_rows(const AttentionLaunch& launch, int blocks, cudaStream_t stream) {
  constexpr int kSmem = KvTile<kHeadDim, kFormat>::kSmem;
  const auto kernel = attention_rows_kernel<kHeadDim, kFormat, kFused>;
  return launch_overlapped(kernel, blocks, kAttentionThreads, kSmem, stream, launch);
}

}  // namespace nibble::kernels::cuda
