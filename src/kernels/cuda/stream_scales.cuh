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
  static constexpr bool kTwoWords = format == FormatId::kNvfp4;
  static constexpr int kShift = format == FormatId::kNvfp4 ? 4 : 7;  // of a byte in its half
  static constexpr uint32_t kUnit =
      static_cast<uint32_t>(format == FormatId::kNvfp4   ? 239
                            : format == FormatId::kMxfp4 ? kE8m0UnitMxfp4
                                                         : kE8m0UnitMxfp8) *
      0x800080u;

  /// Number of the lane's pair of scales among the warp's.
  static __device__ __forceinline__ uint32_t scale_of(int lane) {
    return static_cast<uint32_t>(format == FormatId::kNvfp4 ? lane : lane / 2);
  }
  /// Base bytes of the two rows, with the unit.
  static __device__ __forceinline__ uint32_t expand_bases(uint32_t two) {
    return (__byte_perm(two, 0, 0x4140) << kShift) + kUnit;
  }
  /// `base` + the codes of a scale that begin at bit `turn` of `word` and may end in `next`.
  static __device__ __forceinline__ uint32_t add_codes(uint32_t base, uint32_t word, uint32_t next,
                                                       uint32_t turn) {
    if constexpr (kTwoWords) {
      const uint32_t both = __funnelshift_r(word, next, turn);
      constexpr int kBits = csf_bits(format);
      constexpr uint32_t kLow = (1u << kBits) - 1;
      uint32_t sum;  // as products, because the compiler would make more of shifts
      asm("mad.lo.u32 %0, %1, %2, %3;"
          : "=r"(sum)
          : "r"(both & kLow << kBits), "n"(1 << (16 + kShift - kBits)), "r"(base));
      asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(both & kLow), "n"(1 << kShift), "r"(sum));
      return sum;
    } else {
      constexpr uint32_t kCode = ((1u << csf_bits(format)) - 1) * 0x10001u;
      return (__funnelshift_r(word, word, turn) & kCode << kShift) + base;
    }
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

/// A lane's words of compressed scales, as they lie in a warp's part of a tile.
template <FormatId format>
struct ScaleWords {
  uint32_t word, next;  // next: NVFP4 alone
};

/// What a lane keeps for the compressed scales of 16 rows over all of K.
template <FormatId format>
struct LaneScales {
  using Halves = ScaleHalves<format>;
  uint32_t base = 0;             // of the lane's two rows, with the unit
  uint32_t place = 0, next = 0;  // bytes from a warp's words to the lane's
  uint32_t turn = 0;             // and where in them its codes begin
  uint32_t left = 0;             // exceptions not met yet, and kOdd; 0: base + code is all there is
  uint32_t end = 0;              // of the warp's exceptions in the list

  static constexpr uint32_t kOdd = 0x80000000u;

  __device__ __forceinline__ void start(const CsfWarpRows& rows, int lane) {
    base = Halves::expand_bases(rows.bases[lane / 4]);
    const CsfPlace at = csf_place(format, static_cast<int>(Halves::scale_of(lane)));
    place = static_cast<uint32_t>(4 * at.word);
    next = static_cast<uint32_t>(4 * at.next);
    turn = static_cast<uint32_t>(at.turn);
    // Of lane 0, so that the compiler knows that all lanes go the same way.
    left =
        static_cast<uint32_t>(uniform(static_cast<int>(rows.count | (rows.odd != 0 ? kOdd : 0))));
    end = rows.first + rows.count;
  }
  __device__ __forceinline__ void load(ScaleWords<format>& to, const uint8_t* words) const {
    to.word = *reinterpret_cast<const uint32_t*>(words + place);
    if constexpr (Halves::kTwoWords) to.next = *reinterpret_cast<const uint32_t*>(words + next);
  }
  __device__ __forceinline__ bool regular() const { return left == 0; }
  /// BF16 of the two rows in a chunk, where regular().
  __device__ __forceinline__ uint32_t scales(const ScaleWords<format>& words) const {
    return Halves::add_codes(base, words.word, words.next, turn);
  }
  /// The same of kChunks chunks from `chunk` on, whatever they are; chunks come in order.
  template <int kChunks>
  __device__ __forceinline__ void any_scales(uint32_t (&to)[kChunks],
                                             const ScaleWords<format> (&words)[kChunks],
                                             const uint32_t* exceptions, int chunk, int lane) {
    const uint32_t first = 2 * Halves::scale_of(lane);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      to[i] = Halves::add_codes(base - Halves::kUnit, words[i].word, words[i].next, turn);
    }
#pragma unroll 1
    for (; (left & ~kOdd) != 0; --left) {
      const uint32_t word = exceptions[end - (left & ~kOdd)];
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
};

/// What a lane keeps for the compressed scales of an item's row block.
template <typename G>
struct RowScales : LaneScales<G::kFormat> {
  const uint32_t* exceptions = nullptr;

  __device__ __forceinline__ void start(const StreamArgs& args, bool down, const uint8_t* rows,
                                        int group, int warp, int lane) {
    exceptions = (down ? args.weights.down : args.weights.gate_up).csf.exceptions;
    LaneScales<G::kFormat>::start(reinterpret_cast<const CsfWarpRows*>(rows)[4 * group + warp],
                                  lane);
    const auto words = static_cast<uint32_t>(G::kCodeBytes + 4 * warp * csf_warp_words(G::kFormat));
    this->place += words;
    this->next += words;
    // Kept, not computed again for every chunk.
    asm volatile("" : "+r"(this->base), "+r"(this->place), "+r"(this->next), "+r"(this->turn));
  }
};

/// A warp's weights of a tile. Compressed scales need finish() or finish_regular() between load()
/// and the use of the fragment's scales.
template <typename G>
struct TileWeights {
  static constexpr FormatId kFormat = G::kFormat;
  TileFragment<kFormat> fragment;
  ScaleWords<kFormat> words[1];  // compressed scales only

  __device__ __forceinline__ void load(const uint8_t* tile, const RowScales<G>& rows,
                                       const LevelTable& table, int warp, int lane) {
    if constexpr (kFormat == FormatId::kNf3) fragment.table = table;
    if constexpr (!G::kCsf) {
      fragment.load(tile, tile + tile_scales_at(kFormat), warp, lane);
    } else {
      fragment.load_codes(tile, warp, lane);
      rows.load(words[0], tile);
    }
  }
  /// Where rows.regular().
  __device__ __forceinline__ void finish_regular(const RowScales<G>& rows) {
    if constexpr (G::kCsf) fragment.set_scales(rows.scales(words[0]));
  }
  __device__ __forceinline__ void finish(RowScales<G>& rows, int chunk, int lane) {
    if constexpr (G::kCsf) {
      uint32_t scales[1] = {rows.scales(words[0])};
      if (!rows.regular()) rows.any_scales(scales, words, rows.exceptions, chunk, lane);
      fragment.set_scales(scales[0]);
    }
  }
};

}  // namespace nibble::kernels::cuda
