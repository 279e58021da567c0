// Who does what in the kernel for a few slots (moe_few.cuh): slots by expert, and each warp's
// tasks.
#pragma once

#include "kernels/cuda/moe_few.h"
#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {

/// The slots grouped by expert, as each warp knows them: lane i holds slot i.
struct SlotTiles {
  int expert = 0, tile = 0, count = 0;
  bool leads = false;  // the first slot of its tile

  __device__ __forceinline__ int expert_of(int wanted) const {
    return __shfl_sync(~0u, expert, __ffs(__ballot_sync(~0u, leads && tile == wanted)) - 1);
  }
};

/// In the order of the experts' first slots. One warp publishes the lists.
__device__ __forceinline__ SlotTiles sort_slots(int expert, bool valid, FewTiles& lists,
                                                bool publish, int lane) {
  SlotTiles s;
  s.expert = valid ? expert : -1 - lane;
  const unsigned same = __match_any_sync(~0u, s.expert);
  const unsigned before = (1u << lane) - 1;
  const int leader = __ffs(static_cast<int>(same)) - 1;
  s.leads = valid && leader == lane;
  const unsigned leaders = __ballot_sync(~0u, s.leads);
  s.tile = __popc(leaders & ((1u << leader) - 1));
  s.count = __popc(leaders);
  if (publish && valid) {
    lists.slots[s.tile][__popc(same & before)] = static_cast<uint8_t>(lane);
    if (s.leads) lists.rows[s.tile] = __popc(same);
  }
  return s;
}

/// n / d for 0 <= n < 4096 and 0 < d <= 64: the rounding is far smaller than the distance of
/// (n + 0.5) / d from the next whole number.
__device__ __forceinline__ int small_quotient(int n, int d) {
  return __float2int_rz(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d)));
}

/// 16 rows of one expert's matrix.
struct FewTask {
  int tile, block, quarter;
  int group;  // second product: which of the CTA's channel groups
};

/// A warp's tasks: those of the first product, then those of the second. Warps that have none of
/// the first get the second's first. Of the CTA, unless said otherwise.
struct WarpTasks {
  int up_blocks, down_blocks, up_chunks, down_chunks, warp;
  int down_begin = 0, down_groups = 0, tile_count = 0, up_begin = 0, up_count = 0, own_ups = 0,
      own = 0;  // own: the warp's

  Divisor ctas, expert_ups;

  __device__ __forceinline__ int share(int all, unsigned cta) const {  // what the CTAs before have
    return ctas.of(all * static_cast<int>(cta));
  }
  __device__ __forceinline__ WarpTasks(const FewArgs& args, int warp_in_cta)
      : up_blocks(
            static_cast<int>(row_blocks(Product::kGateUp, args.shape.hidden, args.shape.inter))),
        down_blocks(
            static_cast<int>(row_blocks(Product::kDown, args.shape.hidden, args.shape.inter))),
        up_chunks(static_cast<int>(chunks(args.shape.hidden))),
        down_chunks(static_cast<int>(chunks(args.shape.inter))),
        warp(warp_in_cta),
        ctas(args.ctas),
        expert_ups(args.expert_ups) {
    down_begin = share(few_groups(args.shape.hidden), blockIdx.x);
    down_groups = share(few_groups(args.shape.hidden), blockIdx.x + 1) - down_begin;
  }
  __device__ __forceinline__ void set_tiles(int tiles) {
    const int ups = tiles * up_blocks * 4;
    tile_count = tiles;
    up_begin = share(ups, blockIdx.x);
    up_count = share(ups, blockIdx.x + 1) - up_begin;
    own_ups = (up_count - warp + kFewWarps - 1) / kFewWarps;
    const int downs = down_groups * tiles - first_down();
    own = own_ups + (downs > 0 ? (downs + kFewWarps - 1) / kFewWarps : 0);
  }
  __device__ __forceinline__ int first_down() const {
    return (warp + kFewWarps - up_count % kFewWarps) % kFewWarps;
  }
  __device__ __forceinline__ FewTask at(int i) const {
    if (i < own_ups) {
      const int number = up_begin + warp + i * kFewWarps, tile = expert_ups.of(number);
      const int local = number - tile * up_blocks * 4;
      return {tile, local / 4, local % 4, 0};
    }
    const int number = first_down() + (i - own_ups) * kFewWarps;
    const int group = small_quotient(number, tile_count);
    return {number - group * tile_count, (down_begin + group) / 4, (down_begin + group) % 4, group};
  }
};

}  // namespace nibble::kernels::cuda
