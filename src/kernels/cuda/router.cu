#include <algorithm>
#include <atomic>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm_route.cuh"
#include "kernels/cuda/router.h"
#include "kernels/cuda/router_choice.cuh"
#include "kernels/cuda/router_dot.cuh"

namespace nibble::kernels::cuda {
namespace {

// Up to this many rows a cluster of CTAs takes one row each; the weights come again from the L2.
constexpr int kClusterRows = 16;

struct RouterArgs {
  const uint8_t* matrix;
  const float* bias;
  const float* x;
  int64_t x_stride;
  float* logits;  // [rows, experts]
  int* counters;  // [row tiles], zero between calls
  int32_t* ids;
  float* weights;
  int rows, hidden;
  bool keep_logits;  // the caller wants them
  ChoiceParams choice;
};

/// A CTA: `tiles` tiles of `rows` rows x `experts` experts, side by side along the experts, each by
/// four warps that take a quarter of the columns each. `ahead` steps of weights are loaded before
/// the previous kernel's end is waited for. `cluster` > 1: that many CTAs share one row.
template <bool bf16, int rows, int experts, int tiles, int ahead, int cluster>
struct RouterGeometry {
  static constexpr bool kBf16 = bf16;
  static constexpr int kRows = rows, kExperts = experts, kAhead = ahead;
  static constexpr int kCluster = cluster;
  static constexpr int kWarps = tiles * kQuarters;
  static constexpr int kCtaExperts = experts * tiles;
  static constexpr int kValues = rows * experts;
  static constexpr int kPartFloats = tiles * kQuarters * kValues * 32;
};

/// Sums every value over the lanes, halves of the values at a time: afterwards v[0 .. max(n / 32,
/// 1)) are sums; returns the index of v[0]. Same additions as a butterfly over 16, 8, 4, 2, 1.
template <int n>
__device__ __forceinline__ int sum_over_lanes(float (&v)[n], int lane) {
  int index = 0, count = n;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    if (count > 1) {
      const int half = count / 2;
      const bool upper = (lane & d) != 0;
#pragma unroll
      for (int i = 0; i < n / 2; ++i) {
        if (i >= half) break;
        const float sent = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
        v[i] = kept + __shfl_xor_sync(~0u, sent, d);
      }
      if (upper) index += half;
      count = half;
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], d);
    }
  }
  return index;
}

extern __shared__ __align__(16) float router_smem[];

