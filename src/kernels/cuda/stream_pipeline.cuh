// How work and bytes reach the multiplying warps of moe_stream_sm90.cuh: geometry of a CTA, the
// ring of stages in shared memory, the queue of work items, and the two producer warps.
#pragma once

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/moe_stream.h"
#include "kernels/cuda/stage_ring.cuh"

namespace nibble::kernels::cuda {

constexpr int kItemSlots = 8;
constexpr int kMaxStages = 16;

struct WorkItem {
  int product;  // Product, or -1: no more work
  int tile, expert, row_begin, rows;
  int first_block, blocks;  // row blocks of this item
  int chunk_count;
};

extern __shared__ __align__(1024) uint8_t moe_smem[];

/// Sizes and places of one geometry; kStageChunks chunks of K travel together. Everything lies at
/// compile-time offsets in shared memory, which saves the registers that addresses would take.
template <FormatId format, ScaleForm form, bool warp_mma, int groups, int tile_tokens,
          int stage_chunks, int ctas_per_sm, int cta_bytes>
struct StreamGeometry {
  static constexpr bool kWarpMma = warp_mma;  // mma.sync instead of wgmma
  static constexpr FormatId kFormat = format;
  static constexpr ScaleForm kForm = form;
  static constexpr bool kCsf = form == ScaleForm::kCsf;
  static constexpr bool kRescale = format == FormatId::kFp8Block;  // FP32 scales after each chunk
  static constexpr int kGroups = groups;  // warpgroups that multiply, one row block each
  static constexpr int kTileTokens = tile_tokens;
  static constexpr int kStageChunks = stage_chunks;
  static constexpr int kCtasPerSm = ctas_per_sm;
  static constexpr int kThreads = groups * 128 + (warp_mma ? 64 : 128);
  // Rows of x come from wherever their tokens are, by copies of a warp's lanes. With many tokens
  // such copies cost more than sorting x beforehand: GLM at 4096 tokens 3420 us against 3041.
  static constexpr bool kGathers = warp_mma;
  static constexpr int kFullArrivals = 1 + (kGathers ? 32 : 1);  // weights', activations'
  static constexpr int kTileBytes = kCsf ? tile_code_bytes(format) : tile_bytes(format);
  // Compressed scales come before their group's first chunk, their rows before all.
  static constexpr int kScaleBytes = kCsf ? kCsfRowsBytes + csf_group_bytes(format) : 0;
  static constexpr int kBlockBytes = kScaleBytes + stage_chunks * kTileBytes;  // of a row block
  static constexpr int kXBytes = stage_chunks * tile_tokens * kRowBytes;
  static constexpr int kWBytes = kGroups * kBlockBytes;
  static constexpr int kTailBytes = 2 * kMaxStages * 8 + 2 * kItemSlots * 8 +
                                    kItemSlots * static_cast<int>(sizeof(WorkItem)) +
                                    groups * tile_tokens * static_cast<int>(sizeof(RowTarget)) + 16;
  static constexpr int kBudget = cta_bytes - kTailBytes;
  static constexpr int kFit = kBudget / (kXBytes + kWBytes);
  static constexpr int kStages = kFit < kMaxStages ? kFit : kMaxStages;
  static constexpr int kW = kStages * kXBytes;  // the activations come first: 1024-byte aligned
  static constexpr int kFull = kW + kStages * kWBytes;
  static constexpr int kEmpty = kFull + 8 * kMaxStages;
  static constexpr int kItemFull = kEmpty + 8 * kMaxStages;
  static constexpr int kItemEmpty = kItemFull + 8 * kItemSlots;
  static constexpr int kItems = kItemEmpty + 8 * kItemSlots;
  static constexpr int kTargets = kItems + kItemSlots * static_cast<int>(sizeof(WorkItem));
  static constexpr int kSmemBytes =
      kTargets + groups * tile_tokens * static_cast<int>(sizeof(RowTarget));
  static_assert(kStages >= 3);
  static_assert(kXBytes % 1024 == 0 && kWBytes % 16 == 0 && kFull % 8 == 0 &&
                kTargets % alignof(RowTarget) == 0);
  static __device__ const uint8_t* smem() { return moe_smem; }
  /// Of the rows of the token tile that a warpgroup multiplies.
  static __device__ RowTarget* row_targets(int group) {
    return reinterpret_cast<RowTarget*>(moe_smem + kTargets) + group * kTileTokens;
  }
};

template <typename G>
struct Ring : StageRing<G> {
  /// Tile `i` of a row block in the stage. Compressed scales of its group, and before the row
  /// block's first what they need of its rows, end where tile 0 begins.
  __device__ const uint8_t* tile(int block, int i) const {
    return moe_smem + G::kW + this->stage * G::kWBytes + block * G::kBlockBytes + G::kScaleBytes +
           i * G::kTileBytes;
  }
  __device__ void wait_full() const { mbarrier_wait(this->full(), this->phase); }
};

/// A role's position in the queue of items: written by the warp that streams weights, read
/// by the other roles.
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
  /// By a whole warp.
  __device__ void push(const WorkItem& pushed, int lane) {
    mbarrier_wait(empty(), phase ^ 1);
    if (lane == 0) {
      item() = pushed;
      mbarrier_arrive(full());
    }
    advance();
  }
};

