// Attention of many rows of one sequence (prefill): a CTA takes 128 (row, head) pairs of one KV
// head, 16 a warp, and walks all blocks of positions that its rows see.
#pragma once

#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/launch.h"

namespace nibble::kernels::cuda {

struct RowTile {
  int sequence, first_row, rows;  // sequence -1: no such tile
};

/// The tile of number `index` over all sequences with many rows; later rows first, which cost more.
/// One warp.
__device__ __forceinline__ RowTile find_row_tile(const AttentionLaunch& a, int index, int lane) {
  for (int base = 0; base < a.step.sequences; base += 32) {
    const int s = base + lane;
    int first = 0, rows = 0;
    if (s < a.step.sequences) {
      first = a.step.seq_row_begin[s];
      rows = a.step.seq_row_begin[s + 1] - first;
    }
    const int tiles = rows > a.few_rows ? (rows + a.tile_rows - 1) / a.tile_rows : 0;
    int through = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, through, d);
      if (lane >= d) through += other;
    }
    const unsigned after = __ballot_sync(~0u, through > index);
    if (after != 0) {
      const int owner = __ffs(static_cast<int>(after)) - 1;
      const int at = through - 1 - index;  // from the sequence's last tile down
      RowTile tile = {s, first + at * a.tile_rows, min(a.tile_rows, rows - at * a.tile_rows)};
      tile.sequence = __shfl_sync(~0u, tile.sequence, owner);
      tile.first_row = __shfl_sync(~0u, tile.first_row, owner);
      tile.rows = __shfl_sync(~0u, tile.rows, owner);
      return tile;
    }
    index -= __shfl_sync(~0u, through, 31);
  }
  return {-1, 0, 0};
}

template <int kHeadDim, KvFormat kFormat>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_tiles_kernel(const AttentionLaunch a) {
  using Tile = KvTile<kHeadDim, kFormat>;
  extern __shared__ __align__(128) uint8_t kv[];
  __shared__ RowTile shared_tile;
  __shared__ int warp_last[kAttentionThreads / 32];
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = threadIdx.x % 32;
  const uint32_t kv_at = smem_address(kv);
  const int kv_heads = static_cast<int>(a.cache.kv_heads);
  const int kv_head = static_cast<int>(blockIdx.x) % kv_heads;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (warp == 0) {
    const RowTile found = find_row_tile(a, static_cast<int>(blockIdx.x) / kv_heads, lane);
    if (lane == 0) shared_tile = found;
  }
  __syncthreads();
  const RowTile tile = shared_tile;
  if (tile.sequence < 0) return;

  // A lane's two queries; padding and those past the tile's end compute position 0.
  int own[2];
  bool padding[2];
  int64_t place[2];  // of the query's first element in q and out; -1: none
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = warp * 16 + lane / 4 + 8 * h, row = query / a.group;
    place[h] = -1;
    own[h] = 0;
    padding[h] = true;
    if (row >= tile.rows) continue;
    const int position = a.step.positions[tile.first_row + row];
    own[h] = max(position, 0);
    padding[h] = position < 0;
    place[h] = (static_cast<int64_t>(tile.first_row + row) * a.heads + kv_head * a.group +
                query % a.group) *
               kHeadDim;
  }
  uint32_t q[Tile::kSteps][4];
  load_queries<Tile>(place[0] < 0 ? nullptr : a.q + place[0],
                     place[1] < 0 ? nullptr : a.q + place[1], lane, q);
  const int first_own = __reduce_min_sync(~0u, min(own[0], own[1]));
  const int last_own = __reduce_max_sync(~0u, max(own[0], own[1]));

  if (lane == 0) warp_last[warp] = last_own;
  __syncthreads();
  int last = warp_last[0];
