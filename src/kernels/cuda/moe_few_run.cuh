// How the kernel for a few slots (moe_few.cuh) multiplies: 16 rows of a matrix by one warp, over
// all of K, in the order of all geometries.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/moe_few_stream.cuh"
#include "kernels/cuda/stream_scales.cuh"

namespace nibble::kernels::cuda {

/// Scales where kCsfFlag is set, by a whole warp. `room`: NVFP4's; with MX formats it lies in the
/// codes of all lanes. `begin`, `list`: the tile's exceptions, if the room does not hold them.
template <FormatId format>
__device__ __forceinline__ uint32_t irregular_scales(uint32_t codes, uint32_t turn, uint32_t base,
                                                     uint32_t room, const uint32_t* begin,
                                                     const uint32_t* list, int quarter, int lane) {
  using Halves = ScaleHalves<format>;
  if constexpr (csf_warp_words(format) == csf_code_words(format)) {
    room = 0;
#pragma unroll
    for (int w = 0; w < csf_code_words(format); ++w) {
      room |= Halves::room_part(__shfl_sync(~0u, codes, w * (32 / csf_code_words(format))), w);
    }
  }
  return Halves::irregular(codes, turn, base, room, lane, [&](uint32_t& halves) {
    Halves::patch_list(halves, begin, list, quarter, lane);
  });
}

/// What a lane keeps for a task's compressed scales.
template <FormatId format>
struct FewScales {
  using Halves = ScaleHalves<format>;
  uint32_t base = 0, turn = 0;

  __device__ __forceinline__ void start(const uint8_t* bases, int lane) {
    base = Halves::expand_bases(reinterpret_cast<const uint16_t*>(bases)[lane / 4]);
    turn = static_cast<uint32_t>(csf_turn(format, static_cast<int>(Halves::scale_of(lane))));
  }
  /// BF16 of the two rows where kCsfFlag is clear.
  __device__ __forceinline__ uint32_t regular(uint32_t codes) const {
    return Halves::regular(codes, turn, base);
  }
  /// The same for any chunk. `tile`: its number in its matrix.
  __device__ __forceinline__ uint32_t any(uint32_t codes, uint32_t room, const FewArgs& args,
                                          bool down, int64_t tile, int quarter, int lane) const {
    if (!__any_sync(~0u, static_cast<int32_t>(codes) < 0)) return regular(codes);
    const MoeWeights& w = args.weights;
    return irregular_scales<format>(
        codes, turn, base, room,
        (down ? w.down.csf.exception_begin : w.gate_up.csf.exception_begin) + tile,
        down ? w.down.csf.exceptions : w.gate_up.csf.exceptions, quarter, lane);
  }
};

/// A warp's share of one chunk, as it lies in memory.
template <typename P>
struct FewRaw {
  static constexpr FormatId kFormat = P::kFormat;
  TileFragment<kFormat> fragment;  // its codes
  uint32_t scales, room;           // compressed: the lane's word of codes, and NVFP4's room

  /// Chunk `sub` of the stage at `place`.
  __device__ __forceinline__ void load(const uint8_t* place, int sub, int quarter, int lane) {
    const uint8_t* codes = place + sub * P::kCodeUnits * 16;
    const uint8_t* at = place + P::kScalesAt + sub * P::kScaleUnits * 16;
    if constexpr (kFormat == FormatId::kBf16) {
      fragment.load(codes, 0, lane);
    } else if constexpr (P::kRescale) {
      fragment.load(codes, at, 0, lane);
    } else {
      if constexpr (kFormat == FormatId::kNf3) {
        fragment.load_codes(codes, codes + 256, 0, lane);
      } else {
        fragment.load_codes(codes, 0, lane);
      }
      if constexpr (!P::kCsf) {
        scales = two_scales<kFormat>(at, 0, lane);
      } else {
        const auto* words = reinterpret_cast<const uint32_t*>(at);
        scales = words[ScaleHalves<kFormat>::scale_of(lane) / csf_per_word(kFormat)];
        if constexpr (kFormat == FormatId::kNvfp4) room = words[csf_code_words(kFormat)];
      }
    }
  }
};

/// The same, expanded: the A operands of the chunk's four steps.
template <typename P>
struct FewWeights {
  uint32_t a[4][4];
  float2 scales;  // block FP8: of the sum over the chunk

