// Residual addition, RMSNorm and routing of a few rows in one kernel: a cluster of CTAs takes a
// row. Every CTA norms the row itself, multiplies it with its experts' weights (in shared memory
// before the kernel before has ended) and sends the logits to the first CTA, which chooses. Same
// order of sums as the norm kernel and the router kernels.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm_row.cuh"
#include "kernels/cuda/router_choice.cuh"
#include "kernels/cuda/router_dot.cuh"

namespace nibble::kernels::cuda {

struct NormRouteLaunch {
  float* residual;
  const float* delta;  // or null
  const float* norm_weight;
  float eps;
  uint8_t* normed;  // BF16
  const uint8_t* matrix;
  const float* bias;
  int32_t* ids;
  float* weights;
  int rows, hidden;
  ChoiceParams choice;
};

constexpr int kNormRouteThreads = 512, kNormRouteWarps = kNormRouteThreads / 32;
constexpr int kNormRouteQuads = 2;  // float4 of the row that a thread holds, at most
constexpr int kNormRouteAhead = 4;  // steps of weights on their way
constexpr int kMaxNormRouteHidden = 4 * kMaxNormThreads * kNormRouteQuads;

/// A warp takes `experts` experts and a quarter of the columns; kNormRouteWarps / 4 warps side by
/// side.
template <bool bf16, int experts, int cluster>
struct NormRouteGeometry {
  static constexpr bool kBf16 = bf16;
  static constexpr int kExperts = experts, kCluster = cluster;
  static constexpr int kCtaExperts = experts * kNormRouteWarps / kQuarters;
  static_assert(kCtaExperts <= kNormRouteWarps);               // a warp sums one expert's parts
  static constexpr int kQuadBytes = sizeof(RawWeights<bf16>);  // what a lane copies and reads
  static constexpr int kWarpFloats = kNormRouteAhead * experts * 32 * kQuadBytes / 4;
};

/// Shared floats: weights, the normed row, parts, logits, the choice, correction bias, a
/// rehearsal's choice.
template <typename G>
NIBBLE_HD constexpr int norm_route_floats(int hidden, int experts) {
  return kNormRouteWarps * G::kWarpFloats + hidden + kQuarters * G::kCtaExperts * 32 +
         (experts + 3) / 4 * 4 + choice_floats(experts) + experts + 2 * kCompactTopK;
}

#if defined(NIBBLE_HAS_BULK_COPY)
/// Every lane copies what it will read.
template <typename G>
__device__ __forceinline__ void copy_router_weights(const NormRouteLaunch& a, int first_expert,
                                                    int base, int end, int lane,
                                                    float* warp_weights) {
  const uint32_t to = smem_address(warp_weights);
#pragma unroll
  for (int s = 0; s < kNormRouteAhead; ++s) {
    const int column = base + s * kStepColumns + 4 * lane;
    if (column >= end) continue;
#pragma unroll
    for (int e = 0; e < G::kExperts; ++e) {
      const int expert = min(first_expert + e, a.choice.experts - 1);
      const int64_t at = static_cast<int64_t>(expert) * a.hidden + column;
      copy_small_async<G::kQuadBytes>(
          to + static_cast<uint32_t>(((s * G::kExperts + e) * 32 + lane) * G::kQuadBytes),
          a.matrix + at * (G::kQuadBytes / 4));
    }
  }
  commit_copies();
}

/// One quarter of a warp's experts: 32 lanes' sums each to `parts` [expert][32].
template <typename G>
__device__ __forceinline__ void route_quarter(const NormRouteLaunch& a, const float* x,
                                              int first_expert, int base, int end, bool copied,
                                              int lane, float* warp_weights, float* parts) {
  float acc[G::kExperts] = {};
#pragma unroll 1
  for (; base < end; base += kNormRouteAhead * kStepColumns) {
    if (!copied) copy_router_weights<G>(a, first_expert, base, end, lane, warp_weights);
    copied = false;
    wait_copies<0>();
#pragma unroll
    for (int s = 0; s < kNormRouteAhead; ++s) {
      const int column = base + s * kStepColumns + 4 * lane;
      if (column >= end) continue;
      const float4 v = *reinterpret_cast<const float4*>(x + column);
#pragma unroll
      for (int e = 0; e < G::kExperts; ++e) {
        RawWeights<G::kBf16> raw;
        raw.read(warp_weights, (s * G::kExperts + e) * 32 + lane);
        acc[e] = dot4(raw.value(), v, acc[e]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < G::kExperts; ++e) parts[e * 32 + lane] = acc[e];
}

/// Places in shared memory.
struct NormRouteShared {
  float *warp_weights, *x, *parts, *logits, *warp_sums;
  uint32_t bar;
};

/// Norms the row, multiplies it, sends the logits; the first CTA then has them all, and stores the
/// new residual.
template <typename G>
__device__ __forceinline__ void norm_and_multiply(const NormRouteLaunch& a,
                                                  const NormRouteShared& shared, bool compact,
                                                  int rank, int row, int thread) {
  const int lane = thread % 32, warp = uniform(thread / 32), quarter = warp % kQuarters;
  const int experts = a.choice.experts, own_expert = warp / kQuarters * G::kExperts;
  const int pieces = (experts + G::kCtaExperts - 1) / G::kCtaExperts;
  const int begin = quarter * quarter_columns(a.hidden);
  const int end = min(a.hidden, begin + quarter_columns(a.hidden));
  const int quads = a.hidden / 4, threads = norm_threads(quads);
  float *x = shared.x, *parts = shared.parts, *logits = shared.logits;
  float4 sum_row[kNormRouteQuads];
  float squares = 0.0f;
  const int64_t first_quad = static_cast<int64_t>(row) * quads;
#pragma unroll
  for (int i = 0; i < kNormRouteQuads; ++i) {
    const int at = thread + i * threads;
    if (thread >= threads || at >= quads) continue;
    sum_row[i] = reinterpret_cast<const float4*>(a.residual)[first_quad + at];
    if (a.delta != nullptr) {
      sum_row[i] = add4(sum_row[i], reinterpret_cast<const float4*>(a.delta)[first_quad + at]);
    }
    squares = add_squares(squares, sum_row[i]);
  }
  const float inverse =
      inverse_norm(block_sum(squares, threads / 32, shared.warp_sums), a.hidden, a.eps);
#pragma unroll
  for (int i = 0; i < kNormRouteQuads; ++i) {
    const int at = thread + i * threads;
    if (thread >= threads || at >= quads) continue;
    float4* place = reinterpret_cast<float4*>(x) + at;
    *place = scale4(sum_row[i], inverse, *place);
    if (rank == min(G::kCluster, pieces) - 1) {
      reinterpret_cast<uint2*>(a.normed)[first_quad + at] = bf16_quad(*place);
    }
  }
  __syncthreads();

  bool first = true;
  for (int piece = rank; piece < pieces; piece += G::kCluster) {
    const int first_expert = piece * G::kCtaExperts;
    route_quarter<G>(a, x, first_expert + own_expert, begin, end, first, lane, shared.warp_weights,
                     parts + (quarter * G::kCtaExperts + own_expert) * 32);
    __syncthreads();
    if (first) cluster_wait();
    first = false;
    const int expert = first_expert + warp;
    if (warp < G::kCtaExperts && expert < experts) {
      float sum = 0.0f;
#pragma unroll
      for (int q = 0; q < kQuarters; ++q) sum += parts[(q * G::kCtaExperts + warp) * 32 + lane];
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) {
        if (a.bias != nullptr) sum += __ldg(a.bias + expert);
        if (compact && a.choice.score == RouterScore::kSigmoid) sum = sigmoid_score(sum);
        cluster_store_async(cluster_address(smem_address(logits + expert), 0), sum,
                            cluster_address(shared.bar, 0));
      }
    }
    if (piece + G::kCluster < pieces) __syncthreads();  // the parts are free again
  }
  if (first) cluster_wait();
  if (rank != 0) return;
  // With all logits here, all CTAs that use the residual have read it.
  mbarrier_wait(shared.bar, 0);
#pragma unroll
  for (int i = 0; i < kNormRouteQuads; ++i) {
    const int at = thread + i * threads;
    if (thread >= threads || at >= quads || a.delta == nullptr) continue;
    reinterpret_cast<float4*>(a.residual)[first_quad + at] = sum_row[i];
  }
}
#endif

template <typename G>
__global__ void __launch_bounds__(G::kExperts > 2 ? kNormRouteThreads : kThreadsFor48Registers,
                                  G::kExperts > 2 ? 1 : 2)
    norm_route_kernel(const __grid_constant__ NormRouteLaunch a) {
#if defined(NIBBLE_HAS_BULK_COPY)
  extern __shared__ __align__(16) float norm_route_smem[];
  __shared__ float warp_sums[32];
  __shared__ __align__(8) uint64_t arrived;  // in the first CTA: all logits are there
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = uniform(thread / 32), quarter = warp % kQuarters, tile = warp / kQuarters;
  const int rank = cluster_rank(), row = static_cast<int>(blockIdx.x) / G::kCluster;
  const int experts = a.choice.experts;
  const int begin = quarter * quarter_columns(a.hidden);
  const int end = min(a.hidden, begin + quarter_columns(a.hidden));
  float* x = norm_route_smem + kNormRouteWarps * G::kWarpFloats;
  float* parts = x + a.hidden;
  float* logits = parts + kQuarters * G::kCtaExperts * 32;
  float* scratch = logits + (experts + 3) / 4 * 4;
  const NormRouteShared shared = {
      norm_route_smem + warp * G::kWarpFloats, x, parts, logits, warp_sums, smem_address(&arrived)};
  const bool compact = choice_is_compact(a.choice);

  allow_next_kernel();
  copy_router_weights<G>(a, rank * G::kCtaExperts + tile * G::kExperts, begin, end, lane,
                         shared.warp_weights);
  const int quads = a.hidden / 4, threads = norm_threads(quads);
#pragma unroll
  for (int i = 0; i < kNormRouteQuads; ++i) {  // every thread reads only what it has put there
    const int at = thread + i * threads;
    if (thread < threads && at < quads) {
      reinterpret_cast<float4*>(x)[at] = __ldg(reinterpret_cast<const float4*>(a.norm_weight) + at);
    }
  }
  ChoiceParams choice = a.choice;
  if (rank == 0) {
    if (choice.correction_bias != nullptr) {
      float* copy = scratch + choice_floats(experts);
      for (int e = thread; e < experts; e += kNormRouteThreads) {
        copy[e] = __ldg(choice.correction_bias + e);
      }
      choice.correction_bias = copy;
    }
    if (thread == 0) {
      mbarrier_init(shared.bar, 1);
      mbarrier_init_fence();
    }
    if (kRacecheck) __syncthreads();  // it takes the initialization for another thread's
    if (thread == 0) mbarrier_arrive_expect(shared.bar, static_cast<uint32_t>(experts) * 4);
  }
  // The choice is run once a launch, by one warp, while weights stream through the caches: fetching
  // its instructions then would take longer than running them. So that warp rehearses it, one round
  // of it, on whatever shared memory holds.
#pragma unroll 1
  for (int turn = compact && rank == 0 && warp == 0 ? 0 : 1; turn < 2; ++turn) {
    float* rehearsed = scratch + choice_floats(experts) + experts;
    auto* ids = reinterpret_cast<int32_t*>(rehearsed);
    float* weights = rehearsed + kCompactTopK;
    choice.top_k = 1;
    if (turn == 1) {
      cluster_arrive_relaxed();  // this CTA has started, its barrier is there, logits may come
      wait_for_previous_kernel();
      norm_and_multiply<G>(a, shared, compact, rank, row, thread);
      if (rank != 0 || warp != 0) return;
      choice.top_k = a.choice.top_k;
      ids = a.ids + static_cast<int64_t>(row) * choice.top_k;
      weights = a.weights + static_cast<int64_t>(row) * choice.top_k;
      if (!compact) {
        choose_experts<false>(choice, logits, scratch, lane, ids, weights);
        return;
      }
    }
    choose_compactly(choice, logits, scratch, lane, ids, weights);
  }
#endif
}

template <typename G>
cudaError_t launch_norm_route(const NormRouteLaunch& a, cudaStream_t stream) {
  const size_t smem =
      size_t{4} * static_cast<size_t>(norm_route_floats<G>(a.hidden, a.choice.experts));
  return launch_overlapped_clusters(norm_route_kernel<G>, a.rows * G::kCluster, G::kCluster,
                                    kNormRouteThreads, smem, stream, a);
}

/// Whether a cluster of 16 of this kernel fits the device; asked once for each device.
template <typename G>
bool norm_route_fits() {
  return active_clusters(
             norm_route_kernel<G>, G::kCluster, kNormRouteThreads,
             size_t{4} * static_cast<size_t>(norm_route_floats<G>(kMaxNormRouteHidden, 1024))) > 0;
}

}  // namespace nibble::kernels::cuda
