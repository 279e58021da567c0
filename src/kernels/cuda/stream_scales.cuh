// Weights of a tile in a warp's registers, for moe_stream_sm90.cuh, with plain or with compressed
// scales. Compressed ones (layout.h, csf_index.h) are code + base, which is the BF16 scale at once;
// only row blocks with exceptions, which are rare, need more.
#pragma once

#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/stream_pipeline.cuh"

namespace nibble::kernels::cuda {

/// Compressed scales of a lane's low and high row in the halves of a register. Added to the base
/// with its unit, codes are the scales in BF16 (dequant.cuh), NVFP4 from byte 8 on: smaller ones
/// are subnormal.
template <FormatId format>
struct ScaleHalves {
  static constexpr int kShift = csf_shift(format);
  static constexpr uint32_t kUnit =
      static_cast<uint32_t>(format == FormatId::kNvfp4   ? 239
                            : format == FormatId::kMxfp4 ? kE8m0UnitMxfp4
                                                         : kE8m0UnitMxfp8) *
      0x800080u;

  /// Base bytes of the two rows, with the unit.
  static __device__ __forceinline__ uint32_t expand_bases(uint32_t two) {
    return (__byte_perm(two, 0, 0x4140) << kShift) + kUnit;
  }
  /// The byte of the low (0) or the high row (1) becomes `value`.
  static __device__ __forceinline__ void patch(uint32_t& halves, uint32_t row, uint32_t value) {
    if (row == 0) halves = __byte_perm(halves, value << kShift, 0x3254);
    if (row == 1) halves = __byte_perm(halves, value << kShift, 0x5410);
  }
  /// The scales of any bytes.
  static __device__ __forceinline__ uint32_t scales(uint32_t halves) {
    if constexpr (format == FormatId::kNvfp4) return expand_e4m3_halves(halves);
    return halves + kUnit;
  }
};

/// What a lane keeps for the compressed scales of 16 rows over all of K.
template <FormatId format>
struct LaneScales {
  using Halves = ScaleHalves<format>;
  uint32_t base = 0;           // of the lane's two rows, with the unit
  CsfWords words;              // of the group at hand; the one for two lanes as it lies there
  uint32_t turn = 0;           // how far that one is turned
  bool regular = true;         // base + code is all there is to them
  uint32_t next = 0, end = 0;  // where the exceptions not met yet lie in the list

  __device__ __forceinline__ void start(const CsfWarpRows& rows, int lane) {
    base = Halves::expand_bases(rows.bases[lane / 4]);
    keep(base);
    turn = static_cast<uint32_t>(csf_turn(format, lane));
    // By vote, so that the compiler knows that all lanes go the same way.
    regular = __any_sync(~0u, (rows.count | rows.odd) != 0) == 0;
    next = rows.first;
    end = rows.first + rows.count;
  }
  /// A group's words: of the warp's lanes (`own`; NVFP4 alone) and of two lanes each (`pairs`).
  __device__ __forceinline__ void load(const uint8_t* own, const uint8_t* pairs, int lane) {
    if constexpr (format == FormatId::kNvfp4) {
      words.own = reinterpret_cast<const uint32_t*>(own)[lane];
    }
    words.pair = reinterpret_cast<const uint32_t*>(pairs)[lane / 2];
  }
  /// BF16 of the two rows in chunk `c` of the group, where they are regular.
  __device__ __forceinline__ uint32_t scales(int c) const { return codes(c) + base; }
  /// The same of kChunks chunks from `chunk` on, number `in_group` of their group, whatever they
  /// are; chunks come in order.
  template <int kChunks>
  __device__ __forceinline__ void any_scales(uint32_t (&to)[kChunks], const uint32_t* exceptions,
                                             int chunk, int in_group, int lane) {
    const auto first = static_cast<uint32_t>(format == FormatId::kNvfp4 ? 2 * lane : lane & ~1);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      to[i] = codes(in_group + i) + (base - Halves::kUnit);
    }
#pragma unroll 1
    for (; next != end; ++next) {
      const uint32_t word = exceptions[next];
      const int in = static_cast<int>(word >> 8 & 0xFFFF) - chunk;
      if (in >= kChunks) break;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if (in == i) Halves::patch(to[i], (word & 0xFF) - first, word >> 24);
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) to[i] = Halves::scales(to[i]);
  }

 private:
  __device__ __forceinline__ uint32_t codes(int c) const {
    if constexpr (format == FormatId::kNvfp4) {
      return csf_codes(format, {words.own, __funnelshift_r(words.pair, words.pair, turn)}, c);
    } else {
      return csf_codes(format, words, c);
    }
  }
};

/// What a lane keeps for the compressed scales of an item's row block.
template <typename G>
struct RowScales : LaneScales<G::kFormat> {
  const uint32_t* exceptions = nullptr;

  /// `end`: where the first of the row block's groups ends, which its rows come before.
  __device__ __forceinline__ void start(const StreamArgs& args, bool down, const uint8_t* end,
                                        int warp, int lane) {
    exceptions = (down ? args.weights.down : args.weights.gate_up).exceptions;
    const auto* rows =
        reinterpret_cast<const CsfWarpRows*>(end - csf_group_bytes(G::kFormat) - kCsfRowsBytes);
    LaneScales<G::kFormat>::start(rows[warp], lane);
    if constexpr (!G::kWarpMma) {  // one wgmma is of all four warps: they must go the same way
      const CsfWarpRows& any = rows[lane % (kCsfRowsBytes / static_cast<int>(sizeof(CsfWarpRows)))];
      this->regular = __any_sync(~0u, (any.count | any.odd) != 0) == 0;
    }
  }
  /// The words of the group that ends at `end`.
  __device__ __forceinline__ void load_group(const uint8_t* end, int warp, int lane) {
    const uint8_t* group = end - csf_group_bytes(G::kFormat);
    this->load(group + 128 * warp, group + csf_pairs_at(G::kFormat) + 64 * warp, lane);
  }
};

/// A warp's weights of a tile. Compressed scales that are not regular need finish() between load()
/// and the use of the fragment's scales.
template <typename G>
struct TileWeights {
  static constexpr FormatId kFormat = G::kFormat;
  TileFragment<kFormat> fragment;

  /// `in_group`: the chunk's number in its group, whose words are loaded (compressed scales only).
  __device__ __forceinline__ void load(const uint8_t* tile, const RowScales<G>& rows, int in_group,
                                       const LevelTable& table, int warp, int lane) {
    if constexpr (kFormat == FormatId::kNf3) fragment.table = table;
    if constexpr (!G::kCsf) {
      fragment.load(tile, tile + tile_scales_at(kFormat), warp, lane);
    } else {
      const uint32_t scales = rows.scales(in_group);
      fragment.load_codes(tile, warp, lane);
      fragment.set_scales(scales);
    }
  }
  __device__ __forceinline__ void finish(RowScales<G>& rows, int chunk, int lane) {
    if constexpr (G::kCsf) {
      uint32_t scales[1];
      rows.any_scales(scales, rows.exceptions, chunk, chunk % kCsfChunks, lane);
      fragment.set_scales(scales[0]);
    }
  }
};

}  // namespace nibble::kernels::cuda
