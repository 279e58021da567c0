#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/deal_columns.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/route.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 512, kReduceThreads = 256;
constexpr int kMaxExperts = 1024;
constexpr int kMaxDealers = 256;  // CTAs that deal columns
// Above so many slots they are sorted by a cluster.
constexpr int kSortAlone = 4096, kSortCluster = 8;

struct RouteArgs {
  MoeWorkspace work;
  const uint8_t* x;
  const int32_t* ids;   // null: all slots belong to expert 0
  const int32_t* rank;  // null: experts keep their numbers
  int tokens, slots, top_k, experts, tile_tokens, hidden;
  int row_units;  // 16-byte units of a token's activations
  int sorters;    // CTAs that sort
  int groups;
  int group_begin[kMaxGroups + 1];  // first expert (by rank) of each group
};

__device__ int tiles_of(int rows, int tile_tokens) {
  return (rows + tile_tokens - 1) / tile_tokens;
}

/// Exclusive prefix sums over the experts, in place: count[e] -> first sorted row, and tile_begin.
/// Low 32 bits of the scanned value are rows, high bits tiles. Returns the number of tiles.
__device__ int scan_experts(const RouteArgs& args, const int* count, int* row_begin,
                            int* tile_begin) {
  __shared__ unsigned long long warp_sum[kThreads / 32];
  const int tid = static_cast<int>(threadIdx.x);
  const int per_thread = (args.experts + kThreads - 1) / kThreads;
  const int first = tid * per_thread, last = min(args.experts, first + per_thread);
  unsigned long long mine = 0;
  for (int e = first; e < last; ++e) {
    mine += static_cast<unsigned>((count[e] + 7) & ~7);
    mine += static_cast<unsigned long long>(tiles_of(count[e], args.tile_tokens)) << 32;
  }
  unsigned long long sum = mine;
  for (int d = 1; d < 32; d *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, sum, d);
    if (tid % 32 >= d) sum += other;
  }
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32);
  if (tid % 32 == 31) warp_sum[tid / 32] = sum;
  __syncthreads();
  unsigned long long all = tid % 32 < kWarps ? warp_sum[tid % 32] : 0;  // of warps up to the lane's
  for (int d = 1; d < 32; d *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, all, d);
    if (tid % 32 >= d) all += other;
  }
  const unsigned long long total = __shfl_sync(~0u, all, 31);
  const unsigned long long up_to_mine = __shfl_sync(~0u, all, tid / 32);
  unsigned long long before = up_to_mine - warp_sum[tid / 32] + sum - mine;
  for (int e = first; e < last; ++e) {
    row_begin[e] = static_cast<int>(before & 0xFFFFFFFFu);
    tile_begin[e] = static_cast<int>(before >> 32);
    before += static_cast<unsigned>((count[e] + 7) & ~7);
    before += static_cast<unsigned long long>(tiles_of(count[e], args.tile_tokens)) << 32;
  }
  __syncthreads();
  return static_cast<int>(total >> 32);
}

/// Writes the tile list and clears the counters that the products use. One CTA.
__device__ void write_tiles(const RouteArgs& args, const int* count, const int* row_begin,
                            const int* tile_begin, int tile_count) {
  for (int e = static_cast<int>(threadIdx.x); e < args.experts; e += static_cast<int>(blockDim.x)) {
    const int tiles = tiles_of(count[e], args.tile_tokens);
    if (tiles == 0) continue;
    const int size = ((count[e] + tiles - 1) / tiles + 7) & ~7;
    int group = 0;
    while (e >= args.group_begin[group + 1]) ++group;
    const int number = e - args.group_begin[group];
    for (int i = 0; i < tiles; ++i) {
      const int rows = min(size, count[e] - i * size);
      args.work.tiles[tile_begin[e] + i] = TokenTile{number, row_begin[e] + i * size, rows, 0};
      args.work.done[tile_begin[e] + i] = 0;
    }
  }
  if (threadIdx.x < kCounters) {
    const int i = static_cast<int>(threadIdx.x);
    int value = 0;  // kNextItem: of those behind each CTA's first
    if (i <= args.groups) {
      value = args.group_begin[i] < args.experts ? tile_begin[args.group_begin[i]] : tile_count;
    }
    args.work.counters[i] = value;
  }
}

/// The experts, by rank, of four neighbouring slots.
__device__ int4 experts_of(const RouteArgs& args, int slot) {
  int4 ids = make_int4(0, 0, 0, 0);
  if (args.ids == nullptr || slot >= args.slots) return ids;
  if (slot + 4 <= args.slots) {
    ids = __ldcg(reinterpret_cast<const int4*>(args.ids + slot));
  } else {
    ids.x = args.ids[slot];
    if (slot + 1 < args.slots) ids.y = args.ids[slot + 1];
    if (slot + 2 < args.slots) ids.z = args.ids[slot + 2];
  }
  if (args.rank == nullptr) return ids;
  return make_int4(args.rank[ids.x], args.rank[ids.y], args.rank[ids.z], args.rank[ids.w]);
}

