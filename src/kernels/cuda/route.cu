#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/route.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSortThreads = 1024;
constexpr int kMaxExperts = 1024;
// Up to this many slots every CTA counts all of them by itself, which saves a kernel: at one token
// a layer is bound by launches. Beyond it one CTA sorts and the others gather.
constexpr int kFusedSlots = 4096;

struct RouteArgs {
  MoeWorkspace work;
  const uint8_t* x;
  const int32_t* ids;   // null: all slots belong to expert 0
  const int32_t* rank;  // null: experts keep their numbers
  int slots, top_k, experts, tile_tokens;
  int64_t hidden;
  int threads_per_slot;  // 32 or kThreads
  int groups;
  int group_begin[kMaxGroups + 1];  // first expert (by rank) of each group
};

/// The expert of a slot, by rank.
__device__ int expert_of(const RouteArgs& args, int slot) {
  if (args.ids == nullptr) return 0;
  const int id = args.ids[slot];
  return args.rank == nullptr ? id : args.rank[id];
}

__device__ int tiles_of(int rows, int tile_tokens) {
  return (rows + tile_tokens - 1) / tile_tokens;
}

/// Exclusive prefix sums over the experts, in place: count[e] -> first sorted row, and tile_begin.
/// Low 32 bits of the scanned value are rows, high bits tiles. Returns the number of tiles.
template <int threads>
__device__ int scan_experts(const RouteArgs& args, const int* count, int* row_begin,
                            int* tile_begin) {
  __shared__ unsigned long long warp_sum[threads / 32];
  const int tid = static_cast<int>(threadIdx.x);
  const int per_thread = (args.experts + threads - 1) / threads;
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
  if (tid % 32 == 31) warp_sum[tid / 32] = sum;
  __syncthreads();
  unsigned long long before = sum - mine, total = 0;
  for (int w = 0; w < threads / 32; ++w) {
    if (w < tid / 32) before += warp_sum[w];
    total += warp_sum[w];
  }
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
    int value = 0;
    if (i <= args.groups) {
      value = args.group_begin[i] < args.experts ? tile_begin[args.group_begin[i]] : tile_count;
    }
    args.work.counters[i] = value;
  }
}