  __device__ __forceinline__ void expand(const TileFragment<P::kFormat>& f) {
    if constexpr (P::kRescale) scales = f.scales;
    f.template step<0>(a[0]);
    f.template step<1>(a[1]);
    f.template step<2>(a[2]);
    f.template step<3>(a[3]);
  }
  __device__ __forceinline__ void multiply(float (&acc)[4], const uint4 (&tokens)[2]) const {
    float fresh[4] = {};
    float(&sum)[4] = P::kRescale ? fresh : acc;
    mma_m16n8k16(sum, a[0], tokens[0].x, tokens[0].y);
    mma_m16n8k16(sum, a[1], tokens[0].z, tokens[0].w);
    mma_m16n8k16(sum, a[2], tokens[1].x, tokens[1].y);
    mma_m16n8k16(sum, a[3], tokens[1].z, tokens[1].w);
    if constexpr (P::kRescale) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[i] = __fmaf_rn(sum[i], i < 2 ? scales.x : scales.y, acc[i]);
    }
  }
};

/// One task over all of K. A stage's words are in registers while the stage before is multiplied; a
/// turn of the loop is one straight piece of code, so that codes are expanded beside the products
/// of the chunk before: alone on its scheduler, a warp is bound by the latency of this chain. One
/// piece of code for both products: every launch meets it cold, and fetching instructions takes as
/// long as running them once.
template <typename P>
struct FewRun {
  const FewArgs& args;
  FewStream<P>& stream;
  const uint8_t* const ring;  // the warp's
  const int lane;
  int place = 0;  // of the stage in `raw`
  FewRaw<P> raw[P::kStageChunks];
  FewScales<P::kFormat> scales;
  LevelTable table;

  __device__ __forceinline__ FewRun(const FewArgs& a, FewStream<P>& s, const uint8_t* own_ring,
                                    int own_lane)
      : args(a), stream(s), ring(own_ring), lane(own_lane) {}
  /// 16 rows of a matrix and what they are multiplied with.
  struct Task {
    bool down;
    int quarter, chunk_count;
    int64_t tile;        // number of the first in its matrix
    const uint8_t* row;  // the lane's token at its columns of the first chunk
  };
  __device__ __forceinline__ const uint8_t* at(int p) const { return ring + p * P::kPlaceBytes; }

  /// All that does not need the tokens.
  __device__ __forceinline__ void begin(const Task& t) {
    wait_copies<P::kPlaces - 1>();
    __syncwarp();
    if constexpr (P::kFormat == FormatId::kNf3) {
      table = level_table((t.down ? args.weights.down : args.weights.gate_up).levels);
    }
    if constexpr (P::kCsf) scales.start(at(place) + P::kBasesAt, lane);
#pragma unroll
    for (int i = 0; i < P::kStageChunks; ++i) raw[i].load(at(place), i, t.quarter, lane);
  }
  /// The scales of the stage in `raw` as the fragments want them; compressed ones of all its chunks
  /// are tested at once.
  __device__ __forceinline__ void ready_scales(const Task& t, int chunk) {
    if constexpr (P::kCsf) {
      uint32_t flags = 0;
#pragma unroll
      for (int i = 0; i < P::kStageChunks; ++i) flags |= raw[i].scales;
      if (!__any_sync(~0u, static_cast<int32_t>(flags) < 0)) {  // kCsfFlag
#pragma unroll
        for (int i = 0; i < P::kStageChunks; ++i) raw[i].scales = scales.regular(raw[i].scales);
      } else {
#pragma unroll
        for (int i = 0; i < P::kStageChunks; ++i) {
          raw[i].scales = scales.any(raw[i].scales, raw[i].room, args, t.down, t.tile + chunk + i,
                                     t.quarter, lane);
        }
      }
    }
  }
  __device__ __forceinline__ void expand(FewWeights<P>& to, FewRaw<P>& from) const {
    if constexpr (P::kFormat == FormatId::kNf3) from.fragment.table = table;
    if constexpr (P::kCsf) {
      from.fragment.set_scales(from.scales);
    } else if constexpr (P::kFormat != FormatId::kBf16 && !P::kRescale) {
      from.fragment.set_scales(from.fragment.expand_scales(from.scales));
    }
    to.expand(from.fragment);
  }
  __device__ __forceinline__ void multiply(float (&acc)[4], const Task& t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < t.chunk_count; chunk += P::kStageChunks) {
      // The next stage is there. This one's place takes the stage kPlaces later.
      wait_copies<P::kPlaces - 2>();
      __syncwarp();
      stream.advance();
      place = place + 1 == P::kPlaces ? 0 : place + 1;
      ready_scales(t, chunk);
#pragma unroll
      for (int i = 0; i < P::kStageChunks; ++i) {
        const auto* from = reinterpret_cast<const uint4*>(t.row + (chunk + i) * kRowBytes);
        const uint4 tokens[2] = {from[0], from[1]};
        FewWeights<P> weights;
        expand(weights, raw[i]);
        raw[i].load(at(place), i, t.quarter, lane);  // behind the task's last stage: not used
        weights.multiply(acc, tokens);
      }
    }
  }
};

}  // namespace nibble::kernels::cuda