/// The first of a thread's slots.
__device__ int first_slot() { return 4 * static_cast<int>(blockIdx.x * kThreads + threadIdx.x); }
/// use(slot, expert) for every slot of the CTA; `first` are the experts of the thread's first four.
/// Little code: it runs once a launch, cold.
template <typename Use>
__device__ void for_each_slot(const RouteArgs& args, int4 first, const Use& use) {
  const int step = 4 * kThreads * args.sorters;
#pragma unroll 1
  for (int slot = first_slot(); slot < args.slots; slot += step) {
    const int4 next = experts_of(args, slot + step);
    const int expert[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (slot + i < args.slots) use(slot + i, expert[i]);
    }
    first = next;
  }
}

/// Counts, scans and places. The order of an expert's rows is whatever the atomics give; no row's
/// result depends on it. By `sorters` CTAs, a cluster: each counts and places slots of its own.
__device__ void place_slots(const RouteArgs& args) {
  __shared__ int count[kMaxExperts], row_begin[kMaxExperts], tile_begin[kMaxExperts];
  __shared__ int all_count[kMaxExperts], count_before[kMaxExperts];  // of the cluster's CTAs
  const int tid = static_cast<int>(threadIdx.x);
  for (int e = tid; e < args.experts; e += kThreads) count[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  const int4 first = experts_of(args, first_slot());
  if (args.ids != nullptr) {
    for_each_slot(args, first, [&](int, int e) { atomicAdd(&count[e], 1); });
  } else if (blockIdx.x == 0 && tid == 0) {
    count[0] = args.slots;
  }
  __syncthreads();
  const int* total = count;
#if defined(NIBBLE_HAS_BULK_COPY)
  if (args.sorters > 1) {
    cluster_arrive();
    cluster_wait();
    for (int e = tid; e < args.experts; e += kThreads) {
      int sum = 0, before = 0;
      for (int r = 0; r < args.sorters; ++r) {
        if (r == cluster_rank()) before = sum;
        sum += cluster_load(cluster_address(smem_address(count + e), r));
      }
      all_count[e] = sum;
      count_before[e] = before;
    }
    __syncthreads();
    cluster_arrive();  // the others' counts are read
    total = all_count;
  }
#endif
  const int tile_count = scan_experts(args, total, row_begin, tile_begin);
  if (blockIdx.x == 0) write_tiles(args, total, row_begin, tile_begin, tile_count);
  __syncthreads();
  if (args.sorters > 1) {
    for (int e = tid; e < args.experts; e += kThreads) row_begin[e] += count_before[e];
    __syncthreads();
  }
  for_each_slot(args, first, [&](int slot, int e) {
    const int row = args.ids == nullptr ? slot : atomicAdd(&row_begin[e], 1);
    args.work.slot_of_row[row] = slot;
    args.work.row_of_slot[slot] = row;
    args.work.unit_of_row[row] = slot / args.top_k * args.row_units;
  });
#if defined(NIBBLE_HAS_BULK_COPY)
  if (args.sorters > 1) cluster_wait();
#endif
}

/// Unit `at` of token `token`.
__device__ __forceinline__ uint4 token_unit(const RouteArgs& args, uint32_t token, uint32_t at) {
  return dealt_unit(args.x + int64_t{2} * token * args.hidden, args.hidden, at);
}

/// x to work.x, row by row.
__device__ void deal_columns(const RouteArgs& args) {
  constexpr int kEach = 4;
  wait_for_previous_kernel();
  const auto row_units = static_cast<uint32_t>(args.row_units);
  const uint32_t total = static_cast<uint32_t>(args.tokens) * row_units;
  const uint32_t all = (gridDim.x - 1) * kThreads;
  for (uint32_t base = (blockIdx.x - 1) * kThreads + threadIdx.x; base < total;
       base += kEach * all) {
    uint4 v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t unit = base + static_cast<uint32_t>(i) * all, row = unit / row_units;
      if (unit < total) v[i] = token_unit(args, row, unit - row * row_units);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t unit = base + static_cast<uint32_t>(i) * all;
      if (unit < total) reinterpret_cast<uint4*>(args.work.x)[unit] = v[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads) route_kernel(const __grid_constant__ RouteArgs args) {
  allow_next_kernel();
  if (blockIdx.x < static_cast<unsigned>(args.sorters)) {
    place_slots(args);
  } else {
    deal_columns(args);
  }
}

/// x to work.x, sorted: a warp reads kUnits of a token's units a lane, and writes them for each of
/// its slots.
constexpr int kGatherThreads = 256, kUnits = 4;
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ RouteArgs args) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pieces = (args.row_units + 32 * kUnits - 1) / (32 * kUnits);
  const int warp =
      static_cast<int>(blockIdx.x) * (kGatherThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int token = warp / pieces;
  if (token >= args.tokens) return;
  const int first = (warp - token * pieces) * 32 * kUnits + lane;
  const int64_t chunk_bytes = args.work.capacity * kRowBytes;
  uint4 v[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int at = first + 32 * i;
    if (at < args.row_units) v[i] = token_unit(args, token, at);
  }
  uint8_t* to = args.work.x + first / 8 * chunk_bytes;
  const int* rows = args.work.row_of_slot + token * args.top_k;
#pragma unroll 2
  for (int k = 0; k < args.top_k; ++k) {
    const int row = rows[k];
    uint8_t* place = to + int64_t{row} * kRowBytes + 16 * (first % 8 ^ row % 8);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (first + 32 * i < args.row_units) {
        *reinterpret_cast<uint4*>(place + 4 * i * chunk_bytes) = v[i];
      }
    }
  }
}

/// One thread sums eight columns of one token.
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const uint16_t* shares, const float4* add, float4* y, int64_t octets,
                  int64_t row_octets, int top_k) {
  const int64_t i =
      static_cast<int64_t>(blockIdx.x) * kReduceThreads + static_cast<int64_t>(threadIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (i >= octets) return;
  const int64_t token = i / row_octets, at = i % row_octets;
  const uint4* share = reinterpret_cast<const uint4*>(shares) + token * top_k * row_octets + at;
  float sum[8];
  auto each = [&](const uint4& v, auto use) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      use(sum[2 * w], __uint_as_float(words[w] << 16));
      use(sum[2 * w + 1], __uint_as_float(words[w] & 0xFFFF0000u));
    }
  };
  each(__ldcs(share), [](float& to, float v) { to = v; });