/// One tile's quarter sums, 32 lanes' each, to shared memory: parts[tile][quarter][value][lane].
template <typename G>
__device__ __forceinline__ void sum_quarter(const RouterArgs& args, int first_row, int first_expert,
                                            int quarter,
                                            RawWeights<G::kBf16> (&raw)[G::kAhead][G::kExperts],
                                            bool loaded, float* parts, int lane) {
  constexpr int kElement = G::kBf16 ? 2 : 4;
  const int steps = (args.hidden + kStepColumns - 1) / kStepColumns;
  const int per_quarter = (steps + kQuarters - 1) / kQuarters;
  const int end = min(args.hidden, (quarter + 1) * per_quarter * kStepColumns);
  const float* x_base = args.x + min(first_row, args.rows - 1) * args.x_stride;
  float acc[G::kValues];
#pragma unroll
  for (int i = 0; i < G::kValues; ++i) acc[i] = 0.0f;
#pragma unroll 1
  for (int base = quarter * per_quarter * kStepColumns; base < end;
       base += G::kAhead * kStepColumns) {
#pragma unroll
    for (int s = 0; s < G::kAhead; ++s) {
      const int column = base + s * kStepColumns + 4 * lane;
      if (column >= end || loaded) continue;
#pragma unroll
      for (int e = 0; e < G::kExperts; ++e) {
        raw[s][e].load(
            args.matrix + static_cast<int64_t>(min(first_expert + e, args.choice.experts - 1)) *
                              args.hidden * kElement,
            column);
      }
    }
    loaded = false;
#pragma unroll
    for (int s = 0; s < G::kAhead; ++s) {
      const int column = base + s * kStepColumns + 4 * lane;
      if (column >= end) continue;
      float4 w[G::kExperts];
#pragma unroll
      for (int e = 0; e < G::kExperts; ++e) w[e] = raw[s][e].value();
#pragma unroll
      for (int r = 0; r < G::kRows; ++r) {
        // Past the end the last row is taken again: its logits are not written.
        const int row = max(min(r, args.rows - 1 - first_row), 0);
        const float4 v = *reinterpret_cast<const float4*>(
            x_base + row * static_cast<int>(args.x_stride) + column);
#pragma unroll
        for (int e = 0; e < G::kExperts; ++e) {
          acc[r * G::kExperts + e] = dot4(w[e], v, acc[r * G::kExperts + e]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < G::kValues; ++i) {
    parts[(quarter * G::kValues + i) * 32 + lane] = acc[i];
  }
}

/// A quarter of a tile's values: quarters added in order per lane, then the lanes as a fixed tree.
template <typename G, typename Store>
__device__ __forceinline__ void sum_values(const float* parts, int quarter, int lane, Store store) {
  constexpr int kMine = G::kValues / kQuarters;
  static_assert(G::kValues % kQuarters == 0 && kMine <= 32);
  float v[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    v[i] = 0.0f;
#pragma unroll
    for (int q = 0; q < kQuarters; ++q) {
      v[i] += parts[(q * G::kValues + quarter * kMine + i) * 32 + lane];
    }
  }
  const int index = quarter * kMine + sum_over_lanes(v, lane);
  if (lane % (32 / kMine) == 0) store(index, v[0]);
}

/// Asks for the weights that a warp has not loaded yet, so that they come while it waits.
template <typename G>
__device__ __forceinline__ void prefetch_rest(const RouterArgs& args, int piece, int ctas,
                                              int pieces, int tile, int quarter, int lane) {
  constexpr int kElement = G::kBf16 ? 2 : 4;
  const int steps = (args.hidden + kStepColumns - 1) / kStepColumns;
  const int width = (steps + kQuarters - 1) / kQuarters * kStepColumns;
  const int end = min(args.hidden, (quarter + 1) * width);
  int column = quarter * width + G::kAhead * kStepColumns;
  for (; piece < pieces; piece += ctas) {
    for (int e = 0; e < G::kExperts; ++e) {
      const int expert = piece * G::kCtaExperts + tile * G::kExperts + e;
      if (expert >= args.choice.experts) break;
      const uint8_t* row = args.matrix + static_cast<int64_t>(expert) * args.hidden * kElement;
      for (int c = column + lane * (128 / kElement); c < end; c += 32 * (128 / kElement)) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + c * kElement));
      }
    }
    column = quarter * width;
  }
}

template <typename G>
__global__ void __launch_bounds__(G::kWarps * 32, G::kWarps == 8 ? 2 : 1)
    router_kernel(const __grid_constant__ RouterArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int quarter = warp % kQuarters, tile = warp / kQuarters;
  const int experts = args.choice.experts;
  const int steps = (args.hidden + kStepColumns - 1) / kStepColumns;
  const int first_column = (steps + kQuarters - 1) / kQuarters * quarter * kStepColumns;
  float* tile_parts = router_smem + tile * kQuarters * G::kValues * 32;
  // With a cluster a CTA takes every kCluster-th piece of the experts, else one.
  const int pieces = (experts + G::kCtaExperts - 1) / G::kCtaExperts;
  const int ctas = G::kCluster > 1 ? G::kCluster : pieces;
  const int row_tile = static_cast<int>(blockIdx.x) / ctas;
  const int first_row = row_tile * G::kRows;
  int piece = static_cast<int>(blockIdx.x) % ctas;
  allow_next_kernel();
  RawWeights<G::kBf16> raw[G::kAhead][G::kExperts];
  bool loaded = true;
#pragma unroll
  for (int s = 0; s < G::kAhead; ++s) {
    const int column = first_column + s * kStepColumns + 4 * lane;
    const int end = first_column + (steps + kQuarters - 1) / kQuarters * kStepColumns;
    if (column >= min(args.hidden, end)) continue;
#pragma unroll
    for (int e = 0; e < G::kExperts; ++e) {
      const int expert = min(piece * G::kCtaExperts + tile * G::kExperts + e, experts - 1);
      raw[s][e].load(args.matrix + static_cast<int64_t>(expert) * args.hidden * (G::kBf16 ? 2 : 4),
                     column);
    }
  }
  ChoiceParams choice = args.choice;
  if constexpr (G::kCluster > 1) {
    prefetch_rest<G>(args, piece, ctas, pieces, tile, quarter, lane);
    if (piece == 0 &&
        choice.correction_bias != nullptr) {  // the cluster's first CTA, which chooses
      float* copy = router_smem + G::kPartFloats + (experts + 1) / 2 * 2 + choice_floats(experts);
      for (int e = static_cast<int>(threadIdx.x); e < experts; e += G::kWarps * 32) {
        copy[e] = __ldg(choice.correction_bias + e);
      }
      choice.correction_bias = copy;
    }
  }
  wait_for_previous_kernel();
#if defined(NIBBLE_HAS_BULK_COPY)
  float* row_logits = router_smem + G::kPartFloats;  // of the first CTA
  // Others write there: it must have started.
  if constexpr (G::kCluster > 1) cluster_arrive();
  bool started = false;
#endif
  for (; piece < pieces; piece += ctas) {
    const int first_expert = piece * G::kCtaExperts + tile * G::kExperts;
    sum_quarter<G>(args, first_row, first_expert, quarter, raw, loaded, tile_parts, lane);
    loaded = false;
    __syncthreads();
#if defined(NIBBLE_HAS_BULK_COPY)
    if (G::kCluster > 1 && !started) {
      cluster_wait();
      started = true;
    }
#endif
    sum_values<G>(tile_parts, quarter, lane, [&](int index, float sum) {
      const int row = first_row + index / G::kExperts, expert = first_expert + index % G::kExperts;
      if (row >= args.rows || expert >= experts) return;
      if (args.bias != nullptr) sum += __ldg(args.bias + expert);
#if defined(NIBBLE_HAS_BULK_COPY)
      if constexpr (G::kCluster > 1) {
        cluster_store(cluster_address(smem_address(row_logits + expert), 0), sum);
        if (!args.keep_logits) return;
      }
#endif
      args.logits[static_cast<int64_t>(row) * experts + expert] = sum;
    });
    if (piece + ctas < pieces) __syncthreads();  // the parts are free again
  }
#if defined(NIBBLE_HAS_BULK_COPY)
  if constexpr (G::kCluster > 1) {
    if (!started) cluster_wait();
    cluster_arrive();
    if (cluster_rank() != 0) return;
    cluster_wait();
    if (warp != 0) return;
    choose_experts<false>(choice, row_logits, row_logits + (experts + 1) / 2 * 2, lane,
                          args.ids + static_cast<int64_t>(first_row) * args.choice.top_k,
                          args.weights + static_cast<int64_t>(first_row) * args.choice.top_k);
    return;
  }
#endif
  // The row tile's last CTA chooses. Every thread's logits are made visible before the count.
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(args.counters + row_tile, 1) == ctas - 1;
    if (last) args.counters[row_tile] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  const int end = min(args.rows, first_row + G::kRows);
  for (int row = first_row + warp; row < end; row += G::kWarps) {
    choose_experts<true>(args.choice, args.logits + static_cast<int64_t>(row) * experts,
                         router_smem + warp * choice_floats(experts), lane,
                         args.ids + static_cast<int64_t>(row) * args.choice.top_k,
                         args.weights + static_cast<int64_t>(row) * args.choice.top_k);
    __syncwarp();
  }
}

template <typename G>
cudaError_t launch(const RouterArgs& args, cudaStream_t stream) {
  const int experts = args.choice.experts;
  const int choice = choice_floats(experts);
  // The choice reuses the parts' place, but for a cluster, where a part may still be read.
  const int floats = G::kCluster > 1
                         ? G::kPartFloats + (experts + 1) / 2 * 2 + choice + experts
                         : std::max(G::kPartFloats, std::min(G::kWarps, G::kRows) * choice);
  const int pieces = (experts + G::kCtaExperts - 1) / G::kCtaExperts;
  const int row_tiles = (args.rows + G::kRows - 1) / G::kRows;
  if constexpr (G::kCluster == 1) {
    return launch_overlapped(router_kernel<G>, pieces * row_tiles, G::kWarps * 32,
                             static_cast<size_t>(floats) * 4, stream, args);
  } else {
    return launch_overlapped_clusters(router_kernel<G>, G::kCluster * row_tiles, G::kCluster,
                                      G::kWarps * 32, static_cast<size_t>(floats) * 4, stream,
                                      args);
  }
}

template <bool bf16>
cudaError_t launch(const RouterArgs& args, bool clusters, cudaStream_t stream) {
  if (args.rows > kClusterRows) {
    return launch<RouterGeometry<bf16, 8, 8, 2, 1, 1>>(args, stream);
  }
  if (!clusters) return launch<RouterGeometry<bf16, 1, 4, 4, 4, 1>>(args, stream);
  return launch<RouterGeometry<bf16, 1, 4, 4, 4, 8>>(args, stream);
}

// Counters have one place whatever the rows of a call, or a call would find another's logits there.
constexpr int64_t kMaxRows = 1 << 16;
constexpr int64_t kCounterBytes = kMaxRows / 8 * 4;

Result<void> check(const RouterWeight& w, const RouterParams& p, int64_t x_stride, int64_t rows) {
  if (w.format != formats::FormatId::kBf16 && w.format != formats::FormatId::kF32) {
    return Error(Code::kUnsupported, cat("router matrix in format ",
                                         formats::block_format(w.format).name, ": bf16 or f32"));
  }
  const bool experts_ok = w.experts == p.experts && p.experts > 0 &&
                          p.experts <= kMaxRouterExperts && p.top_k > 0 &&
                          p.top_k <= std::min(p.experts, kMaxRouterTopK);
  const bool groups_ok = experts_ok && p.groups > 0 && p.groups <= kMaxRouterGroups &&
                         p.experts % p.groups == 0 && p.top_groups > 0 && p.top_groups <= p.groups;
  if (!groups_ok) {
    return Error(Code::kInvalidArgument,
                 cat("router: top ", p.top_k, " of ", p.experts, " experts (matrix has ", w.experts,
                     "), ", p.top_groups, " of ", p.groups, " groups"));
  }
  if (w.hidden < 4 || w.hidden % 4 != 0 || w.hidden > (int64_t{1} << 18) || x_stride < w.hidden ||
      x_stride % 4 != 0 || x_stride > (int64_t{1} << 26) || rows < 1 || rows > kMaxRows) {
    return Error(Code::kInvalidArgument,
                 cat("router: ", rows, " rows of ", w.hidden, " columns, stride ", x_stride,
                     "; rows must be 1..", kMaxRows, ", the others multiples of 4"));
  }
  return {};
}

ChoiceParams choice_params(const RouterParams& p) {
  return {p.score,
          static_cast<int>(p.experts),
          static_cast<int>(p.top_k),
          static_cast<int>(p.groups),
          static_cast<int>(p.top_groups),
          p.normalize,
          p.scaling,
          p.correction_bias};
}

/// Rows of clusters of 16 CTAs; more rows fill the GPU with clusters of 8.
constexpr int64_t kWideClusterRows = 8;
constexpr int kMaxDevices = 64;

template <bool bf16>
using WideClusters = NormRouteGeometry<bf16, 2, 16>;
template <bool bf16>
using NarrowClusters = NormRouteGeometry<bf16, 4, 8>;

/// Whether rows go to clusters of 16; they fit then, whatever the matrix.
template <bool bf16>
bool takes_wide(int64_t rows, int device) {
  static std::atomic<int8_t> wide_fits[kMaxDevices];  // 0 not asked, 1 yes, 2 no
  if (rows > kWideClusterRows || device >= kMaxDevices) return false;
  if (wide_fits[device] == 0) wide_fits[device] = norm_route_fits<WideClusters<bf16>>() ? 1 : 2;
  return wide_fits[device] == 1;
}

/// Whether the fused kernel finds room on the GPU: its weights lie in shared memory.
bool fits_clusters(const AddRmsNormArgs& norm, const RouterWeight& weight, const Gpu& gpu) {
  const bool bf16 = weight.format == formats::FormatId::kBf16;
  return (bf16 ? takes_wide<true>(norm.rows, gpu.index)
               : takes_wide<false>(norm.rows, gpu.index)) ||
         norm_route_bytes(weight.format, norm.hidden, weight.experts) <= gpu.shared_bytes;
}

template <bool bf16>
cudaError_t launch_norm_route(const NormRouteLaunch& args, int device, cudaStream_t stream) {
  return takes_wide<bf16>(args.rows, device)
             ? launch_norm_route<WideClusters<bf16>>(args, stream)
             : launch_norm_route<NarrowClusters<bf16>>(args, stream);
}

}  // namespace

