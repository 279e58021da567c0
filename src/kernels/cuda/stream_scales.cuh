// The scale warp of moe_stream_sm90.cuh: expands the compressed scales of each stage into the plain
// form beside it (in shared memory only) and patches the exceptions, ahead of the multiplying
// warps. One warp with wide words needs a fraction of the instructions that four times as many
// multiplying warps would need for the same.
#pragma once

#include "kernels/cuda/stream_pipeline.cuh"

namespace nibble::kernels::cuda {

/// Expands the lane's share of one tile: NVFP4 eight codes of four bits, else four of one bit, of
/// rows g (even bytes) and g + 8 (odd bytes) of warp w, lane = 8 w + g. `base`: both rows' bases,
/// twice.
template <typename G>
__device__ __forceinline__ void expand_scales(const uint8_t* csf, uint8_t* plain, uint32_t base,
                                              int lane) {
  if constexpr (G::kFormat == FormatId::kNvfp4) {
    const uint32_t codes = reinterpret_cast<const uint32_t*>(csf)[lane];
    reinterpret_cast<uint2*>(plain)[lane] =
        make_uint2((codes & 0x0F0F0F0Fu) + base, (codes >> 4 & 0x0F0F0F0Fu) + base);
  } else {
    const uint32_t bits = csf[lane / 2] >> lane % 2 * 4 & 0xFu;
    reinterpret_cast<uint32_t*>(plain)[lane] = (bits * 0x00204081u & 0x01010101u) + base;
  }
}

/// What a lane needs of a coming stage: the bounds of its row block's exceptions and its first one.
/// It waits in shared memory and not in registers, because a register cannot be handed from one
/// round of the loop to the next before its load has returned.
struct ScaleAhead {
  uint32_t begin[32], end[32], word[32];
};
/// Stages by which bounds and first exceptions are fetched ahead. Three is the most that a ring of
/// four stages bears: to know stage k + 3 all before it must be on their way, so k - 2 be free, and
/// the multiplying warps free k - 2 when k - 1 is there.
constexpr int kAheadBounds = 3, kAheadWords = 2;
static_assert(kAheadBounds < kAheadSlots && kAheadBounds + 2 <= kItemSlots);

/// Walks the stages of all items ahead of their expansion and queues the small loads.
template <typename G>
struct ScaleFetcher {
  static constexpr int kLanes = 32 / G::kGroups;  // lanes that patch one row block
  ItemQueue<G> queue;                             // read here, released by the expander
  const uint32_t* begins = nullptr;               // of the lane's row block
  int chunk = 0, chunk_count = 0, stages = 0, items = 0;
  uint32_t down = 0;  // bit stage % 32: the stage belongs to the second product
  bool active = false, done = false;

  static __device__ __forceinline__ const CsfScales& csf(const StreamArgs& args, bool of_down) {
    return (of_down ? args.weights.down : args.weights.gate_up).csf;
  }
  static __device__ __forceinline__ ScaleAhead& ahead(int stage) {
    return reinterpret_cast<ScaleAhead*>(moe_smem + G::kAhead)[stage % kAheadSlots];
  }
  /// [row block][lane] bases of an item.
  static __device__ __forceinline__ uint16_t* bases(int item) {
    return reinterpret_cast<uint16_t*>(moe_smem + G::kBases) + item % kItemSlots * G::kGroups * 32;
  }