#pragma unroll 4
  for (int k = 1; k < top_k; ++k) {
    each(__ldcs(share + k * row_octets), [](float& to, float v) { to = __fadd_rn(to, v); });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* s = sum + 4 * half;
    float4 v = make_float4(s[0], s[1], s[2], s[3]);
    if (add != nullptr) {
      const float4 more = add[2 * i + half];
      v = make_float4(__fadd_rn(v.x, more.x), __fadd_rn(v.y, more.y), __fadd_rn(v.z, more.z),
                      __fadd_rn(v.w, more.w));
    }
    y[2 * i + half] = v;
  }
}

}  // namespace

cudaError_t launch_route(const MoeShape& shape, const MoeGroups& weights, const MoeArgs& args,
                         const MoeWorkspace& work, int tile_tokens, bool sorted_x,
                         cudaStream_t stream) {
  RouteArgs route = {};
  route.work = work;
  route.x = static_cast<const uint8_t*>(args.x);
  route.ids = args.ids;
  route.rank = weights.rank;
  route.groups = static_cast<int>(weights.groups.size());
  for (int g = 0; g < route.groups; ++g) {
    route.group_begin[g + 1] =
        route.group_begin[g] + static_cast<int>(weights.groups[static_cast<size_t>(g)].experts);
  }
  route.tokens = static_cast<int>(args.tokens);
  route.slots = static_cast<int>(args.tokens * shape.top_k);
  route.top_k = static_cast<int>(shape.top_k);
  route.experts = static_cast<int>(shape.experts);
  route.tile_tokens = tile_tokens;
  route.hidden = static_cast<int>(shape.hidden);
  route.row_units = static_cast<int>(chunks(shape.hidden)) * 8;
  if (!sorted_x) {
    const int64_t units = args.tokens * route.row_units;
    const int dealers =
        static_cast<int>(std::min<int64_t>((units + kThreads - 1) / kThreads, kMaxDealers));
    route.sorters = 1;
    return launch_overlapped(route_kernel, 1 + dealers, kThreads, 0, stream, route);
  }
  route.sorters = route.slots > kSortAlone ? kSortCluster : 1;
  const cudaError_t e = launch_overlapped_clusters(route_kernel, route.sorters, route.sorters,
                                                   kThreads, 0, stream, route);
  if (e != cudaSuccess) return e;
  constexpr int64_t kWarps = kGatherThreads / 32;
  const int64_t warps = args.tokens * ((route.row_units + 32 * kUnits - 1) / (32 * kUnits));
  return launch_overlapped(gather_kernel, static_cast<int>((warps + kWarps - 1) / kWarps),
                           kGatherThreads, 0, stream, route);
}

cudaError_t launch_reduce(const MoeShape& shape, const MoeArgs& args, const MoeWorkspace& work,
                          cudaStream_t stream) {
  const int64_t row_octets = shape.hidden / 8, octets = args.tokens * row_octets;
  const int grid = static_cast<int>((octets + kReduceThreads - 1) / kReduceThreads);
  return launch_overlapped(reduce_kernel, grid, kReduceThreads, 0, stream, work.shares,
                           reinterpret_cast<const float4*>(args.add),
                           reinterpret_cast<float4*>(args.y), octets, row_octets,
                           static_cast<int>(shape.top_k));
}

}  // namespace nibble::kernels::cuda
