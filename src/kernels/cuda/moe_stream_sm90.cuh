// Both products of the MoE layer in one persistent kernel for Hopper.
//
// The product is computed transposed: 64 weight rows are the M operand of wgmma, expanded from
// packed codes into registers; up to kTileTokens tokens are the N operand, from shared memory. So
// one token costs an eighth of a tile, and the same instruction with the same order over K serves
// every batch size: a row's bits cannot depend on the batch.
//
// Work items are (product, token tile, group of kGroups row blocks), all items of the first product
// before those of the second, handed out by a counter in memory. An item of the second product waits
// for its token tile's rows of h (work.done). Since items are taken in order by running CTAs, the
// wait ends whatever number of CTAs is resident.
//
// Roles in a CTA: warp 0 takes items and streams weights into the ring; it runs ahead, also over the
// wait for h, so that weights keep coming from memory between the products. Warp 1 streams
// activations. kGroups warpgroups multiply, one row block each.
#pragma once

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace nibble::kernels::cuda {

constexpr int kItemSlots = 4;
constexpr int kMaxStages = 16;
constexpr int kSmemPerSm = 227 * 1024;

struct WorkItem {
  int product;  // Product, or -1: no more work
  int tile, expert, row_begin, rows;
  int first_block, blocks;  // row blocks of this item
  int chunk_count;
};

extern __shared__ __align__(1024) uint8_t moe_smem[];

/// Sizes and places of one geometry; kStageChunks chunks of K travel together. Everything lies at
/// compile-time offsets in shared memory, which saves the registers that addresses would take.
template <FormatId format, int groups, int group_blocks, int tile_tokens, int stage_chunks,
          int ctas_per_sm>
struct StreamGeometry {
  static constexpr FormatId kFormat = format;
  static constexpr int kGroups = groups;             // warpgroups that multiply
  static constexpr int kGroupBlocks = group_blocks;  // row blocks of each
  static constexpr int kBlocks = groups * group_blocks;
  static constexpr int kTileTokens = tile_tokens;
  static constexpr int kStageChunks = stage_chunks;
  static constexpr int kCtasPerSm = ctas_per_sm;
  static constexpr int kThreads = (groups + 1) * 128;
  static constexpr int kTileBytes = tile_bytes(format);
  static constexpr int kXBytes = stage_chunks * tile_tokens * kRowBytes;
  static constexpr int kWBytes = kBlocks * stage_chunks * kTileBytes;
  static constexpr int kTailBytes = 2 * kMaxStages * 8 + 2 * kItemSlots * 8 +
                                    kItemSlots * static_cast<int>(sizeof(WorkItem)) +
                                    groups * tile_tokens * 8;
  static constexpr int kBudget = kSmemPerSm / ctas_per_sm - (ctas_per_sm > 1 ? 1024 : 0) - kTailBytes;
  static constexpr int kFit = kBudget / (kXBytes + kWBytes);
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kW = kStages * kXBytes;  // the activations come first: 1024-byte aligned
  static constexpr int kFull = kW + kStages * kWBytes;
  static constexpr int kEmpty = kFull + 8 * kMaxStages;
  static constexpr int kItemFull = kEmpty + 8 * kMaxStages;
  static constexpr int kItemEmpty = kItemFull + 8 * kItemSlots;
  static constexpr int kItems = kItemEmpty + 8 * kItemSlots;
  static constexpr int kRows = kItems + kItemSlots * static_cast<int>(sizeof(WorkItem));
  static constexpr int kSmemBytes = kRows + groups * tile_tokens * 8;
  static_assert(kStages >= 3);
  static_assert(kXBytes % 1024 == 0 && kWBytes % 16 == 0 && kFull % 8 == 0);
};

/// A role's position in the ring of stages.
template <typename G>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == G::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ uint32_t full() const { return smem_address(moe_smem) + G::kFull + 8 * stage; }
  __device__ uint32_t empty() const { return smem_address(moe_smem) + G::kEmpty + 8 * stage; }
  __device__ uint32_t x() const { return smem_address(moe_smem) + stage * G::kXBytes; }
  __device__ uint32_t w() const { return smem_address(moe_smem) + G::kW + stage * G::kWBytes; }
};

/// A role's position in the queue of items: written by warp 0, read by the other roles.
template <typename G>
struct ItemQueue {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kItemSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  __device__ uint32_t full() const { return smem_address(moe_smem) + G::kItemFull + 8 * slot; }
  __device__ uint32_t empty() const { return smem_address(moe_smem) + G::kItemEmpty + 8 * slot; }
  __device__ WorkItem& item() const {
    return reinterpret_cast<WorkItem*>(moe_smem + G::kItems)[slot];
  }
  __device__ void push(const WorkItem& pushed) {
    mbarrier_wait(empty(), phase ^ 1);
    item() = pushed;
    mbarrier_arrive(full());
    advance();
  }
};

