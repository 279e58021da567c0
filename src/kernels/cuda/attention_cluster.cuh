// The fused decode attention of few rows and contexts up to a few thousand positions: a cluster of
// CTAs takes up to 16 query heads of one KV head of one row and deals the row's blocks out. Every
// CTA sends its blocks' partial results to the CTA that folds the head, through shared memory.
// Arithmetic and order are those of attention_rows.cuh, split by block.
//
// Most CTAs start when the product before ends, so nothing may wait for what it does not need: one
// warp finds the pages and starts the copies, the others take a head each, and the two halves of
// the warps then work on two blocks at a time.
#pragma once

#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/cluster.cuh"

namespace nibble::kernels::cuda {

constexpr int kClusterThreads = 2 * kAttentionThreads;
constexpr int kPrepareWarps = 14;  // 12 query heads, K and V at once
constexpr int kCopyWarp = kClusterThreads / 32 - 1;
static_assert(kPrepareWarps <= kCopyWarp);

/// Bytes of partial results that one CTA folds: values, then maxima and sums.
NIBBLE_HD constexpr int cluster_fold_bytes(int blocks, int heads, int head_dim) {
  return blocks * heads * (head_dim * 4 + 8);
}

/// What a CTA keeps of its row in shared memory.
template <typename Tile, int kHeadDim>
struct ClusterRow {
  static constexpr int kStride = kHeadDim + 8;  // 16 bytes more: no bank conflicts
  union {
    float heads[kPrepareWarps][kHeadDim];  // while the row is prepared
    BlockExchange exchange[2];             // after that, one for each half of the warps
  };
  __align__(16) uint16_t q[kRowHeads][kStride];
  __align__(16) std::byte kv[2][Tile::kRow];  // K and V of the row, as in its page
  uint64_t full[2], sent;  // barriers: a block's copy is there; all partial results are
};

/// A head's values and norm weights: a lane has dims lane + 32 i.
template <int kHeadDim>
struct HeadValues {
  static constexpr int kLoads = kHeadDim / 32;
  float x[kLoads], weight[kLoads];

  __device__ __forceinline__ void load_weight(const float* from, int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) weight[i] = from == nullptr ? 0.0f : from[lane + 32 * i];
  }
  __device__ __forceinline__ void load(const float* from, int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = from[lane + 32 * i];
  }
  /// norm_head, in registers.
  __device__ __forceinline__ void norm(float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum = __fmaf_rn(x[i], x[i], sum);
    const float inverse = head_inverse(sum, kHeadDim, eps);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x[i] = norm_value(x[i], inverse, weight[i]);
  }
};

/// Folds a head's blocks in the order of fold_parts. Four lanes, a quad of values each, take a
/// group of blocks; all lanes then fold the groups. Empty states change at most the sign of a zero.
template <typename LoadSum, typename LoadValue>
__device__ __forceinline__ float4 fold_groups(int blocks, int lane, const LoadSum& load_sum,
                                              const LoadValue& load_value, float& sum) {
  float group_m = -INFINITY, group_sum = 0.0f;
  float4 group = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 s[kGroupBlocks];
#pragma unroll
  for (int i = 0; i < kGroupBlocks; ++i) {  // no branches, so that the steps overlap
    const int block = lane / 4 * kGroupBlocks + i;
    s[i] = load_sum(min(block, blocks - 1));
    if (block >= blocks) s[i] = make_float2(-INFINITY, 0.0f);
  }
#pragma unroll
  for (int i = 0; i < kGroupBlocks; ++i) {
    fold_quad(group_m, group_sum, group, s[i],
              load_value(min(lane / 4 * kGroupBlocks + i, blocks - 1)));
  }
  float m = -INFINITY;
  sum = 0.0f;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  constexpr int kAtOnce = 4;
  for (int first = 0; first * kGroupBlocks < blocks; first += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int from = 4 * (first + i) + lane % 4;
      const auto of = [&](float x) { return __shfl_sync(~0u, x, from); };
      fold_quad(m, sum, total, make_float2(of(group_m), of(group_sum)),
                make_float4(of(group.x), of(group.y), of(group.z), of(group.w)));
    }
  }
  return total;
}

/// More threads than there are: the compiler then takes 65 to 80 registers, and two CTAs do not fit
/// a processor. Clusters that share processors are slower than clusters that wait for their own.
constexpr int kAloneBound = 768;