#pragma unroll
  for (int i = 1; i < kAttentionThreads / 32; ++i) last = max(last, warp_last[i]);
  const int blocks = last / kKvPageTokens + 1;
  const int32_t* table =
      a.step.page_table + static_cast<int64_t>(tile.sequence) * a.step.table_stride;
  const auto copy = [&](int block, int page) {
    copy_block<Tile>(kv_at + static_cast<uint32_t>(block % Tile::kStages * 2 * Tile::kPlane),
                     a.cache.data + a.cache.head_offset(a.layer, page, kv_head),
                     last - block * kKvPageTokens);
  };
  copy(0, table[0]);
  int next_page = table[min(1, blocks - 1)];

  float m[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // all groups before
  float group_m[2] = {-INFINITY, -INFINITY}, group_sum[2] = {0.0f, 0.0f};
  float total[Tile::kSteps][2][4] = {}, group[Tile::kSteps][2][4] = {};
  const auto fold_group = [&] {
    FoldWeights w[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) w[h] = fold_sums(m[h], sum[h], group_m[h], group_sum[h]);
#pragma unroll
    for (int i = 0; i < Tile::kSteps; ++i) {
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
  };
  for (int block = 0; block < blocks; ++block) {
    copy_wait_all();
    __syncthreads();
    if (Tile::kStages == 2 && block + 1 < blocks) {
      copy(block + 1, next_page);
      next_page = table[min(block + 2, blocks - 1)];
    }
    const int from = block * kKvPageTokens;
    if (from <= last_own) {  // the same for the whole warp
      if (block % kGroupBlocks == 0 && block != 0) fold_group();
      const uint32_t k = kv_at + static_cast<uint32_t>(block % Tile::kStages * 2 * Tile::kPlane);
      float s[8][4];
      block_scores<Tile>(q, k, 0, lane, s);
      if (from + kKvPageTokens - 1 > first_own) {
        mask_scores(s, 0, lane, own[0] - from, own[1] - from);
      }
      const float peak[2] = {__fmul_rn(quad_maximum(s, 0), a.factor),
                             __fmul_rn(quad_maximum(s, 1), a.factor)};
      uint32_t p[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* pair = &s[2 * i + j / 2][2 * (j % 2)];
          p[i][j] = weight_pair(pair[0], pair[1], a.factor, peak[j % 2]);
        }
      }
      float block_sum[4];
      block_sums(p, block_sum);
      FoldWeights w[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w[h] = fold_sums(group_m[h], group_sum[h], peak[h], block_sum[2 * h]);
      }
#pragma unroll
      for (int i = 0; i < Tile::kSteps; ++i) {
        float o[2][4];
        block_values<Tile>(p, k + Tile::kPlane, i, lane, o);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float& to = group[i][j / 4][j % 4];
          to = fold_value(to, o[j / 4][j % 4], w[j % 4 / 2]);
        }
      }
    }
    if (Tile::kStages == 1 && block + 1 < blocks) {
      __syncthreads();
      copy(block + 1, next_page);
      next_page = table[min(block + 2, blocks - 1)];
    }
  }
  fold_group();

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (place[h] < 0) continue;
    const float inverse = padding[h] ? 0.0f : __fdiv_rn(1.0f, sum[h]);
#pragma unroll
    for (int i = 0; i < Tile::kSteps; ++i) {
      for_values<Tile>(total[i], i, lane, h, [&](int dim, float x, float y) {
        store_bf16_pair(a.out + place[h] + dim, finish_value(x, inverse), finish_value(y, inverse));
      });
    }
  }
}

template <int kHeadDim, KvFormat kFormat>
cudaError_t launch_tiles(const AttentionLaunch& launch, int blocks, cudaStream_t stream) {
  constexpr int kSmem = KvTile<kHeadDim, kFormat>::kSmem;
  const auto kernel = attention_tiles_kernel<kHeadDim, kFormat>;
  return launch_overlapped(kernel, blocks, kAttentionThreads, kSmem, stream, launch);
}

}  // namespace nibble::kernels::cuda
