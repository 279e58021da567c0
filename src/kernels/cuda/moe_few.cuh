// The layer for a few slots (tokens * top_k) in one launch: a latency problem, so every warp is on
// its own. A warp takes 16 rows of a matrix and all of K, copies its share of every tile to its own
// ring in shared memory and multiplies by mma.sync, in the order of all geometries.
//
// First product: the (expert, 16 rows) of all experts, dealt evenly to the warps of the GPU. Then
// one barrier of the whole grid. Second product: a CTA takes groups of 16 channels for all experts,
// so that it alone adds the experts' shares, in the order of k, without another barrier. A warp's
// copies run ahead over the grid's barrier: both products are one stream of weights. All CTAs must
// run at once: one a processor, as launched.
#pragma once

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/moe_few_run.cuh"

namespace nibble::kernels::cuda {

extern __shared__ __align__(128) uint8_t few_smem[];

/// A task with all that its end needs.
template <typename P>
struct FewJob {
  typename FewRun<P>::Task run;
  int tile, count, slot, group;  // slot: of the lane's token
  int pair;                      // first product: the lane's pair of channels in h
  float bias[2];                 // gate and up, or of two neighbouring channels

  __device__ __forceinline__ void set(const FewArgs& args, int number, const WarpTasks& tasks,
                                      const SlotTiles& slots, const FewTiles& lists,
                                      const uint8_t* rows, int lane) {
    const bool down = number >= tasks.own_ups;
    const FewTask task = tasks.at(number);
    const int g = lane / 4, t = lane % 4, expert = slots.expert_of(task.tile);
    tile = task.tile;
    group = task.group;
    count = lists.rows[tile];
    slot = lists.slots[tile][g < count ? g : 0];  // columns without a token: any
    pair = static_cast<int>(packed_row(Product::kGateUp, task.block, task.quarter, 2 * t, 0));
    const int64_t channel =
        packed_row(down ? Product::kDown : Product::kGateUp, task.block, task.quarter, g, 0);
    const int64_t width = down ? args.shape.hidden : args.shape.inter;
    const float* first = down ? args.weights.down_bias : args.weights.gate_bias;
    bias[0] = bias[1] = 0.0f;
    if (first != nullptr && channel < width) {
      bias[0] = first[expert * width + channel];
      bias[1] = down ? first[expert * width + channel + 1]
                     : args.weights.up_bias[expert * width + channel];
    }
    const int row = down ? slot * few_row_bytes(args.shape.inter)
                         : small_quotient(slot, static_cast<int>(args.shape.top_k)) *
                               few_row_bytes(args.shape.hidden);
    run = {down, down ? tasks.down_chunks : tasks.up_chunks, rows + row + 32 * t};
  }
  /// To h (first product: eight channels of the tile's tokens, activated) or to `shares` in shared
  /// memory, [slot][16] (second product).
  __device__ __forceinline__ void store(const FewArgs& args, const float (&acc)[4],
                                        const WarpTasks& tasks, const FewTiles& lists,
                                        float* shares, int lane) const {
    const int g = lane / 4, t = lane % 4;
    if (!run.down) {
      const uint32_t two = activated_channels(args.shape, acc, lists.gate_factor[tile],
                                              lists.up_factor[tile], bias[0], bias[1]);
      uint8_t* row = args.h + slot * (tasks.down_chunks * kRowBytes);
      if (g < count) *reinterpret_cast<uint32_t*>(row + pair * 2) = two;
      return;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * t + c >= count) continue;
      const int own = lists.slots[tile][2 * t + c];
      float* share = shares + (group * args.slots + own) * kFewGroup;
      const float2 pair =
          weighted_pair(acc[c], acc[2 + c], lists.down_factor[tile], bias, lists.router[own]);
      *reinterpret_cast<float2*>(share + 2 * g) = args.shape.top_k > 1 ? rounded_pair(pair) : pair;
    }
  }
};

/// x to shared memory, zeros behind its rows.
__device__ __forceinline__ void stage_x(const FewArgs& args, uint8_t* rows) {
  const int hidden = static_cast<int>(args.shape.hidden), stride = few_row_bytes(hidden);
  const int units = few_row_units(hidden), valid = hidden / 8;
  const uint32_t to = smem_address(rows);
  for (int i = static_cast<int>(threadIdx.x); i < args.tokens * units; i += kFewThreads) {
    const int row = args.x_units.of(i), unit = i - row * units;
    copy_unit_async(to + static_cast<uint32_t>(row * stride + unit * 16),
                    args.x + int64_t{2} * row * hidden + (unit < valid ? unit * 16 : 0),
                    unit < valid ? 16 : 0);
  }
}

/// The slots' rows of h to shared memory, zeros behind them.
__device__ __forceinline__ void stage_h(const FewArgs& args, uint8_t* rows) {
  const int stride = few_row_bytes(args.shape.inter), units = few_row_units(args.shape.inter);
  const int valid = static_cast<int>(chunks(args.shape.inter)) * 8;
  for (int u = static_cast<int>(threadIdx.x); u < args.slots * units; u += kFewThreads) {
    const int row = args.h_units.of(u), unit = u - row * units;
    const auto* from = reinterpret_cast<const uint4*>(args.h) + row * valid + unit;
    *reinterpret_cast<uint4*>(rows + row * stride + unit * 16) =
        unit < valid ? __ldcg(from) : make_uint4(0, 0, 0, 0);
  }
}