template <int kHeadDim, KvFormat kFormat, bool kAlone>
__global__ void __launch_bounds__(kAlone ? kAloneBound : kClusterThreads, kAlone ? 1 : 2)
    attention_cluster_kernel(const __grid_constant__ AttentionLaunch a) {
#if defined(NIBBLE_HAS_BULK_COPY)
  using Tile = KvTile<kHeadDim, kFormat>;
  using Row = ClusterRow<Tile, kHeadDim>;
  constexpr int kWarps = kAttentionThreads / 32, kQuads = kHeadDim / 4;
  static_assert(Tile::kStages == 2 && Tile::kSteps <= kWarps && kHeadDim % 64 == 0);
  extern __shared__ __align__(128) uint8_t kv[];
  __shared__ __align__(16) Row own;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = threadIdx.x % 32;
  const int ctas = cluster_size(), rank = cluster_rank();
  const AttentionPrepareArgs& args = a.prepare;
  const uint32_t kv_at = smem_address(kv), full = smem_address(own.full),
                 sent = smem_address(&own.sent);

  // Shifts, and divisions only where there is something to divide: the first loads wait for this.
  const int shift = 31 - __clz(ctas), mask = ctas - 1;  // ctas: 8 or 16
  const int columns = static_cast<int>(a.cache.kv_heads) * a.parts, unit = cluster_index();
  const int row = unit < columns ? 0 : unit / columns, column = unit - row * columns;
  const int kv_head = a.parts == 1 ? column : column / a.parts, part = column - kv_head * a.parts;
  const int first_head = kv_head * a.group + part * kRowHeads;
  const int heads = min(kRowHeads, a.group - part * kRowHeads);
  // Two clusters may share their SMs: their CTAs with one block more must not meet there.
  const int deal = (rank + unit * (ctas / 4)) & mask;    // the CTA's first block
  const int own_heads = (heads - rank + mask) >> shift;  // that this CTA folds
  KvCache cache = a.cache;
  cache.head_dim = kHeadDim;  // known here
  cache.format = kFormat;
  const auto count_blocks = [&](int position) {
    return position < 0 ? 0 : min(position / kKvPageTokens + 1, a.splits);
  };
  const auto table = [&](int sequence) {
    return a.step.page_table + static_cast<int64_t>(sequence) * a.step.table_stride;
  };
  // K or V of the CTA's block of turn `turn`: the positions before the row's own.
  const auto copy = [&](int turn, int plane, int position, int page) {
    const int rows = min(position - (deal + turn * ctas) * kKvPageTokens, kKvPageTokens);
    const uint32_t bytes = static_cast<uint32_t>(rows * Tile::kRow);
    const uint32_t bar = full + static_cast<uint32_t>(turn % 2 * 8);
    if (plane == 0) mbarrier_arrive_expect(bar, 2 * bytes);
    if (bytes == 0) return;
    bulk_load(kv_at + static_cast<uint32_t>((turn % 2 * 2 + plane) * Tile::kPlane),
              cache.data + cache.head_offset(a.layer, page, kv_head) + plane * Tile::kPlane, bytes,
              bar);
  };

  // Before the kernel before has ended: the copies, and the constants of the warp's first head.
  HeadValues<kHeadDim> head;
  int newest_page = 0;  // the copy warp's
  float inv_freq[kHeadDim / 64];
  const auto load_weight = [&](int task) {
    if (task <= heads) head.load_weight(task < heads ? args.q_norm : args.k_norm, lane);
  };
  // A CTA has arrived when it has started and its barriers are there: results may be sent to it.
  if (warp != kCopyWarp && !kRacecheck) cluster_arrive_relaxed();
  if (warp < kPrepareWarps) {
    load_weight(warp);
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i) {
      const int pair = lane + 32 * i;
      inv_freq[i] = pair < args.rotary_dim / 2 ? args.inv_freq[pair] : 0.0f;
    }
  } else if (warp == kCopyWarp) {
    const int turn = lane / 2, block = deal + turn * ctas;
    const int guess = min(row, a.step.sequences - 1);  // right for a step of decode rows alone
    const int position = a.step.positions[row], sequence = a.step.row_sequence[row];
    int page = table(guess)[min(block, a.step.table_stride - 1)];
    if (lane == 0) {
      mbarrier_init(full, 1);
      mbarrier_init(full + 8, 1);
      mbarrier_init(sent, 1);
      mbarrier_init_fence();
    }
    __syncwarp();
    if (!kRacecheck) cluster_arrive_relaxed();
    const int blocks = count_blocks(position);
    if (turn < 2 && block < blocks) {
      if (sequence != guess) page = table(sequence)[block];
      copy(turn, lane % 2, position, page);
    }
    if (blocks > 0) newest_page = table(sequence)[position / kKvPageTokens];
    if (lane == 0 && own_heads > 0) {
      mbarrier_arrive_expect(
          sent, static_cast<uint32_t>(cluster_fold_bytes(blocks, own_heads, kHeadDim)));
    }
    __syncwarp();
  }
  if (kRacecheck) {  // it does not end where warps come to this barrier in several places
    cluster_arrive();
    cluster_wait();
  }
  wait_for_previous_kernel();
  // Not sooner: the next product's weights would come between this kernel and its q, k and v.
  allow_next_kernel();

  const auto load_head = [&](int task) {
    const int source = task < heads    ? first_head + task
                       : task == heads ? a.heads + kv_head
                                       : a.heads + kv_head + static_cast<int>(a.cache.kv_heads);
    head.load(args.qkv + row * args.row_stride + source * kHeadDim, lane);
  };
  if (warp < min(kPrepareWarps, heads + 2)) load_head(warp);
  const int position = a.step.positions[row], sequence = a.step.row_sequence[row];
  const int64_t first_out = (static_cast<int64_t>(row) * a.heads + first_head) * kHeadDim;
  if (position < 0) {
    for (int i = threadIdx.x; rank == 0 && i < heads * kHeadDim; i += kClusterThreads) {
      a.out[first_out + i] = 0;
    }
    return;
  }
  const int newest = position / kKvPageTokens, blocks = count_blocks(position);
  const int at = position % kKvPageTokens;
  const bool with_kv = (newest & mask) == deal;
  const int tasks = deal < blocks && warp < kPrepareWarps ? heads + (with_kv ? 2 : 0) : 0;
  if (warp < tasks) {
    float2 angles[kHeadDim / 64];
#pragma unroll
    for (int i = 0; i < kHeadDim / 64; ++i) angles[i] = rope_angle(args, position, inv_freq[i]);
    for (int task = warp;;) {
      float* x = own.heads[warp];
      const bool value = task > heads;
      if (!value && (task < heads ? args.q_norm : args.k_norm) != nullptr) head.norm(args.norm_eps);
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; ++i) x[lane + 32 * i] = head.x[i];
      __syncwarp();
      if (!value) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 64; ++i) {
          if (lane + 32 * i < args.rotary_dim / 2) rotate_pair(args, x, lane + 32 * i, angles[i]);
        }
        __syncwarp();
      }
