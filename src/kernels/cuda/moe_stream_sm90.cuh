// Both products of the MoE layer in one persistent kernel, for Hopper and later.
//
// The product is computed transposed: weight rows are the M operand of the matrix instructions,
// expanded from packed codes into registers; up to kTileTokens tokens are the N operand, from
// shared memory. So one token costs an eighth of a tile. Every sum runs over K in one order, 16
// columns a step: a row's bits depend neither on the batch nor on the geometry (few tokens:
// mma.sync; many: wgmma; on Hopper both round alike).
//
// Work items are (product, token tile, group of kGroups row blocks), all items of the first product
// before those of the second; a CTA begins with the item of its own number (a trip to memory less),
// the others are handed out in order by a counter. An item of the second product waits for its
// token tile's rows of h (work.done), so all CTAs must run at once: as launched, they do.
//
// Roles in a CTA: one warp takes items and streams weights into the ring; it runs ahead, also over
// the wait for h, so that weights keep coming from memory between the products. One brings
// activations. kGroups warpgroups multiply, one row block each.
#pragma once

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/stream_multiply.cuh"

namespace nibble::kernels::cuda {

/// A group's row block of an item, from the ring to memory.
template <typename G, int kTokens>
__device__ __forceinline__ void run_item(const StreamArgs& args, const WorkItem& item,
                                         Ring<G>& ring, int group, int warp, int lane) {
  float acc[kTokens / 2];
  const bool down = uniform(item.product) == static_cast<int>(Product::kDown);
  const int chunk_count = uniform(item.chunk_count);
  // Fetched here, so that the latency passes before the epilogue needs them.
  const LevelTable table = level_table((down ? args.weights.down : args.weights.gate_up).levels);
  const float factor = (down ? args.weights.down_factor : args.weights.gate_factor)[item.expert];
  const float up_factor = args.weights.up_factor[item.expert];
  RowScales<G> rows;
  if constexpr (G::kCsf) {
    ring.wait_full();
    rows.start(args, down, ring.tile(group, 0), warp, lane);
  }
  if constexpr (G::kWarpMma) {
    multiply_by_warps<G, kTokens>(acc, ring, rows, table, group, chunk_count, warp, lane);
  } else {
#if defined(NIBBLE_HAS_WGMMA)
    multiply<G, kTokens>(acc, args, ring, rows, table, group, chunk_count, warp, lane);
#else
    __trap();  // moe_layer() does not launch this geometry here
#endif
  }
  const int block = item.first_block + group;
  if (!down) {
    store_activated(args, acc, item.expert, factor, up_factor, block, item.row_begin, item.rows,
                    warp, lane);
    proxy_fence();  // h is read by the bulk copy engine
    named_barrier(1 + group, 128);
    if (warp == 0 && lane == 0) {
      add_release(args.work.done + item.tile, 1);
    }
  } else {
    named_barrier(1 + group, 128);  // the tile's targets are written
    store_weighted(args, acc, item.expert, factor, block, item.rows, warp, lane,
                   G::row_targets(group));
    named_barrier(1 + group, 128);
  }
}

/// The smallest multiple of 16 tokens, from kTokens on, that holds the item's `rows`.
template <typename G, int kTokens>
__device__ __forceinline__ void run_wide_item(const StreamArgs& args, const WorkItem& item,
                                              Ring<G>& ring, int group, int warp, int lane,
                                              int rows) {
  if constexpr (kTokens < G::kTileTokens) {
    if (rows > kTokens) {
      run_wide_item<G, kTokens + 16>(args, item, ring, group, warp, lane, rows);
      return;
    }
  }
  run_item<G, kTokens>(args, item, ring, group, warp, lane);
}

template <typename G>
__device__ __forceinline__ void run_item_of(const StreamArgs& args, const ItemQueue<G>& queue,
                                            Ring<G>& ring, int group, int warp, int lane) {
  const WorkItem& item = queue.item();
  const int n = uniform(item.rows);
  if constexpr (G::kWarpMma) {
    if (n <= 8) {
      run_item<G, 8>(args, item, ring, group, warp, lane);
    } else {
      run_item<G, 16>(args, item, ring, group, warp, lane);
    }
  } else {
    run_wide_item<G, 16>(args, item, ring, group, warp, lane, n);
  }
}

/// A warpgroup's loop over items.
template <typename G>
__device__ __forceinline__ void consume(const StreamArgs& args, int group, int warp, int lane) {
  Ring<G> ring;
  ItemQueue<G> queue;
  for (;;) {
    mbarrier_wait(queue.full(), queue.phase);
    const WorkItem& item = queue.item();
    if (uniform(item.product) < 0) return;
    if (group >= uniform(item.blocks)) {  // past the last row block: only keep the ring turning
      for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
        ring.wait_full();
        warp_arrive(ring.empty(), lane);
        ring.advance();
      }
      named_barrier(1 + group, 128);
    } else {
      const int thread = warp * 32 + lane;
      if (item.product == static_cast<int>(Product::kDown) && thread < item.rows) {
        // Fetched here, so that the latency passes before the epilogue needs them.
        const int slot = args.work.slot_of_row[item.row_begin + thread];
        G::row_targets(group)[thread] = row_target(args, slot);
      }
      run_item_of<G>(args, queue, ring, group, warp, lane);
    }
    if (warp == 0 && lane == 0) mbarrier_arrive(queue.empty());
    queue.advance();
  }
}