/// Number of items of both products, and what an index means.
struct ItemMap {
  int tiles, up_groups, down_groups;
  __device__ int total() const { return tiles * (up_groups + down_groups); }
};

template <typename G>
__device__ __forceinline__ WorkItem make_item(const StreamArgs& args, const ItemMap& map, int index) {
  WorkItem item;
  item.product = -1;
  if (index >= map.total()) return item;
  const bool down = index >= map.tiles * map.up_groups;
  const int local = down ? index - map.tiles * map.up_groups : index;
  const int groups = down ? map.down_groups : map.up_groups;
  const auto product = down ? Product::kDown : Product::kGateUp;
  const int all_blocks = static_cast<int>(row_blocks(product, args.shape.hidden, args.shape.inter));
  const TokenTile tile = args.work.tiles[local / groups];
  item.product = static_cast<int>(product);
  item.tile = local / groups;
  item.expert = tile.expert;
  item.row_begin = tile.row_begin;
  item.rows = tile.rows;
  item.first_block = local % groups * G::kBlocks;
  item.blocks = min(G::kBlocks, all_blocks - item.first_block);
  item.chunk_count = static_cast<int>(chunks(down ? args.shape.inter : args.shape.hidden));
  return item;
}

/// Warp 0, one lane: takes items, publishes them, streams their weights.
template <typename G>
__device__ void produce_weights(const StreamArgs& args) {
  Ring<G> ring;
  ItemQueue<G> queue;
  const uint64_t policy = evict_first_policy();
  const int64_t hidden = args.shape.hidden, inter = args.shape.inter;
  ItemMap map;
  map.tiles = args.work.counters[0];
  map.up_groups = static_cast<int>((row_blocks(Product::kGateUp, hidden, inter) + G::kBlocks - 1) / G::kBlocks);
  map.down_groups = static_cast<int>((row_blocks(Product::kDown, hidden, inter) + G::kBlocks - 1) / G::kBlocks);

  WorkItem item = make_item<G>(args, map, atomicAdd(args.work.counters + 1, 1));
  while (item.product >= 0) {
    queue.push(item);
    // The next item's index and tile are fetched while this one streams.
    const int next_index = atomicAdd(args.work.counters + 1, 1);
    const bool down = item.product == static_cast<int>(Product::kDown);
    const int64_t block_bytes = static_cast<int64_t>(item.chunk_count) * G::kTileBytes;
    const uint8_t* source =
        reinterpret_cast<const uint8_t*>(down ? args.weights.down : args.weights.gate_up) +
        item.expert * packed_bytes(G::kFormat, down ? Product::kDown : Product::kGateUp, hidden, inter) +
        item.first_block * block_bytes;
    const WorkItem next = make_item<G>(args, map, next_index);
    for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
      const int here = min(G::kStageChunks, item.chunk_count - chunk);
      const uint32_t bytes = static_cast<uint32_t>(here * G::kTileBytes);
      mbarrier_wait(ring.empty(), ring.phase ^ 1);
      mbarrier_arrive_expect(ring.full(), bytes * static_cast<uint32_t>(item.blocks));
      for (int b = 0; b < item.blocks; ++b) {
        bulk_load_streaming(ring.w() + static_cast<uint32_t>(b * G::kStageChunks * G::kTileBytes),
                            source + b * block_bytes + static_cast<int64_t>(chunk) * G::kTileBytes,
                            bytes, ring.full(), policy);
      }
      ring.advance();
    }
    item = next;
  }
  queue.push(item);
}

/// Warp 1, one lane: streams the rows of each item's token tile.
template <typename G>
__device__ void produce_activations(const StreamArgs& args) {
  Ring<G> ring;
  ItemQueue<G> queue;
  const int up_blocks =
      static_cast<int>(row_blocks(Product::kGateUp, args.shape.hidden, args.shape.inter));
  for (;;) {
    mbarrier_wait(queue.full(), queue.phase);
    const WorkItem item = queue.item();
    mbarrier_arrive(queue.empty());
    queue.advance();
    if (item.product < 0) return;
    const bool down = item.product == static_cast<int>(Product::kDown);
    if (down) {
      while (load_acquire(args.work.done + item.tile) < up_blocks) __nanosleep(20);
      proxy_fence();
    }
    const uint8_t* source = (down ? args.work.h : args.work.x) +
                            static_cast<int64_t>(item.row_begin) * kRowBytes;
    const int64_t chunk_stride = args.work.capacity * kRowBytes;
    const uint32_t bytes = static_cast<uint32_t>(((item.rows + 7) & ~7) * kRowBytes);
    for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
      const int here = min(G::kStageChunks, item.chunk_count - chunk);
      mbarrier_wait(ring.empty(), ring.phase ^ 1);
      mbarrier_arrive_expect(ring.full(), bytes * static_cast<uint32_t>(here));
      for (int i = 0; i < here; ++i) {
        bulk_load(ring.x() + static_cast<uint32_t>(i * G::kTileTokens * kRowBytes),
                  source + (chunk + i) * chunk_stride, bytes, ring.full());
      }
      ring.advance();
    }
  }
}