#pragma unroll
      for (int d = 2 * lane; d < kHeadDim; d += 64) {
        const float2 v = *reinterpret_cast<const float2*>(x + d);
        if (task < heads) {
          store_bf16_pair(&own.q[task][d], v.x, v.y);
        } else {
          write_page_pair(cache, own.kv[value] - at * Tile::kRow, at, d, v.x, v.y);
        }
      }
      task += kPrepareWarps;
      if (task >= tasks) break;
      load_weight(task);
      load_head(task);
      __syncwarp();
    }
  }
  __syncthreads();

  // The row's K and V to their page, by the warp that found it long ago.
  if (warp == kCopyWarp && with_kv && part == 0 && lane < 2 * Tile::kUnits) {
    const int plane = lane / Tile::kUnits, at_unit = lane % Tile::kUnits;
    std::byte* to = cache.data + cache.head_offset(a.layer, newest_page, kv_head) +
                    plane * Tile::kPlane + at * Tile::kRow;
    reinterpret_cast<uint4*>(to)[at_unit] = reinterpret_cast<const uint4*>(own.kv[plane])[at_unit];
  }

  const int slots = (heads + mask) >> shift;  // heads that a CTA folds, at most
  const uint32_t sums_from = Tile::kSmem + static_cast<uint32_t>(blocks * slots * kHeadDim * 4);
  const int half = warp / kWarps, in_half = warp % kWarps, thread = in_half * 32 + lane;
  const int g = lane / 4, t = lane % 4;
  const auto sync = [&] { named_barrier(1 + half, kAttentionThreads); };
  for (int turn = half; deal + turn * ctas < blocks; turn += 2) {
    const int block = deal + turn * ctas, next = block + 2 * ctas;
    const int next_page = next < blocks ? table(sequence)[next] : 0;
    const int stage = half * 2 * Tile::kPlane;
    const uint32_t k = kv_at + static_cast<uint32_t>(stage);
    if (block == newest) {
      add_own_row<Tile>(own.kv, position, kv + stage, thread);
      // The positions after it: a weight of 0 times a NaN would be one. K's scores are masked.
      auto* values = reinterpret_cast<uint4*>(kv + stage + Tile::kPlane);
      for (int i = (at + 1) * Tile::kUnits + thread; i < kKvPageTokens * Tile::kUnits;
           i += kAttentionThreads) {
        values[i] = make_uint4(0, 0, 0, 0);
      }
      sync();
    }
    uint32_t q[Tile::kSteps][4];
    const auto load_q = [&] {  // rows after `heads` hold anything, and nobody asks for theirs
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
        load_query_step<Tile>(own.q[g], s, lane, q[s][0], q[s][2]);
        q[s][1] = q[s][3] = 0;
      }
      if (heads <= 8) return;
#pragma unroll
      for (int s = 0; s < Tile::kSteps; ++s) {
        load_query_step<Tile>(own.q[g + 8], s, lane, q[s][1], q[s][3]);
      }
    };
    if constexpr (!Tile::kFp8) load_q();  // FP8 has no registers to hold all of q by then
    mbarrier_wait(full + static_cast<uint32_t>(half * 8), turn / 2 & 1);
    if constexpr (Tile::kFp8) load_q();
    BlockWeights b;
    block_weights<Tile>(q, k, position - block * kKvPageTokens, a.factor, in_half, lane,
                        own.exchange[half], b, sync);
    float o[2][4];
    if (in_half < Tile::kSteps) block_values<Tile>(b.p, k + Tile::kPlane, in_half, lane, o);
    if (turn == half && !kRacecheck) cluster_wait();
    if (in_half < Tile::kSteps) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int to = g + 8 * h;
        if (to >= heads) continue;
        const int slot = block * slots + (to >> shift);
        const uint32_t base = cluster_address(kv_at, to & mask);
        float v[4];
        int n = 0;
        for_values<Tile>(o, in_half, lane, h, [&](int, float x, float y) {
          v[n++] = x;
          v[n++] = y;
        });
        const int quad = slot * kQuads + 4 * in_half + t;
        const uint32_t bar = base + (sent - kv_at);
        cluster_store_async(base + Tile::kSmem + static_cast<uint32_t>(quad) * 16,
                            make_float4(v[0], v[1], v[2], v[3]), bar);
        if (in_half == 0 && t == 0) {
          cluster_store_async(base + sums_from + static_cast<uint32_t>(slot) * 8,
                              make_float2(b.peak[h], b.sum[2 * h]), bar);
        }
      }
    }
    if (next < blocks) {
      sync();  // the stage is free
      if (in_half == 0 && lane < 2) copy(turn + 2, lane, position, next_page);
    }
  }

  // Nothing is sent to a CTA that folds nothing, and the others stay until all of theirs is there.
  constexpr int kFoldWarps = kQuads / 4;  // of a head
  const auto* values = reinterpret_cast<const float4*>(kv + Tile::kSmem);
  const auto* sums = reinterpret_cast<const float2*>(kv + sums_from);
  for (int item = warp; item < own_heads * kFoldWarps; item += kClusterThreads / 32) {
    const int slot = item / kFoldWarps, quad = item % kFoldWarps * 4 + t;
    mbarrier_wait(sent, 0);
    float sum;
    const float4 total = fold_groups(
        blocks, lane, [&](int i) { return sums[i * slots + slot]; },
        [&](int i) { return values[(i * slots + slot) * kQuads + quad]; }, sum);
    if (lane >= 4) continue;
    uint16_t* out = a.out + first_out + (rank + slot * ctas) * kHeadDim;
    const float inverse = __fdiv_rn(1.0f, sum);
    store_bf16_pair(out + value_dim<Tile>(quad, 0), finish_value(total.x, inverse),
                    finish_value(total.y, inverse));
    store_bf16_pair(out + value_dim<Tile>(quad, 1), finish_value(total.z, inverse),
                    finish_value(total.w, inverse));
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
  // Where all have a processor for each CTA at once: clusters stay within parts of the GPU, so
  // that counting processors is not enough.
  const auto alone = attention_cluster_kernel<kHeadDim, kFormat, true>;
  const bool all_alone = blocks <= launch.processors &&
                         active_clusters(alone, launch.ctas, kClusterThreads,
                                         static_cast<size_t>(smem)) >= blocks / launch.ctas;
  const auto kernel = all_alone ? alone : attention_cluster_kernel<kHeadDim, kFormat, false>;
  return launch_overlapped_clusters(kernel, blocks, launch.ctas, kClusterThreads,
                                    static_cast<size_t>(smem), stream, launch);
}

}  // namespace nibble::kernels::cuda
