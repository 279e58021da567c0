// The fused decode attention of few rows and contexts up to a few thousand positions: a cluster of
// CTAs takes up to 16 query heads of one KV head of one row and deals the row's blocks out. Every
// CTA sends its blocks' partial results to the CTA that folds the head, through shared memory.
// Arithmetic and order are those of attention_rows.cuh, split by block.
#pragma once

#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/cluster.cuh"

namespace nibble::kernels::cuda {

/// Bytes of partial results that one CTA folds: values, then maxima and sums.
NIBBLE_HD constexpr int cluster_fold_bytes(int blocks, int heads, int head_dim) {
  return blocks * heads * (head_dim * 4 + 8);
}

template <int kHeadDim, KvFormat kFormat>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_cluster_kernel(const __grid_constant__ AttentionLaunch a) {
#if defined(NIBBLE_HAS_BULK_COPY)
  using Tile = KvTile<kHeadDim, kFormat>;
  using Row = PreparedRow<Tile, kHeadDim>;
  constexpr int kWarps = kAttentionThreads / 32, kQuads = kHeadDim / 4;
  static_assert(Tile::kStages == 2 && Tile::kSteps <= kWarps);
  extern __shared__ __align__(128) uint8_t kv[];
  __shared__ BlockExchange exchange;
  __shared__ Row prepared;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int ctas = cluster_size(), rank = cluster_rank();
  const uint32_t kv_at = smem_address(kv);

  RowUnit u;
  const int columns = static_cast<int>(a.cache.kv_heads) * a.parts;
  const int unit = static_cast<int>(blockIdx.x) / ctas, column = unit % columns;
  u.row = unit / columns;
  u.position = __ldcg(a.step.positions + u.row);
  u.sequence = __ldcg(a.step.row_sequence + u.row);
  u.kv_head = column / a.parts;
  u.part = column % a.parts;
  u.first_head = u.kv_head * a.group + u.part * kRowHeads;
  u.heads = min(kRowHeads, a.group - u.part * kRowHeads);
  const bool live = u.position >= 0;
  const int newest = u.position / kKvPageTokens, blocks = min(newest + 1, a.splits);
  const int32_t* table = a.step.page_table + static_cast<int64_t>(u.sequence) * a.step.table_stride;
  const auto stage = [&](int i) { return i % 2 * 2 * Tile::kPlane; };
  const auto copy = [&](int i) {  // the CTA's i-th block
    const int block = rank + i * ctas;
    if (block >= blocks) return;
    copy_block<Tile>(kv_at + static_cast<uint32_t>(stage(i)),
                     a.cache.data + a.cache.head_offset(a.layer, __ldcg(table + block), u.kv_head),
                     u.position - block * kKvPageTokens - 1);
  };
  const bool busy = live && rank < blocks;
  int newest_page = 0;
  if (busy) {
    copy(0);
    copy(1);
    newest_page = __ldcg(table + newest);
    load_row_constants(a, u.position, prepared);
  }
  wait_for_previous_kernel();
  // Not sooner: the next product's weights would come between this kernel and its q, k and v.
  allow_next_kernel();
  const int64_t first_out = (static_cast<int64_t>(u.row) * a.heads + u.first_head) * kHeadDim;
  if (!live) {
    for (int i = threadIdx.x; rank == 0 && i < u.heads * kHeadDim; i += kAttentionThreads) {
      a.out[first_out + i] = 0;
    }
    return;
  }
  cluster_arrive();  // every CTA has started: its shared memory may be written
  const int slots = (u.heads + ctas - 1) / ctas;  // heads that a CTA folds, at most
  const uint32_t values_at = kv_at + Tile::kSmem;
  const uint32_t sums_at = values_at + static_cast<uint32_t>(blocks * slots * kHeadDim * 4);
  if (busy) {
    __syncthreads();
    prepare_row(a, u, newest % ctas == rank, newest_page, warp, lane, prepared);
    __syncthreads();
    uint32_t q[Tile::kSteps][4];
    load_queries<Tile>(g < u.heads ? prepared.q[0] + g * Row::kStride : nullptr,
                       g + 8 < u.heads ? prepared.q[0] + (g + 8) * Row::kStride : nullptr, lane, q);
    for (int i = 0; rank + i * ctas < blocks; ++i) {
      const int block = rank + i * ctas;
      copy_wait_all();
      __syncthreads();
      if (block == newest) add_own_row(prepared, u.position, kv + stage(i));
      const uint32_t k = kv_at + static_cast<uint32_t>(stage(i));
      BlockWeights b;
      block_weights<Tile>(q, k, u.position - block * kKvPageTokens, a.factor, warp, lane, exchange,
                          b);
      float o[2][4];
      if (warp < Tile::kSteps) block_values<Tile>(b.p, k + Tile::kPlane, warp, lane, o);
      if (i == 0) cluster_wait();
      if (warp < Tile::kSteps) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int head = g + 8 * h;
          if (head >= u.heads) continue;
          const int slot = block * slots + head / ctas;
          const uint32_t to =
              cluster_address(values_at + static_cast<uint32_t>(slot * kHeadDim * 4), head % ctas);
          for_values<Tile>(o, warp, lane, h, [&](int dim, float x, float y) {
            cluster_store(to + static_cast<uint32_t>(dim) * 4, make_float2(x, y));
          });
          if (warp == 0 && t == 0) {
            cluster_store(cluster_address(sums_at + static_cast<uint32_t>(slot) * 8, head % ctas),
                          make_float2(b.peak[h], b.sum[2 * h]));
          }
        }
      }
      if (block + 2 * ctas < blocks) {
        __syncthreads();  // the stage is free
        copy(i + 2);
      }
    }
  } else {
    cluster_wait();
  }
  cluster_arrive();  // all partial results of this CTA are sent
  if (rank >= u.heads) return;
  cluster_wait();
  const auto* values = reinterpret_cast<const float4*>(kv + Tile::kSmem);
  const auto* sums = reinterpret_cast<const float2*>(kv + (sums_at - kv_at));
  const int own_heads = (u.heads - rank + ctas - 1) / ctas;
  for (int item = threadIdx.x; item < own_heads * kQuads; item += kAttentionThreads) {
    const int slot = item / kQuads, quad = item % kQuads, head = rank + slot * ctas;
    float sum;
    const float4 total = fold_parts(
        blocks, true, [&](int i) { return sums[i * slots + slot]; },
        [&](int i) { return values[(i * slots + slot) * kQuads + quad]; }, sum);
    store_quad(a.out + first_out + head * kHeadDim + 4 * quad, total, sum);
  }
#endif
}

/// blocks: CTAs, in clusters of launch.ctas.
template <int kHeadDim, KvFormat kFormat>
cudaError_t launch_clusters(const AttentionLaunch& launch, int blocks, cudaStream_t stream) {
  const int heads = std::min(kRowHeads, launch.group);
  const int smem =
      KvTile<kHeadDim, kFormat>::kSmem +
      cluster_fold_bytes(launch.splits, (heads + launch.ctas - 1) / launch.ctas, kHeadDim);
  const auto kernel = attention_cluster_kernel<kHeadDim, kFormat>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (error == cudaSuccess && launch.ctas > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  return launch_overlapped_clusters(kernel, blocks, launch.ctas, kAttentionThreads,
                                    static_cast<size_t>(smem), stream, launch);
}

}  // namespace nibble::kernels::cuda