/// The CTA's writes are done: other CTAs that wait for the grid will see them.
__device__ __forceinline__ void arrive_at_grid(FewCounters& counters) {
  __syncthreads();
  if (threadIdx.x == 0) add_release(&counters.arrived, 1);
}
/// All CTAs have arrived.
__device__ __forceinline__ void wait_for_grid(FewCounters& counters) {
  if (threadIdx.x == 0) {
    while (load_acquire(&counters.arrived) < static_cast<int>(gridDim.x)) {
    }
  }
  __syncthreads();
  // The last CTA to get through leaves the counters as the next launch wants them.
  if (threadIdx.x == kFewThreads - 1 &&
      atomicInc(&counters.through, gridDim.x - 1) == gridDim.x - 1) {
    counters.arrived = 0;
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kBound, 1)
    moe_few_kernel(const __grid_constant__ FewArgs args) {
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const FewLayout layout(args.shape, args.tokens, P::kRingBytes, static_cast<int>(gridDim.x));
  FewTiles& lists = *reinterpret_cast<FewTiles*>(few_smem + layout.tiles);
  float* shares = reinterpret_cast<float*>(few_smem + layout.shares);
  uint8_t* rows = few_smem + layout.rows;
  const uint8_t* ring = few_smem + warp * P::kPlaces * P::kPlaceBytes;
  const int hidden = static_cast<int>(args.shape.hidden);

  WarpTasks tasks(args, warp);

  allow_next_kernel();
  wait_for_previous_kernel();
  const bool valid = lane < args.slots;
  const int expert = valid && args.ids != nullptr ? args.ids[lane] : 0;
  stage_x(args, rows);
  commit_copies();
  const SlotTiles slots = sort_slots(expert, valid, lists, warp == 0, lane);
  tasks.set_tiles(slots.count);
  float factors[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (warp == 0 && valid) {
    factors[0] = args.weights.gate_factor[slots.expert];
    factors[1] = args.weights.up_factor[slots.expert];
    factors[2] = args.weights.down_factor[slots.expert];
    if (args.router_weights != nullptr) factors[3] = args.router_weights[lane];
  }
  FewStream<P> stream(args, slots, tasks, smem_address(ring), lane);
  // With warps to spare, those wait: the second product's weights should not come before the
  // first's.
  const bool spare = tasks.up_count < kFewWarps, waits = spare && tasks.own_ups == 0;
  stream.holds = spare && !waits;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {  // one place in the code for both kinds of warps
    if (turn == (waits ? 1 : 0)) {
#pragma unroll 1
      for (int i = 0; i < P::kPlaces; ++i) stream.advance();
    }
    if (turn == 1) break;
    if (warp == 0 && valid) {
      lists.gate_factor[slots.tile] = factors[0];  // by all slots of the expert: the same
      lists.up_factor[slots.tile] = factors[1];
      lists.down_factor[slots.tile] = factors[2];
      lists.router[lane] = factors[3];
    }
    if (waits) {
      wait_copies<0>();
    } else {
      wait_copies<P::kPlaces>();
    }
    __syncthreads();  // x and the lists are there
    if (waits && !kRacecheck) named_barrier(kFewStart, kFewThreads);
  }
  FewRun<P> run(args, stream, ring, lane);
  FewJob<P> job;
#pragma unroll 1
  for (int i = 0;; ++i) {
    const bool any = i < tasks.own, second = i == tasks.own_ups;
    if (second) arrive_at_grid(*args.counters);
    if (any) {  // while the other CTAs come
      job.set(args, i, tasks, slots, lists, rows, lane);
      run.begin(job.run);
    }
    if (second) {
      wait_for_grid(*args.counters);
      stage_h(args, rows);
      __syncthreads();
    }
    if (!any) break;
    float acc[4];
    run.multiply(acc, job.run);
    job.store(args, acc, tasks, lists, shares, lane);
  }
  __syncthreads();
  const int top_k = static_cast<int>(args.shape.top_k);
  const int outputs = tasks.down_groups * args.tokens * kFewGroup;
  for (int i = static_cast<int>(threadIdx.x); i < outputs; i += kFewThreads) {
    const int group = small_quotient(i / kFewGroup, args.tokens);
    const int token = i / kFewGroup - group * args.tokens;
    const int channel = (tasks.down_begin + group) * kFewGroup + i % kFewGroup;
    if (channel >= hidden) continue;
    const float* share = shares + (group * args.slots + token * top_k) * kFewGroup + i % kFewGroup;
    float sum = share[0];
    for (int k = 1; k < top_k; ++k) sum = __fadd_rn(sum, share[k * kFewGroup]);
    const int64_t at = static_cast<int64_t>(token) * hidden + channel;
    if (args.add != nullptr) sum = __fadd_rn(sum, args.add[at]);
    args.y[at] = sum;
  }
}

template <FormatId format, ScaleForm form = ScaleForm::kPlain>
FewKernel pick_few_kernel(bool deep) {
  using Deep = FewPiece<format, form, true>;
  using Shallow = FewPiece<format, form, false>;
  return deep ? FewKernel{moe_few_kernel<Deep>, Deep::kRingBytes}
              : FewKernel{moe_few_kernel<Shallow>, Shallow::kRingBytes};
}

}  // namespace nibble::kernels::cuda