int64_t norm_route_bytes(formats::FormatId format, int64_t hidden, int64_t experts) {
  constexpr int64_t kStatic = 256;
  const int floats = format == formats::FormatId::kBf16
                         ? norm_route_floats<NarrowClusters<true>>(static_cast<int>(hidden),
                                                                   static_cast<int>(experts))
                         : norm_route_floats<NarrowClusters<false>>(static_cast<int>(hidden),
                                                                    static_cast<int>(experts));
  return kStatic + int64_t{4} * floats;
}

int64_t router_scratch_bytes(int64_t max_rows, int64_t experts) {
  return kCounterBytes + max_rows * experts * 4;
}

Result<void> route(const RouterWeight& weight, const RouterParams& params, const float* x,
                   int64_t x_stride, int64_t rows, void* scratch, int32_t* ids, float* weights,
                   cudaStream_t stream, float* logits) {
  if (x_stride == 0) x_stride = weight.hidden;
  NIBBLE_TRY(check(weight, params, x_stride, rows));
  if (weight.rows == nullptr || x == nullptr || scratch == nullptr || ids == nullptr ||
      weights == nullptr) {
    return Error(Code::kInvalidArgument, "router: a required pointer is null");
  }
  RouterArgs args = {};
  args.matrix = static_cast<const uint8_t*>(weight.rows);
  args.bias = weight.bias;
  args.x = x;
  args.x_stride = x_stride;
  args.logits = logits != nullptr
                    ? logits
                    : reinterpret_cast<float*>(static_cast<uint8_t*>(scratch) + kCounterBytes);
  args.counters = static_cast<int*>(scratch);
  args.ids = ids;
  args.weights = weights;
  args.keep_logits = logits != nullptr;
  args.rows = static_cast<int>(rows);
  args.hidden = static_cast<int>(weight.hidden);
  args.choice = choice_params(params);
  NIBBLE_TRY(const Gpu gpu, current_gpu());
  const bool clusters = gpu.has_bulk_copies();  // from the same architecture on
  const cudaError_t e = weight.format == formats::FormatId::kBf16
                            ? launch<true>(args, clusters, stream)
                            : launch<false>(args, clusters, stream);
  if (e != cudaSuccess) {
    return Error(Code::kInternal, cat("router kernel: ", cudaGetErrorString(e)));
  }
  return {};
}

