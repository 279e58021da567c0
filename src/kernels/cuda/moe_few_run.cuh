// How the kernel for a few slots (moe_few.cuh) multiplies: 16 rows of a matrix by one warp, over
// all of K, in the order of all geometries.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/moe_few_stream.cuh"
#include "kernels/cuda/stream_scales.cuh"

namespace nibble::kernels::cuda {

/// A warp's share of one chunk, as it lies in memory.
template <typename P>
struct FewRaw {
  static constexpr FormatId kFormat = P::kFormat;
  TileFragment<kFormat> fragment;  // its codes
  uint32_t scales;                 // two bytes, or, if they were compressed, BF16

  /// Chunk `sub` of the stage at `place`, but for compressed scales.
  __device__ __forceinline__ void load(const uint8_t* place, int sub, int lane) {
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
      if constexpr (!P::kCsf) scales = two_scales<kFormat>(at, 0, lane);
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
  LaneScales<P::kFormat> scales;
  LevelTable table;

  __device__ __forceinline__ FewRun(const FewArgs& a, FewStream<P>& s, const uint8_t* own_ring,
                                    int own_lane)
      : args(a), stream(s), ring(own_ring), lane(own_lane) {}
  /// 16 rows of a matrix and what they are multiplied with.
  struct Task {
    bool down;
    int chunk_count;
    const uint8_t* row;  // the lane's token at its columns of the first chunk
  };
  __device__ __forceinline__ const uint8_t* at(int p) const { return ring + p * P::kPlaceBytes; }

  /// Number of a stage's first chunk in its group of compressed scales.
  static __device__ __forceinline__ int in_group(int chunk) {
    return P::kStageChunks == kCsfChunks ? 0 : chunk % kCsfChunks;
  }

  /// All that does not need the tokens.
  __device__ __forceinline__ void begin(const Task& t) {
    wait_copies<P::kPlaces - 1>();
    __syncwarp();
    if constexpr (P::kFormat == FormatId::kNf3) {
      table = level_table((t.down ? args.weights.down : args.weights.gate_up).levels);
    }
    if constexpr (P::kCsf) {
      scales.start(*reinterpret_cast<const CsfWarpRows*>(at(place) + P::kRowsAt), lane);
    }
#pragma unroll
    for (int i = 0; i < P::kStageChunks; ++i) load(i, 0);
  }
  /// Chunk `i` of the stage at `place`, which begins with chunk `chunk` of the task, to the
  /// registers.
  __device__ __forceinline__ void load(int i, int chunk) {
    raw[i].load(at(place), i, lane);
    if constexpr (P::kCsf) {
      if (i == 0 && in_group(chunk) == 0) {
        const uint8_t* group = at(place) + P::kScalesAt;
        scales.load(group, group + csf_pairs_at(P::kFormat) / 4, lane);
      }
    }
  }
  /// Compressed scales of the stage in `raw` as the fragments want them.
  template <bool regular>
  __device__ __forceinline__ void ready_scales(const Task& t, int chunk) {
    if constexpr (P::kCsf) {
      uint32_t ready[P::kStageChunks];
      if constexpr (regular) {
#pragma unroll
        for (int i = 0; i < P::kStageChunks; ++i) ready[i] = scales.scales(in_group(chunk) + i);
      } else {
        const MoeWeights& w = args.weights;
        scales.any_scales(ready, (t.down ? w.down : w.gate_up).exceptions, chunk, in_group(chunk),
                          lane);
      }
#pragma unroll
      for (int i = 0; i < P::kStageChunks; ++i) raw[i].scales = ready[i];
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
  /// Regular compressed scales, and plain ones, need no branch in the loop.
  template <bool regular>
  __device__ __forceinline__ void multiply_stages(float (&acc)[4], const Task& t) {
#pragma unroll 1
    for (int chunk = 0; chunk < t.chunk_count; chunk += P::kStageChunks) {
      // The next stage is there. This one's place takes the stage kPlaces later.
      wait_copies<P::kPlaces - 2>();
      __syncwarp();
      stream.advance();
      place = place + 1 == P::kPlaces ? 0 : place + 1;
      ready_scales<regular>(t, chunk);
#pragma unroll
      for (int i = 0; i < P::kStageChunks; ++i) {
        const auto* from = reinterpret_cast<const uint4*>(t.row + (chunk + i) * kRowBytes);
        const uint4 tokens[2] = {from[0], from[1]};
        FewWeights<P> weights;
        expand(weights, raw[i]);
        load(i, chunk + P::kStageChunks);  // behind the task's last stage: not used
        weights.multiply(acc, tokens);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&acc)[4], const Task& t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[i] = 0.0f;
    if (!P::kCsf || scales.regular) {
      multiply_stages<true>(acc, t);
    } else {
      multiply_stages<false>(acc, t);
    }
  }
};

}  // namespace nibble::kernels::cuda