/// Number of items of both products, and what an index means.
struct ItemMap {
  int first_tile, tiles, up_groups, down_groups;
  __device__ int total() const { return tiles * (up_groups + down_groups); }
};

template <typename G>
__device__ __forceinline__ ItemMap make_map(const StreamArgs& args) {
  const int64_t hidden = args.shape.hidden, inter = args.shape.inter;
  auto groups = [&](Product p, int flag) {
    return (args.products & flag) == 0
               ? 0
               : static_cast<int>((row_blocks(p, hidden, inter) + G::kGroups - 1) / G::kGroups);
  };
  ItemMap map;
  map.up_groups = groups(Product::kGateUp, kRunGateUp);
  map.down_groups = groups(Product::kDown, kRunDown);
  map.first_tile = args.work.counters[kGroupTiles + args.group];
  map.tiles = args.work.counters[kGroupTiles + args.group + 1] - map.first_tile;
  return map;
}

template <typename G>
__device__ __forceinline__ WorkItem make_item(const StreamArgs& args, const ItemMap& map,
                                              int index) {
  WorkItem item;
  item.product = -1;
  if (index >= map.total()) return item;
  const bool down = index >= map.tiles * map.up_groups;
  const int local = down ? index - map.tiles * map.up_groups : index;
  const int groups = down ? map.down_groups : map.up_groups;
  const auto product = down ? Product::kDown : Product::kGateUp;
  const int all_blocks = static_cast<int>(row_blocks(product, args.shape.hidden, args.shape.inter));
  item.tile = map.first_tile + local / groups;
  const TokenTile tile = args.work.tiles[item.tile];
  item.product = static_cast<int>(product);
  item.expert = tile.expert;
  item.row_begin = tile.row_begin;
  item.rows = tile.rows;
  item.first_block = local % groups * G::kGroups;
  item.blocks = min(G::kGroups, all_blocks - item.first_block);
  item.chunk_count = static_cast<int>(chunks(down ? args.shape.inter : args.shape.hidden));
  return item;
}

/// Takes items, publishes them, streams their weights, one lane a row block. (With one lane
/// for all copies, issuing them is the limit of the wide geometry.)
template <typename G>
__device__ void produce_weights(const StreamArgs& args, int lane) {
  Ring<G> ring;
  ItemQueue<G> queue;
  const uint64_t policy = evict_first_policy();
  const int64_t hidden = args.shape.hidden, inter = args.shape.inter;
  const ItemMap map = make_map<G>(args);
  auto take = [&] {
    const int taken = lane == 0 ? atomicAdd(args.work.counters + kNextItem + args.next_item, 1) : 0;
    return uniform(taken) + static_cast<int>(gridDim.x);
  };
  WorkItem item = make_item<G>(args, map, static_cast<int>(blockIdx.x));
  while (item.product >= 0) {
    queue.push(item, lane);
    // The next item's index and tile are fetched while this one streams.
    const WorkItem next = make_item<G>(args, map, take());
    const bool down = item.product == static_cast<int>(Product::kDown);
    const int64_t block_bytes = row_block_bytes(G::kFormat, G::kForm, item.chunk_count);
    const int64_t first_block =
        item.expert * row_blocks(down ? Product::kDown : Product::kGateUp, hidden, inter) +
        item.first_block;
    const uint8_t* source =
        reinterpret_cast<const uint8_t*>((down ? args.weights.down : args.weights.gate_up).tiles) +
        (first_block + lane) * block_bytes + (G::kCsf ? kCsfRowsAt : 0);
    for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
      const int left = item.chunk_count - chunk;
      const int scale_bytes = G::kCsf && chunk % kCsfChunks == 0
                                  ? csf_group_bytes(G::kFormat) + (chunk == 0 ? kCsfRowsBytes : 0)
                                  : 0;
      const auto bytes =
          static_cast<uint32_t>(scale_bytes + min(G::kStageChunks, left) * G::kTileBytes);
      mbarrier_wait(ring.empty(), ring.phase ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect(ring.full(), bytes * static_cast<uint32_t>(item.blocks));
      }
      if (lane < item.blocks) {
        bulk_load_streaming(
            ring.w() + static_cast<uint32_t>(lane * G::kBlockBytes + G::kScaleBytes - scale_bytes),
            source, bytes, ring.full(), policy);
      }
      source += bytes;
      ring.advance();
    }
    item = next;
  }
  queue.push(item, lane);
}

