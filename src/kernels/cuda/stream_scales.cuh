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

/// What the scale warp must know of one stage, fetched ahead. Small: in the wide geometry the warp
/// has 32 registers.
struct ScaleStage {
  uint32_t begin = 0, end = 0;  // exceptions of the lane's row block in this stage
  uint32_t word = 0;            // the lane's first exception
  int chunk = 0;                // first chunk; 0: the stage starts an item
  int product = -1;             // -1: there are no more stages
};

/// Walks the stages of all items in the order in which they come.
template <typename G>
struct ScaleCursor {
  static constexpr int kLanes = 32 / G::kGroups;  // lanes that patch one row block
  ItemQueue<G> queue;
  uint32_t bases[G::kGroups / 2];  // of the item, two row blocks a word
  uint32_t first_tile = 0;         // of the lane's row block
  int chunk = 0, chunk_count = 0, blocks = 0, product = -1;

  __device__ __forceinline__ const CsfScales& csf(const StreamArgs& args, int of) const {
    return (of == static_cast<int>(Product::kDown) ? args.weights.down : args.weights.gate_up).csf;
  }
  /// Loads are issued, not awaited.
  __device__ __forceinline__ ScaleStage next(const StreamArgs& args, int lane) {
    ScaleStage stage;
    if (chunk >= chunk_count) {
      mbarrier_wait(queue.full(), queue.phase);
      const WorkItem& item = queue.item();
      product = item.product;
      if (product < 0) return stage;
      const int block =
          item.expert * static_cast<int>(row_blocks(static_cast<Product>(product),
                                                    args.shape.hidden, args.shape.inter)) +
          item.first_block;
      chunk = 0;
      chunk_count = item.chunk_count;
      blocks = item.blocks;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(queue.empty());
      queue.advance();
      first_tile = static_cast<uint32_t>((block + lane / kLanes) * chunk_count);
      const uint16_t* source = csf(args, product).bases + static_cast<int64_t>(block) * 32 + lane;
#pragma unroll
      for (int i = 0; i < G::kGroups; i += 2) {
        const uint32_t one = i < blocks ? source[i * 32] : 0;
        const uint32_t two = i + 1 < blocks ? source[i * 32 + 32] : 0;
        bases[i / 2] = one | two << 16;
      }
    }
    stage.product = product;
    stage.chunk = chunk;
    if (lane / kLanes < blocks) {
      const uint32_t* begins = csf(args, product).exception_begin + first_tile + chunk;
      stage.begin = begins[0];
      stage.end = begins[min(G::kStageChunks, chunk_count - chunk)];
    }
    chunk += G::kStageChunks;
    return stage;
  }
};

template <typename G>
__device__ void expand_stages(const StreamArgs& args, int lane) {
  constexpr int kLanes = ScaleCursor<G>::kLanes;
  Ring<G> ring;
  ScaleCursor<G> cursor;
  uint32_t bases[G::kGroups / 2];
  auto fetch_word = [&](ScaleStage& stage) {
    const uint32_t i = stage.begin + static_cast<uint32_t>(lane % kLanes);
    if (i < stage.end) stage.word = cursor.csf(args, stage.product).exceptions[i];
  };
  // Two stages ahead: the bounds of one, the first exceptions of the other.
  ScaleStage now = cursor.next(args, lane);
  if (now.product < 0) return;
#pragma unroll
  for (int i = 0; i < G::kGroups / 2; ++i) bases[i] = cursor.bases[i];
  ScaleStage soon = cursor.next(args, lane);
  fetch_word(now);
  while (now.product >= 0) {
    ScaleStage later;
    const uint32_t* later_bases = cursor.bases;
    uint32_t soon_bases[G::kGroups / 2];
#pragma unroll
    for (int i = 0; i < G::kGroups / 2; ++i) soon_bases[i] = later_bases[i];
    if (soon.product >= 0) {
      later = cursor.next(args, lane);
      fetch_word(soon);
    }
    mbarrier_wait(ring.landed(), ring.phase);
#pragma unroll
    for (int i = 0; i < G::kGroups; ++i) {
      const uint32_t base = __byte_perm(bases[i / 2], 0, i % 2 == 0 ? 0x1010 : 0x3232);
#pragma unroll
      for (int sub = 0; sub < G::kStageChunks; ++sub) {
        const int tile = i * G::kStageChunks + sub;
        expand_scales<G>(ring.codes(tile) + G::kCodeBytes, ring.scales(tile), base, lane);
      }
    }
    __syncwarp();
    auto patch = [&](uint32_t word) {
      const int sub = static_cast<int>(word >> 8 & 0xFFFF) - now.chunk;
      ring.scales(lane / kLanes * G::kStageChunks + sub)[word & 0xFF] =
          static_cast<uint8_t>(word >> 24);
    };
    uint32_t i = now.begin + static_cast<uint32_t>(lane % kLanes);
    if (i < now.end) patch(now.word);
    for (i += kLanes; i < now.end; i += kLanes) {
      patch(cursor.csf(args, now.product).exceptions[i]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.full());
    ring.advance();
    now = soon;
    soon = later;
    if (now.chunk == 0) {  // the first stage of an item
#pragma unroll
      for (int k = 0; k < G::kGroups / 2; ++k) bases[k] = soon_bases[k];
    }
  }
}

}  // namespace nibble::kernels::cuda