Result<void> norm_route(const AddRmsNormArgs& norm, const RouterWeight& weight,
                        const RouterParams& params, void* scratch, int32_t* ids, float* weights,
                        cudaStream_t stream, NormRoutePath path) {
  if (norm.hidden != weight.hidden || norm.normed_f32 == nullptr) {
    return Error(Code::kInvalidArgument,
                 cat("norm_route: ", norm.hidden, " columns for a matrix of ", weight.hidden,
                     ", or normed_f32 is null"));
  }
  NIBBLE_TRY(const Gpu gpu, current_gpu());
  if (path == NormRoutePath::kTwoKernels || norm.rows > kClusterRows ||
      norm.hidden > kMaxNormRouteHidden || !gpu.has_bulk_copies() ||
      !fits_clusters(norm, weight, gpu)) {
    NIBBLE_TRY(add_rms_norm(norm, stream));
    return route(weight, params, norm.normed_f32, 0, norm.rows, scratch, ids, weights, stream);
  }
  NIBBLE_TRY(check(weight, params, norm.hidden, norm.rows));
  if (weight.rows == nullptr || norm.residual == nullptr || norm.weight == nullptr ||
      norm.normed == nullptr || ids == nullptr || weights == nullptr) {
    return Error(Code::kInvalidArgument, "norm_route: a required pointer is null");
  }
  NormRouteLaunch args = {};
  args.residual = norm.residual;
  args.delta = norm.delta;
  args.norm_weight = norm.weight;
  args.eps = norm.eps;
  args.normed = static_cast<uint8_t*>(norm.normed);
  args.matrix = static_cast<const uint8_t*>(weight.rows);
  args.bias = weight.bias;
  args.ids = ids;
  args.weights = weights;
  args.rows = static_cast<int>(norm.rows);
  args.hidden = static_cast<int>(norm.hidden);
  args.choice = choice_params(params);
  const cudaError_t e = weight.format == formats::FormatId::kBf16
                            ? launch_norm_route<true>(args, gpu.index, stream)
                            : launch_norm_route<false>(args, gpu.index, stream);
  if (e != cudaSuccess) {
    return Error(Code::kInternal, cat("norm_route kernel: ", cudaGetErrorString(e)));
  }
  return {};
}

}  // namespace nibble::kernels::cuda