/// Starts the two wgmmas of half a chunk; returns when the half before this one is finished.
template <int kTokens>
__device__ __forceinline__ void multiply_half(float (&acc)[kTokens / 2], uint32_t (&a)[2][4],
                                              uint64_t b) {
  pin_registers(a);
  wgmma_fence();
  Wgmma<kTokens>::run(acc, a[0], b);
  Wgmma<kTokens>::run(acc, a[1], b + 2);
  wgmma_commit();
  wgmma_wait<1>();
}

/// A group's row blocks times one token tile over all of K, chunk after chunk, step after step: the
/// fixed order of every sum. Two register buffers of half a chunk: one is expanded while wgmma reads
/// the other. (Whole chunks need 16 registers more, and with many tokens ptxas then serialises.)
template <typename G, int kTokens>
__device__ __forceinline__ void multiply(float (&acc)[G::kGroupBlocks][kTokens / 2], Ring<G>& ring,
                                         int group, int chunk_count, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < G::kGroupBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[r][i] = 0.0f;
  }
  uint32_t a[2][2][4];
  uint32_t held = 0;  // empty barrier of the stage whose last wgmmas may be unfinished
  int sub = 0;        // chunk inside the stage
#pragma unroll 1
  for (int chunk = 0; chunk < chunk_count; ++chunk) {
    if (sub == 0) mbarrier_wait(ring.full(), ring.phase);
    const uint8_t* tile = moe_smem + G::kW + ring.stage * G::kWBytes +
                          (group * G::kGroupBlocks * G::kStageChunks + sub) * G::kTileBytes;
    const uint64_t b =
        chunk_descriptor(ring.x() + static_cast<uint32_t>(sub * G::kTileTokens * kRowBytes));
    TileFragment<G::kFormat> fragment[G::kGroupBlocks];
#pragma unroll
    for (int r = 0; r < G::kGroupBlocks; ++r) {
      fragment[r].load(tile + r * G::kStageChunks * G::kTileBytes, warp, lane);
      uint32_t(&buffer)[2][4] = a[G::kGroupBlocks == 1 ? 0 : r];
      fragment[r].template step<0>(buffer[0]);
      fragment[r].template step<1>(buffer[1]);
      multiply_half<kTokens>(acc[r], buffer, b);
    }
    if (sub == 0) {  // the chunk before this one was the last of its stage
      if (held != 0 && lane == 0) mbarrier_arrive(held);
      held = ring.empty();
    }
#pragma unroll
    for (int r = 0; r < G::kGroupBlocks; ++r) {
      uint32_t(&buffer)[2][4] = a[G::kGroupBlocks == 1 ? 1 : r];
      fragment[r].template step<2>(buffer[0]);
      fragment[r].template step<3>(buffer[1]);
      multiply_half<kTokens>(acc[r], buffer, b + 4);
    }
    if (++sub == G::kStageChunks) {
      sub = 0;
      ring.advance();
    }
  }
  if (sub != 0) ring.advance();
  wgmma_wait<0>();
  if (lane == 0) mbarrier_arrive(held);
}

/// A group's row blocks of an item, from the ring to memory.
template <typename G, int kTokens>
__device__ __forceinline__ void run_item(const StreamArgs& args, const WorkItem& item, Ring<G>& ring,
                                         int group, int warp, int lane) {
  float acc[G::kGroupBlocks][kTokens / 2];
  multiply<G, kTokens>(acc, ring, group, item.chunk_count, warp, lane);
  const int first = group * G::kGroupBlocks;
  const int blocks = min(G::kGroupBlocks, item.blocks - first);
  if (item.product == static_cast<int>(Product::kGateUp)) {
#pragma unroll
    for (int r = 0; r < G::kGroupBlocks; ++r) {
      if (r < blocks) {
        store_activated(args, acc[r], item.expert, item.first_block + first + r, item.row_begin,
                        item.rows, warp, lane);
      }
    }
    proxy_fence();  // h is read by the bulk copy engine
    named_barrier(1 + group, 128);
    if (warp == 0 && lane == 0) add_release(args.work.done + item.tile, blocks);
  } else {
    named_barrier(1 + group, 128);  // the tile's slots and router weights are written
    const int* slots = reinterpret_cast<int*>(moe_smem + G::kRows) + group * 2 * G::kTileTokens;
#pragma unroll
    for (int r = 0; r < G::kGroupBlocks; ++r) {
      if (r < blocks) {
        store_weighted(args, acc[r], item.expert, item.first_block + first + r, item.rows, warp,
                       lane, slots, reinterpret_cast<const float*>(slots + G::kTileTokens));
      }
    }
    named_barrier(1 + group, 128);
  }
}