/// A tile's rows of x, wherever their tokens are: eight lanes copy a row of a chunk, swizzled as
/// chunk_offset says. Rows and chunks that nobody asks for are left as they are or hold anything.
template <typename G>
__device__ __forceinline__ void gather_rows(const StreamArgs& args, const WorkItem& item,
                                            Ring<G>& ring, int lane) {
  constexpr int kFours = G::kTileTokens / 4;  // four rows at once
  const uint8_t* source[kFours];
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int row = min(4 * i + lane / 8, item.rows - 1);  // behind the tile's rows: any
    source[i] =
        args.work.x + int64_t{16} * (args.work.unit_of_row[item.row_begin + row] + lane % 8);
  }
  const auto swizzled = static_cast<uint32_t>(lane / 8 * kRowBytes + (lane % 8 ^ lane / 8) * 16);
#pragma unroll 1
  for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
    mbarrier_wait(ring.empty(), ring.phase ^ 1);
    const uint32_t even = ring.x() + swizzled, odd = ring.x() + (swizzled ^ 64);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (4 * i >= item.rows) break;
#pragma unroll
      for (int sub = 0; sub < G::kStageChunks; ++sub) {  // behind the last chunk: whatever follows
        copy_unit_async((i % 2 == 0 ? even : odd) +
                            static_cast<uint32_t>((sub * G::kTileTokens + 4 * i) * kRowBytes),
                        source[i] + sub * kRowBytes);
      }
      source[i] += G::kStageChunks * kRowBytes;
    }
    arrive_with_copies(ring.full());
    ring.advance();
  }
}

/// A tile's rows that lie sorted, as shared memory wants them: of h, or of x (the workspace says
/// when). One lane a chunk.
template <typename G>
__device__ __forceinline__ void load_rows(const StreamArgs& args, const WorkItem& item,
                                          Ring<G>& ring, int lane) {
  const bool down = item.product == static_cast<int>(Product::kDown);
  if (down) {
    if (lane == 0) {
      const int up_blocks =
          static_cast<int>(row_blocks(Product::kGateUp, args.shape.hidden, args.shape.inter));
      while (load_acquire(args.work.done + item.tile) < up_blocks) __nanosleep(20);
    }
    __syncwarp();
    proxy_fence();
  }
  const int64_t chunk_stride = args.work.capacity * kRowBytes;
  const uint8_t* source = (down ? args.work.h : args.work.x) +
                          static_cast<int64_t>(item.row_begin) * kRowBytes + lane * chunk_stride;
  const uint32_t bytes = static_cast<uint32_t>(((item.rows + 7) & ~7) * kRowBytes);
#pragma unroll 1
  for (int chunk = 0; chunk < item.chunk_count; chunk += G::kStageChunks) {
    const int here = min(G::kStageChunks, item.chunk_count - chunk);
    mbarrier_wait(ring.empty(), ring.phase ^ 1);
    if (lane == 0) {
      mbarrier_arrive_expect(ring.full(), bytes * static_cast<uint32_t>(here));
    } else if (G::kGathers) {
      mbarrier_arrive(ring.full());
    }
    if (G::kGathers) proxy_fence();  // gather_rows() may have written there
    __syncwarp();
    if (lane < here) {
      bulk_load(ring.x() + static_cast<uint32_t>(lane * G::kTileTokens * kRowBytes), source, bytes,
                ring.full());
    }
    source += G::kStageChunks * chunk_stride;
    ring.advance();
  }
}

/// The warp behind that of the weights: each item's token tile.
template <typename G>
__device__ void produce_activations(const StreamArgs& args, int lane) {
  Ring<G> ring;
  ItemQueue<G> queue;
  for (;;) {
    mbarrier_wait(queue.full(), queue.phase);
    const WorkItem item = queue.item();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(queue.empty());
    queue.advance();
    if (item.product < 0) return;
    if (G::kGathers && item.product == static_cast<int>(Product::kGateUp)) {
      if constexpr (G::kGathers) gather_rows<G>(args, item, ring, lane);
    } else {
      load_rows<G>(args, item, ring, lane);
    }
  }
}

}  // namespace nibble::kernels::cuda