template <typename G>
__global__ void __launch_bounds__(G::kThreads, G::kCtasPerSm)
    moe_stream_kernel(const __grid_constant__ StreamArgs args) {
#if defined(NIBBLE_HAS_BULK_COPY)
  const uint32_t smem = smem_address(moe_smem);
  if (smem % 1024 != 0)
    __trap();  // the swizzle needs it; true wherever no static memory comes first
  if (threadIdx.x == 0) {
    for (int i = 0; i < G::kStages; ++i) {
      mbarrier_init(smem + G::kFull + 8 * i, G::kFullArrivals);
      mbarrier_init(smem + G::kEmpty + 8 * i, G::kGroups * 4 * kWarpArrivals);
    }
    for (int i = 0; i < kItemSlots; ++i) {
      mbarrier_init(smem + G::kItemFull + 8 * i, 1);
      mbarrier_init(smem + G::kItemEmpty + 8 * i, G::kGroups + 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  // In this order: with the next kernel allowed first, one-token layers were 10 % slower.
  wait_for_previous_kernel();
  proxy_fence();
  allow_next_kernel();

  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < G::kGroups * 4) {
    if constexpr (!G::kWarpMma) grow_registers<112>();
    consume<G>(args, warp / 4, warp % 4, lane);
  } else {
    // Both sum to the 96 registers a thread that the CTA starts with.
    if constexpr (!G::kWarpMma) shrink_registers<32>();
    if (warp == G::kGroups * 4) {
      produce_weights<G>(args, lane);
    } else if (warp == G::kGroups * 4 + 1) {
      produce_activations<G>(args, lane);
    }
  }
#endif
}

template <typename G>
StreamKernel make_stream_kernel() {
  return StreamKernel{moe_stream_kernel<G>, G::kThreads,   G::kGroups,
                      G::kTileTokens,       G::kCtasPerSm, static_cast<size_t>(G::kSmemBytes)};
}

/// Narrow: two CTAs an SM, 128 weight rows and up to 16 tokens each, mma.sync: streaming. Small:
/// one CTA with what an SM of compute capability 12.x has. Wide: one CTA, 256 rows by up to 128
/// tokens (64 where every chunk needs its own sums), wgmma: weights are expanded once for many
/// tokens.
template <FormatId format, ScaleForm form>
StreamKernel pick_stream_kernel(Geometry geometry) {
  constexpr int kLarge = 227 * 1024, kHalf = kLarge / 2 - 1024, kLittle = 99 * 1024;
  if (geometry == Geometry::kWide) {
    constexpr int kTokens = format == FormatId::kFp8Block ? 64 : 128;
    return make_stream_kernel<StreamGeometry<format, form, false, 4, kTokens, 1, 1, kLarge>>();
  }
  constexpr int kChunks = tile_bytes(format) < 3000 ? 4 : 2;
  if (geometry == Geometry::kSmall) {
    constexpr int kGroups = format == FormatId::kBf16 ? 1 : 2;
    return make_stream_kernel<
        StreamGeometry<format, form, true, kGroups, 16, kChunks, 1, kLittle>>();
  }
  return make_stream_kernel<StreamGeometry<format, form, true, 2, 16, kChunks, 2, kHalf>>();
}

}  // namespace nibble::kernels::cuda