template <typename G>
__device__ __forceinline__ void run_item_of(const StreamArgs& args, const WorkItem& item,
                                            Ring<G>& ring, int group, int warp, int lane) {
  const int n = item.rows;
  if constexpr (G::kTileTokens == 16) {
    if (n <= 8) {
      run_item<G, 8>(args, item, ring, group, warp, lane);
    } else {
      run_item<G, 16>(args, item, ring, group, warp, lane);
    }
  } else {
    if (n <= 16) {
      run_item<G, 16>(args, item, ring, group, warp, lane);
    } else if (n <= 32) {
      run_item<G, 32>(args, item, ring, group, warp, lane);
    } else if (n <= 48) {
      run_item<G, 48>(args, item, ring, group, warp, lane);
    } else if (n <= 64) {
      run_item<G, 64>(args, item, ring, group, warp, lane);
    } else if (n <= 80) {
      run_item<G, 80>(args, item, ring, group, warp, lane);
    } else if (n <= 96) {
      run_item<G, 96>(args, item, ring, group, warp, lane);
    } else if (n <= 112) {
      run_item<G, 112>(args, item, ring, group, warp, lane);
    } else {
      run_item<G, 128>(args, item, ring, group, warp, lane);
    }
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
    if (item.product < 0) return;
    if (group * G::kGroupBlocks >= item.blocks) {  // past the last row block: only keep the ring turning
      for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
        mbarrier_wait(ring.full(), ring.phase);
        if (lane == 0) mbarrier_arrive(ring.empty());
        ring.advance();
      }
      named_barrier(1 + group, 128);
    } else {
      const int thread = warp * 32 + lane;
      if (item.product == static_cast<int>(Product::kDown) && thread < item.rows) {
        // Fetched here, so that the latency passes before the epilogue needs them.
        int* slots = reinterpret_cast<int*>(moe_smem + G::kRows) + group * 2 * G::kTileTokens;
        const int slot = args.work.slot_of_row[item.row_begin + thread];
        slots[thread] = slot;
        reinterpret_cast<float*>(slots + G::kTileTokens)[thread] = args.router_weights[slot];
      }
      run_item_of<G>(args, item, ring, group, warp, lane);
    }
    if (warp == 0 && lane == 0) mbarrier_arrive(queue.empty());
    queue.advance();
  }
}

template <typename G>
__global__ void __launch_bounds__(G::kThreads, G::kCtasPerSm)
    moe_stream_kernel(const __grid_constant__ StreamArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint32_t smem = smem_address(moe_smem);
  if (smem % 1024 != 0) __trap();  // the swizzle needs it; true wherever no static memory comes first
  if (threadIdx.x == 0) {
    for (int i = 0; i < G::kStages; ++i) {
      mbarrier_init(smem + G::kFull + 8 * i, 2);
      mbarrier_init(smem + G::kEmpty + 8 * i, G::kGroups * 4);
    }
    for (int i = 0; i < kItemSlots; ++i) {
      mbarrier_init(smem + G::kItemFull + 8 * i, 1);
      mbarrier_init(smem + G::kItemEmpty + 8 * i, G::kGroups + 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  proxy_fence();
  allow_next_kernel();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp < G::kGroups * 4) {
    if constexpr (G::kCtasPerSm == 1) grow_registers<240>();
    consume<G>(args, warp / 4, warp % 4, lane);
  } else {
    if constexpr (G::kCtasPerSm == 1) shrink_registers<24>();
    if (warp == G::kGroups * 4 && lane == 0) {
      produce_weights<G>(args);
    } else if (warp == G::kGroups * 4 + 1 && lane == 0) {
      produce_activations<G>(args);
    }
  }
#endif
}

template <typename G>
StreamKernel make_stream_kernel() {
  return StreamKernel{moe_stream_kernel<G>, G::kThreads,   G::kBlocks,
                      G::kTileTokens,       G::kCtasPerSm, static_cast<size_t>(G::kSmemBytes)};
}

/// Narrow: two CTAs an SM, 128 weight rows and up to 16 tokens each: streaming. Wide: one CTA, 256
/// rows by up to 128 tokens: the weights are expanded once for many tokens.
template <FormatId format>
StreamKernel pick_stream_kernel(Geometry geometry) {
  if (geometry == Geometry::kWide) return make_stream_kernel<StreamGeometry<format, 2, 2, 128, 1, 1>>();
  return make_stream_kernel<StreamGeometry<format, 2, 1, 16, 2, 2>>();
}

}  // namespace nibble::kernels::cuda
