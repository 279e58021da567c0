// Weights of a tile in a warp's registers, for moe_stream_sm90.cuh, with plain or with compressed
// scales. Compressed ones (layout.h, csf_index.h) are code + base, which is the BF16 scale at once,
// and a test whether that is all there is to them.
#pragma once

#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/stream_pipeline.cuh"

namespace nibble::kernels::cuda {

/// Compressed scale bytes of a lane's low and high row in the halves of a register, a byte `kShift`
/// bits up. A unit added makes them the scales in BF16 (dequant.cuh), NVFP4 from byte 8 on: smaller
/// ones are subnormal.
template <FormatId format>
struct ScaleHalves {
  static constexpr int kShift = csf_shift(format);
  static constexpr uint32_t kUnit =
      static_cast<uint32_t>(format == FormatId::kNvfp4   ? 239
                            : format == FormatId::kMxfp4 ? kE8m0UnitMxfp4
                                                         : kE8m0UnitMxfp8)
      << 7;
  static constexpr uint32_t kField = ((1u << csf_bits(format)) - 1) << kShift;
  /// `byte` (0 low row, 1 high row, else not the lane's) becomes `value`.
  static __device__ __forceinline__ void patch(uint32_t& halves, uint32_t byte, uint32_t value) {
    if (byte == 0) halves = __byte_perm(halves, value << kShift, 0x3254);
    if (byte == 1) halves = __byte_perm(halves, value << kShift, 0x5410);
  }
  /// The scales of any bytes.
  static __device__ __forceinline__ uint32_t scales(uint32_t halves) {
    if constexpr (format == FormatId::kNvfp4) return expand_e4m3_halves(halves);
    return halves + kUnit * 0x10001u;
  }
  /// Number of the lane's pair of scales among the warp's.
  static __device__ __forceinline__ uint32_t scale_of(int lane) {
    return static_cast<uint32_t>(format == FormatId::kNvfp4 ? lane : lane / 2);
  }
  /// Base bytes of the two rows, with the unit.
  static __device__ __forceinline__ uint32_t expand_bases(uint32_t two) {
    return (__byte_perm(two, 0, 0x4140) << kShift) + kUnit * 0x10001u;
  }
  /// What word `w` of a warp's codes has of the warp's room: formats without a word for it.
  static __device__ __forceinline__ uint32_t room_part(uint32_t word, int w) {
    return ((word & 7) | (word >> 13 & 56)) << 6 * w;
  }
  /// The scales where kCsfFlag is clear. `codes`: the lane's word; `turn`: csf_turn of its scales.
  static __device__ __forceinline__ uint32_t regular(uint32_t codes, uint32_t turn, uint32_t base) {
    return (__funnelshift_r(codes, codes, turn) & kField * 0x10001u) + base;
  }
  /// The scales where it is set: rare. `room`: the warp's; patch_all(halves) for a room that does
  /// not hold them all.
  template <typename PatchAll>
  static __device__ __forceinline__ uint32_t irregular(uint32_t codes, uint32_t turn, uint32_t base,
                                                       uint32_t room, int lane,
                                                       const PatchAll& patch_all) {
    uint32_t halves = regular(codes, turn, base - kUnit * 0x10001u);
    const uint32_t mine = 0x80u | 2 * scale_of(lane);
    patch(halves, (room & 0xFF) ^ mine, room >> 8 & 0xFF);
    if constexpr (csf_room(format) > 1) patch(halves, (room >> 16 & 0xFF) ^ mine, room >> 24);
    if (room == kCsfOverflow) patch_all(halves);
    return scales(halves);
  }
  /// All exceptions of a tile, `begin` its place in exception_begin: very rare, and slow.
  static __device__ __forceinline__ void patch_list(uint32_t& halves, const uint32_t* begin,
                                                    const uint32_t* list, int warp, int lane) {
    const uint32_t first = 2 * (static_cast<uint32_t>(warp) * (scale_of(31) + 1) + scale_of(lane));
    const uint32_t end = begin[1];
#pragma unroll 1
    for (uint32_t i = begin[0]; i < end; ++i) {
      const uint32_t word = list[i];
      patch(halves, (word & 0xFF) - first, word >> 24);
    }
  }
};

/// What a lane keeps for the compressed scales of its row block. Plain: nothing.
template <typename G>
struct RowScales {
  static constexpr FormatId kFormat = G::kFormat;
  using Halves = ScaleHalves<kFormat>;
  const StreamArgs& args;
  const WorkItem& item;
  int group = 0;
  uint32_t base = 0;   // of the lane's two rows, with the unit, as ScaleHalves
  uint32_t place = 0;  // byte of a tile where the lane's word of codes is
  uint32_t turn = 0;   // and where in the word the lane's codes are