/// Copies token row of `slot` to sorted row `row`, in the products' column order; lane `i` of `n`.
__device__ void gather_row(const RouteArgs& args, int slot, int row, int i, int n) {
  const uint8_t* source = args.x + static_cast<int64_t>(slot / args.top_k) * args.hidden * 2;
  const int units = static_cast<int>(chunks(args.hidden)) * 8;
#pragma unroll 4
  for (int u = i; u < units; u += n) {
    const int64_t chunk = u / 8;
    uint32_t pair[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int64_t column = chunk * kTileCols + slot_column(u % 8 * 8 + 2 * t);
      pair[t] = column < args.hidden ? *reinterpret_cast<const uint32_t*>(source + column * 2) : 0;
    }
    *reinterpret_cast<uint4*>(args.work.x + chunk_offset(args.work.capacity, chunk, row, u % 8)) =
        make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

/// Few slots: every CTA counts all of them, then places and gathers its own.
__global__ void __launch_bounds__(kThreads) route_fused_kernel(const RouteArgs args) {
  __shared__ int count[kMaxExperts], row_begin[kMaxExperts], tile_begin[kMaxExperts];
  __shared__ int16_t ids[kFusedSlots];
  const int tid = static_cast<int>(threadIdx.x);
  for (int e = tid; e < args.experts; e += kThreads) count[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  for (int i = tid; i < args.slots; i += kThreads) {
    const int e = expert_of(args, i);
    ids[i] = static_cast<int16_t>(e);
    atomicAdd(&count[e], 1);
  }
  __syncthreads();
  const int tile_count = scan_experts<kThreads>(args, count, row_begin, tile_begin);
  if (blockIdx.x == 0) write_tiles(args, count, row_begin, tile_begin, tile_count);

  const int n = args.threads_per_slot, groups = kThreads / n, lane = tid % 32;
  for (int slot = static_cast<int>(blockIdx.x) * groups + tid / n; slot < args.slots;
       slot += static_cast<int>(gridDim.x) * groups) {
    const int e = ids[slot];
    int before = args.ids == nullptr ? slot : 0;  // slots of the same expert that come first
    for (int i = args.ids == nullptr ? slot : 0; i < slot; i += 32) {
      before += __popc(__ballot_sync(~0u, i + lane < slot && ids[i + lane] == e));
    }
    const int row = row_begin[e] + before;
    if (tid % n == 0) args.work.slot_of_row[row] = slot;
    gather_row(args, slot, row, tid % n, n);
  }
}

/// Many slots, one CTA: counts, scans and places. The order of an expert's rows is whatever the
/// atomics give; no row's result depends on it.
__global__ void __launch_bounds__(kSortThreads) route_sort_kernel(const RouteArgs args) {
  __shared__ int count[kMaxExperts], row_begin[kMaxExperts], tile_begin[kMaxExperts];
  const int tid = static_cast<int>(threadIdx.x);
  for (int e = tid; e < args.experts; e += kSortThreads) count[e] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  allow_next_kernel();
  for (int i = tid; i < args.slots; i += kSortThreads) atomicAdd(&count[expert_of(args, i)], 1);
  __syncthreads();
  const int tile_count = scan_experts<kSortThreads>(args, count, row_begin, tile_begin);
  write_tiles(args, count, row_begin, tile_begin, tile_count);
  __syncthreads();
  for (int i = tid; i < args.slots; i += kSortThreads) {
    const int row = args.ids == nullptr ? i : atomicAdd(&row_begin[expert_of(args, i)], 1);
    args.work.row_of_slot[i] = row;
    args.work.slot_of_row[row] = i;
  }
}

__global__ void __launch_bounds__(kThreads) route_gather_kernel(const RouteArgs args) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int slot =
      static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (slot >= args.slots) return;
  gather_row(args, slot, args.work.row_of_slot[slot], static_cast<int>(threadIdx.x) % 32, 32);
}

/// One thread sums eight columns of one token.
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const uint16_t* shares, const float4* add, float4* y, int64_t octets,
                  int64_t row_octets, int top_k) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x);
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
                         const MoeWorkspace& work, int tile_tokens, cudaStream_t stream) {
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
  route.slots = static_cast<int>(args.tokens * shape.top_k);
  route.top_k = static_cast<int>(shape.top_k);
  route.experts = static_cast<int>(shape.experts);
  route.tile_tokens = tile_tokens;
  route.hidden = shape.hidden;
  if (route.slots <= kFusedSlots) {
    route.threads_per_slot = route.slots <= 512 ? kThreads : 32;
    const int groups = kThreads / route.threads_per_slot;
    const int grid = std::min((route.slots + groups - 1) / groups, 512);
    return launch_overlapped(route_fused_kernel, grid, kThreads, 0, stream, route);
  }
  const cudaError_t error = launch_overlapped(route_sort_kernel, 1, kSortThreads, 0, stream, route);
  if (error != cudaSuccess) return error;
  constexpr int kSlots = kThreads / 32;
  return launch_overlapped(route_gather_kernel, (route.slots + kSlots - 1) / kSlots, kThreads, 0,
                           stream, route);
}

cudaError_t launch_reduce(const MoeShape& shape, const MoeArgs& args, const MoeWorkspace& work,
                          cudaStream_t stream) {
  const int64_t row_octets = shape.hidden / 8, octets = args.tokens * row_octets;
  const int grid = static_cast<int>((octets + kThreads - 1) / kThreads);
  return launch_overlapped(reduce_kernel, grid, kThreads, 0, stream, work.shares,
                           reinterpret_cast<const float4*>(args.add),
                           reinterpret_cast<float4*>(args.y), octets, row_octets,
                           static_cast<int>(shape.top_k));
}

}  // namespace nibble::kernels::cuda
