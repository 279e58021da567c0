// Weights of a tile in a warp's registers, for moe_stream_sm90.cuh, with plain or with compressed
// scales. Compressed ones (csf_index.h) cost hardly more: code + base gives the byte where the
// expansion wants it, and exceptions lie in the tile; one test tells that there are none.
#pragma once

#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/stream_pipeline.cuh"

namespace nibble::kernels::cuda {

/// How scale bytes of a lane's low and high row lie in the halves of a register. E8M0 bytes have
/// the unit of their format added, so that they are BF16 (dequant.cuh).
template <FormatId format>
struct ScaleHalves {
  static constexpr int kShift = format == FormatId::kNvfp4 ? 4 : 7;
  static constexpr uint32_t kUnit = (format == FormatId::kMxfp4   ? kE8m0UnitMxfp4
                                     : format == FormatId::kMxfp8 ? kE8m0UnitMxfp8
                                                                  : 0)
                                    << 7;
  /// `byte` (0 low row, 1 high row, else not the lane's) becomes `value`.
  static __device__ __forceinline__ void patch(uint32_t& halves, uint32_t byte, uint32_t value) {
    const uint32_t v = (value << kShift) + kUnit;
    if (byte == 0) halves = __byte_perm(halves, v, 0x3254);
    if (byte == 1) halves = __byte_perm(halves, v, 0x5410);
  }
};

/// What a row block's warps keep for its compressed scales. Plain: nothing.
template <typename G>
struct RowScales {
  using Halves = ScaleHalves<G::kFormat>;
  const StreamArgs& args;
  const WorkItem& item;
  int group = 0;
  uint32_t base = 0;  // of the lane's two rows, as ScaleHalves

  __device__ __forceinline__ void start(const uint8_t* bases, int row_group, int warp, int lane) {
    group = row_group;
    const uint32_t two = reinterpret_cast<const uint16_t*>(bases)[group * 32 + warp * 8 + lane / 4];
    base = (__byte_perm(two, 0, 0x4140) << Halves::kShift) + Halves::kUnit * 0x10001u;
  }
  /// Number of the lane's low scale among the tile's plain scales.
  static __device__ __forceinline__ uint32_t first_byte(int warp, int lane) {
    return static_cast<uint32_t>(G::kFormat == FormatId::kNvfp4 ? 2 * (warp * 32 + lane)
                                                                : 2 * (warp * 16 + lane / 2));
  }
  /// All exceptions of a tile that has too many for its room: rare, and slow.
  __device__ __forceinline__ void patch_all(uint32_t& halves, int chunk, int warp, int lane) const {
    const auto product = static_cast<Product>(item.product);
    const int64_t block =
        item.expert * row_blocks(product, args.shape.hidden, args.shape.inter) + item.first_block;
    const int64_t tile = (block + group) * item.chunk_count + chunk;
    auto patch_from = [&](const CsfScales& csf) {
      const uint32_t end = csf.exception_begin[tile + 1];
#pragma unroll 1
      for (uint32_t i = csf.exception_begin[tile]; i < end; ++i) {
        const uint32_t word = csf.exceptions[i];
        Halves::patch(halves, (word & 0xFF) - first_byte(warp, lane), word >> 24);
      }
    };
    // Two calls: with one, of a chosen argument, the compiler copies both to local memory.
    if (product == Product::kDown) {
      patch_from(args.weights.down.csf);
    } else {
      patch_from(args.weights.gate_up.csf);
    }
  }
};

template <typename G>
struct TileWeights {
  static constexpr FormatId kFormat = G::kFormat;
  static constexpr int kRoomWords = G::kCsf ? csf_room(kFormat) / 2 : 1;
  TileFragment<kFormat> fragment;
  uint32_t codes, room[kRoomWords];  // compressed scales only

  __device__ __forceinline__ void load(const uint8_t* tile, const LevelTable& table, int warp,
                                       int lane) {
    if constexpr (kFormat == FormatId::kNf3) fragment.table = table;
    if constexpr (!G::kCsf) {
      fragment.load(tile, tile + tile_scales_at(kFormat), warp, lane);
    } else {
      fragment.load_codes(tile, warp, lane);
      const uint8_t* csf = tile + G::kCodeBytes;
      if constexpr (kFormat == FormatId::kNvfp4) {
        codes = csf[warp * 32 + lane];
        const uint2 two = reinterpret_cast<const uint2*>(csf + csf_code_bytes(kFormat))[warp];
        room[0] = two.x;
        room[1] = two.y;
      } else {
        codes = reinterpret_cast<const uint32_t*>(csf)[warp];
        room[0] = reinterpret_cast<const uint32_t*>(csf + csf_code_bytes(kFormat))[warp];
      }
    }
  }
  /// Before the fragment is used: its scales, if they are compressed.
  __device__ __forceinline__ void finish(const RowScales<G>& rows, int chunk, int warp, int lane) {
    if constexpr (G::kCsf) {
      uint32_t halves;
      if constexpr (kFormat == FormatId::kNvfp4) {
        halves = (codes * 0x10010u & 0x00F000F0u) + rows.base;
      } else {
        halves = (codes >> lane / 2 & 0x00010001u) * 0x80u + rows.base;
      }
      if (room[0] != 0) {
        // Flag and number of the lane's low scale among the warp's.
        const uint32_t mine = 0x80u | RowScales<G>::first_byte(0, lane);
        auto patch_two = [&](uint32_t two) {
          ScaleHalves<kFormat>::patch(halves, (two & 0xFF) ^ mine, two >> 8 & 0xFF);
          ScaleHalves<kFormat>::patch(halves, (two >> 16 & 0xFF) ^ mine, two >> 24);
        };
        patch_two(room[0]);
        if constexpr (kRoomWords > 1) {
          if (room[1] != 0) patch_two(room[1]);
        }
        if (room[0] == kCsfOverflow) rows.patch_all(halves, chunk, warp, lane);
      }
      fragment.set_scales(kFormat == FormatId::kNvfp4 ? expand_e4m3_halves(halves) : halves);
    }
  }
};

}  // namespace nibble::kernels::cuda