  __device__ __forceinline__ void start(const uint8_t* bases, int row_group, int warp, int lane) {
    group = row_group;
    const uint32_t two = reinterpret_cast<const uint16_t*>(bases)[group * 32 + warp * 8 + lane / 4];
    base = Halves::expand_bases(two);
    const int scale = static_cast<int>(Halves::scale_of(lane));
    place = static_cast<uint32_t>(
        G::kCodeBytes + 4 * (warp * csf_warp_words(kFormat) + scale / csf_per_word(kFormat)));
    turn = static_cast<uint32_t>(csf_turn(kFormat, scale));
    // Kept, not computed again for every chunk.
    asm volatile("" : "+r"(base), "+r"(place), "+r"(turn));
  }
  /// The scales of a lane in a tile where kCsfFlag is set for its warp: rare. `codes`: its word.
  __device__ __forceinline__ uint32_t irregular(const uint8_t* tile, uint32_t codes, int chunk,
                                                int warp, int lane) const {
    const uint32_t* words =
        reinterpret_cast<const uint32_t*>(tile + G::kCodeBytes) + warp * csf_warp_words(kFormat);
    uint32_t room = 0;
    if constexpr (csf_warp_words(kFormat) > csf_code_words(kFormat)) {
      room = words[csf_code_words(kFormat)];
    } else {
#pragma unroll
      for (int w = 0; w < csf_code_words(kFormat); ++w) {
        room |= Halves::room_part(words[w], w);
      }
    }
    return Halves::irregular(codes, turn, base, room, lane,
                             [&](uint32_t& halves) { patch_all(halves, chunk, warp, lane); });
  }

 private:
  /// All exceptions of a tile that has too many for its room: very rare, and slow.
  __device__ __forceinline__ void patch_all(uint32_t& halves, int chunk, int warp, int lane) const {
    const auto product = static_cast<Product>(item.product);
    const int64_t block =
        item.expert * row_blocks(product, args.shape.hidden, args.shape.inter) + item.first_block;
    const int64_t tile = (block + group) * item.chunk_count + chunk;
    auto patch_from = [&](const CsfScales& csf) {
      Halves::patch_list(halves, csf.exception_begin + tile, csf.exceptions, warp, lane);
    };
    // Two calls: with one, of a chosen argument, the compiler copies both to local memory.
    if (product == Product::kDown) {
      patch_from(args.weights.down.csf);
    } else {
      patch_from(args.weights.gate_up.csf);
    }
  }
};

/// A warp's weights of a tile. Compressed scales need finish() or finish_regular() between load()
/// and the use of the fragment's scales, with the tile still in place; both by a whole warp.
template <typename G>
struct TileWeights {
  static constexpr FormatId kFormat = G::kFormat;
  TileFragment<kFormat> fragment;
  uint32_t codes;  // compressed scales only: the lane's word of them

  __device__ __forceinline__ void load(const uint8_t* tile, const RowScales<G>& rows,
                                       const LevelTable& table, int warp, int lane) {
    if constexpr (kFormat == FormatId::kNf3) fragment.table = table;
    if constexpr (!G::kCsf) {
      fragment.load(tile, tile + tile_scales_at(kFormat), warp, lane);
    } else {
      fragment.load_codes(tile, warp, lane);
      codes = *reinterpret_cast<const uint32_t*>(tile + rows.place);
    }
  }
  /// Whether finish_regular() is wrong for this tile or another one of the aligned four chunks.
  __device__ __forceinline__ bool irregular_four() const {
    // By vote, so that the compiler knows that all lanes go the same way.
    return G::kCsf && __any_sync(~0u, (codes & kCsfFourFlag) != 0) != 0;
  }
  __device__ __forceinline__ void finish_regular(const RowScales<G>& rows) {
    if constexpr (G::kCsf) {
      fragment.set_scales(ScaleHalves<kFormat>::regular(codes, rows.turn, rows.base));
    }
  }
  __device__ __forceinline__ void finish(const RowScales<G>& rows, const uint8_t* tile, int chunk,
                                         int warp, int lane) {
    if constexpr (G::kCsf) {
      static_assert(kCsfFlag == 0x80000000u);  // a sign: one instruction
      finish_regular(rows);
      if (__any_sync(~0u, static_cast<int32_t>(codes) < 0)) {
        fragment.set_scales(rows.irregular(tile, codes, chunk, warp, lane));
      }
    }
  }
};

}  // namespace nibble::kernels::cuda