  __device__ __forceinline__ void fetch_bounds(const StreamArgs& args, int lane) {
    if (done) return;
    if (chunk >= chunk_count) {
      mbarrier_wait(queue.full(), queue.phase);
      const WorkItem& item = queue.item();
      if (item.product < 0) {
        done = true;
        return;
      }
      queue.advance();
      const bool of_down = item.product == static_cast<int>(Product::kDown);
      const int block =
          item.expert * static_cast<int>(row_blocks(static_cast<Product>(item.product),
                                                    args.shape.hidden, args.shape.inter)) +
          item.first_block;
      chunk = 0;
      chunk_count = item.chunk_count;
      active = lane / kLanes < item.blocks;
      const CsfScales& scales = csf(args, of_down);
      begins = scales.exception_begin +
               static_cast<int64_t>(block + (active ? lane / kLanes : 0)) * chunk_count;
      down = of_down ? down | 1u << stages % 32 : down & ~(1u << stages % 32);
      const auto* source = reinterpret_cast<const uint32_t*>(scales.bases) + block * 16;
      const uint32_t target = smem_address(bases(items++));
#pragma unroll
      for (int i = 0; i < G::kGroups * 16; i += 32) {
        const bool inside = (i + lane) / 16 < item.blocks;
        copy_word_async(target + static_cast<uint32_t>(4 * (i + lane)),
                        source + (inside ? i + lane : 0), inside ? 4 : 0);
      }
    } else {
      const uint32_t before = down >> (stages - 1) % 32 & 1;
      down = before != 0 ? down | 1u << stages % 32 : down & ~(1u << stages % 32);
    }
    ScaleAhead& slot = ahead(stages);
    const int here = min(G::kStageChunks, chunk_count - chunk);
    const int bytes = active ? 4 : 0;
    copy_word_async(smem_address(&slot.begin[lane]), begins + chunk, bytes);
    copy_word_async(smem_address(&slot.end[lane]), begins + chunk + here, bytes);
    chunk += G::kStageChunks;
    ++stages;
  }
  __device__ __forceinline__ void fetch_word(const StreamArgs& args, int stage, int lane) {
    if (stage >= stages) return;
    ScaleAhead& slot = ahead(stage);
    const uint32_t i = slot.begin[lane] + static_cast<uint32_t>(lane % kLanes);
    if (i < slot.end[lane]) {
      copy_word_async(smem_address(&slot.word[lane]), exceptions(args, stage) + i, 4);
    }
  }
  __device__ __forceinline__ const uint32_t* exceptions(const StreamArgs& args, int stage) const {
    return csf(args, (down >> stage % 32 & 1) != 0).exceptions;
  }
};

template <typename G>
__device__ void expand_stages(const StreamArgs& args, int lane) {
  using Fetcher = ScaleFetcher<G>;
  constexpr int kLanes = Fetcher::kLanes;
  Fetcher fetcher;
  for (int i = 0; i < kAheadBounds; ++i) fetcher.fetch_bounds(args, lane);
  copies_wait();
  for (int i = 0; i < kAheadWords; ++i) fetcher.fetch_word(args, i, lane);
  Ring<G> ring;
  ItemQueue<G> queue;
  uint32_t bases[G::kGroups];
  int chunk = 0, chunk_count = 0, items = 0;
  for (int stage = 0; stage < fetcher.stages; ++stage) {
    copies_wait();  // what earlier rounds asked for
    __syncwarp();
    fetcher.fetch_word(args, stage + kAheadWords, lane);
    fetcher.fetch_bounds(args, lane);
    if (chunk >= chunk_count) {
      chunk = 0;
      chunk_count = queue.item().chunk_count;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(queue.empty());
      queue.advance();
      const uint16_t* source = Fetcher::bases(items++);
#pragma unroll
      for (int i = 0; i < G::kGroups; ++i) bases[i] = source[32 * i + lane] * 0x10001u;
    }
    mbarrier_wait(ring.landed(), ring.phase);
#pragma unroll
    for (int i = 0; i < G::kGroups; ++i) {
#pragma unroll
      for (int sub = 0; sub < G::kStageChunks; ++sub) {
        const int tile = i * G::kStageChunks + sub;
        expand_scales<G>(ring.codes(tile) + G::kCodeBytes, ring.scales(tile), bases[i], lane);
      }
    }
    __syncwarp();
    const ScaleAhead& slot = Fetcher::ahead(stage);
    auto patch = [&](uint32_t word) {
      const int sub = static_cast<int>(word >> 8 & 0xFFFF) - chunk;
      ring.scales(lane / kLanes * G::kStageChunks + sub)[word & 0xFF] =
          static_cast<uint8_t>(word >> 24);
    };
    uint32_t i = slot.begin[lane] + static_cast<uint32_t>(lane % kLanes);
    const uint32_t end = slot.end[lane];
    if (i < end) patch(slot.word[lane]);
    for (i += kLanes; i < end; i += kLanes) patch(fetcher.exceptions(args, stage)[i]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.full());
    ring.advance();
    chunk += G::kStageChunks;
  }
}

}  // namespace nibble::kernels::cuda
