// The layer for a few slots (tokens * top_k) in one launch: a latency problem, so every warp is on
// its own. A warp takes 16 rows of a matrix and all of K, copies its share of every tile to its own
// ring in shared memory and multiplies by mma.sync, in the order of all geometries.
//
// First product: the (expert, 16 rows) of all experts, dealt evenly to the warps of the GPU. Then
// one barrier of the whole grid. Second product: a CTA takes groups of 16 channels for all experts,
// so that it alone adds the experts' shares, in the order of k, without another barrier. A warp's
// copies run ahead over the grid's barrier: both products are one stream of weights. All CTAs must
// run at once: one a processor, as launched.
#pragma once

#include "kernels/cuda/epilogue.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/moe_few.h"
#include "kernels/cuda/stream_scales.cuh"

namespace nibble::kernels::cuda {

extern __shared__ __align__(128) uint8_t few_smem[];
constexpr int kFewStart = 1;  // named barrier: see FewStream::holds

/// Where a warp's share of a tile lies, in units of 16 bytes (codes, then what it needs of the
/// scales), and how it travels: kStageChunks chunks at a time, first all their codes.
template <FormatId format, ScaleForm form, bool deep>
struct FewPiece {
  static constexpr FormatId kFormat = format;
  static constexpr bool kCsf = form == ScaleForm::kCsf;
  static constexpr bool kRescale = format == FormatId::kFp8Block;
  static constexpr int kTileBytes = tile_bytes(format, form);
  static constexpr int kCodes = tile_scales_at(format);  // of the whole tile
  static constexpr int kCodeUnits = kCodes / 64;
  static constexpr int kScaleUnits = kRescale ? 1 : (tile_bytes(format, form) - kCodes) / 64;
  static constexpr int kStageChunks = deep && kCodeUnits <= 32 ? 4 : 2;
  static constexpr int kScalesAt = kStageChunks * kCodeUnits * 16;  // in a place of the ring
  static constexpr int kBasesAt = kScalesAt + kStageChunks * kScaleUnits * 16;
  static constexpr int kPlaceBytes = kBasesAt + (kCsf ? 16 : 0);  // with the task's first stage
  static constexpr int kPlaces = deep || kPlaceBytes < 1300 ? 3 : 2;
  // More threads than there are, for fewer registers: so the router before has room beside this
  // kernel, and so has a CTA of the next product, which copies its weights while it waits.
  // Compressed scales would spill.
  static constexpr int kBound = kFewThreads + (kCsf ? 128 : 288);
  static constexpr int kRingBytes = kFewWarps * kPlaces * kPlaceBytes;
  static constexpr bool kWholeWarps = kCodeUnits % 32 == 0;  // 32 lanes copy of one chunk
  static_assert(kStageChunks * kScaleUnits <= 32);

  /// Of code unit `unit` (counted over the stage's chunks), from the first tile's start.
  static __device__ __forceinline__ int code_offset(int quarter, int unit) {
    const int chunk = unit / kCodeUnits, u = unit % kCodeUnits;
    if constexpr (format == FormatId::kNf3) {  // two planes
      return chunk * kTileBytes +
             (u < 16 ? quarter * 256 + u * 16 : 1024 + quarter * 128 + (u - 16) * 16);
    } else {
      return chunk * kTileBytes + (quarter * kCodeUnits + u) * 16;
    }
  }
  static __device__ __forceinline__ int scale_offset(int quarter, int unit) {
    const int chunk = unit / kScaleUnits, u = unit % kScaleUnits;
    const int tile = chunk * kTileBytes + kCodes;
    return tile + (kRescale ? u : quarter * kScaleUnits + u) * 16;
  }
};

/// The slots grouped by expert, as each warp knows them: lane i holds slot i.
struct SlotTiles {
  int expert = 0, tile = 0, count = 0;
  bool leads = false;  // the first slot of its tile

  __device__ __forceinline__ int expert_of(int wanted) const {
    return __shfl_sync(~0u, expert, __ffs(__ballot_sync(~0u, leads && tile == wanted)) - 1);
  }
};

/// In the order of the experts' first slots. One warp publishes the lists.
__device__ __forceinline__ SlotTiles sort_slots(int expert, bool valid, FewTiles& lists,
                                                bool publish, int lane) {
  SlotTiles s;
  s.expert = valid ? expert : -1 - lane;
  const unsigned same = __match_any_sync(~0u, s.expert);
  const unsigned before = (1u << lane) - 1;
  const int leader = __ffs(static_cast<int>(same)) - 1;
  s.leads = valid && leader == lane;
  const unsigned leaders = __ballot_sync(~0u, s.leads);
  s.tile = __popc(leaders & ((1u << leader) - 1));
  s.count = __popc(leaders);
  if (publish && valid) {
    lists.slots[s.tile][__popc(same & before)] = static_cast<uint8_t>(lane);
    if (s.leads) lists.rows[s.tile] = __popc(same);
  }
  return s;
}

/// 16 rows of one expert's matrix.
struct FewTask {
  int tile, block, quarter;
  int group;  // second product: which of the CTA's channel groups
};

/// A warp's tasks: those of the first product, then those of the second. Warps that have none of
/// the first get the second's first. Of the CTA, unless said otherwise.
struct WarpTasks {
  int up_blocks, down_blocks, up_chunks, down_chunks, down_begin, down_groups, warp;
  int tile_count = 0, up_begin = 0, up_count = 0, own_ups = 0, own = 0;  // own: the warp's

  static __device__ __forceinline__ int share(int all, int cta) {  // what the CTAs before have
    return static_cast<int>(static_cast<unsigned>(all) * static_cast<unsigned>(cta) / gridDim.x);
  }
  __device__ __forceinline__ WarpTasks(const MoeShape& shape, int warp_in_cta)
      : up_blocks(static_cast<int>(row_blocks(Product::kGateUp, shape.hidden, shape.inter))),
        down_blocks(static_cast<int>(row_blocks(Product::kDown, shape.hidden, shape.inter))),
        up_chunks(static_cast<int>(chunks(shape.hidden))),
        down_chunks(static_cast<int>(chunks(shape.inter))),
        down_begin(share(few_groups(shape.hidden), static_cast<int>(blockIdx.x))),
        down_groups(share(few_groups(shape.hidden), static_cast<int>(blockIdx.x) + 1) - down_begin),
        warp(warp_in_cta) {}
  __device__ __forceinline__ void set_tiles(int tiles) {
    const int ups = tiles * up_blocks * 4;
    tile_count = tiles;
    up_begin = share(ups, static_cast<int>(blockIdx.x));
    up_count = share(ups, static_cast<int>(blockIdx.x) + 1) - up_begin;
    own_ups = (up_count - warp + kFewWarps - 1) / kFewWarps;
    const int downs = down_groups * tiles - first_down();
    own = own_ups + (downs > 0 ? (downs + kFewWarps - 1) / kFewWarps : 0);
  }
  __device__ __forceinline__ int first_down() const {
    return (warp + kFewWarps - up_count % kFewWarps) % kFewWarps;
  }
  __device__ __forceinline__ FewTask at(int i) const {
    if (i < own_ups) {
      const unsigned number = static_cast<unsigned>(up_begin + warp + i * kFewWarps);
      const unsigned tile = number / static_cast<unsigned>(up_blocks * 4);
      const int local = static_cast<int>(number - tile * static_cast<unsigned>(up_blocks * 4));
      return {static_cast<int>(tile), local / 4, local % 4, 0};
    }
    const unsigned number = static_cast<unsigned>(first_down() + (i - own_ups) * kFewWarps);
    const int group = static_cast<int>(number / static_cast<unsigned>(tile_count));
    return {static_cast<int>(number) - group * tile_count, (down_begin + group) / 4,
            (down_begin + group) % 4, group};
  }
};

/// A warp's weights on their way from memory: one asynchronous group a stage, and after its last
/// stage empty groups, so that the number of groups tells what has arrived.
template <typename P>
struct FewStream {
  const FewArgs& args;
  const SlotTiles& slots;
  const WarpTasks& tasks;
  const uint32_t ring;
  const int lane;
  const uint64_t policy = evict_first_policy();
  // Of the next stage: its first tile, and the lane's first unit of codes and unit of scales.
  const uint8_t *source = nullptr, *codes = nullptr, *scales = nullptr;
  int quarter = 0, task = 0, left = 0, place = 0;
  bool holds = false;  // other warps wait until the first product's copies are all queued

  __device__ __forceinline__ FewStream(const FewArgs& a, const SlotTiles& s, const WarpTasks& t,
                                       uint32_t ring_at, int own_lane)
      : args(a), slots(s), tasks(t), ring(ring_at), lane(own_lane) {}

  __device__ __forceinline__ void start_task(uint32_t to) {
    const bool down = task >= tasks.own_ups;
    const FewTask t = tasks.at(task++);
    const int blocks = down ? tasks.down_blocks : tasks.up_blocks;
    const int64_t block = int64_t{slots.expert_of(t.tile)} * blocks + t.block;
    const auto* tiles = down ? args.weights.down.tiles : args.weights.gate_up.tiles;
    left = down ? tasks.down_chunks : tasks.up_chunks;
    quarter = t.quarter;
    source = reinterpret_cast<const uint8_t*>(tiles) + block * (left * P::kTileBytes);
    codes = source + P::code_offset(quarter, lane);
    if constexpr (P::kScaleUnits > 0) scales = source + P::scale_offset(quarter, lane);
    if constexpr (P::kCsf) {
      const uint16_t* bases = down ? args.weights.down.csf.bases : args.weights.gate_up.csf.bases;
      if (lane == 0) copy_unit_async(to + P::kBasesAt, bases + block * 32 + quarter * 8, policy);
    }
  }
  /// Queues the next stage's copies. Chunks behind the matrix's last, and all behind the last task,
  /// become zeros. But for a new task this is straight code: it runs beside the products.
  __device__ __forceinline__ void advance() {
    const uint32_t to = ring + static_cast<uint32_t>(place * P::kPlaceBytes);
    if (left <= 0) {
      if (holds && task == tasks.own_ups) {
        named_barrier_arrive(kFewStart, kFewThreads);
        holds = false;
      }
      if (task < tasks.own) start_task(to);
    }
    constexpr int kUnits = P::kStageChunks * P::kCodeUnits;
#pragma unroll
    for (int first = 0; first < kUnits; first += 32) {
      const int unit = first + lane, chunk = unit / P::kCodeUnits;
      if (first + 32 > kUnits && unit >= kUnits) continue;
      const uint8_t* from = P::kWholeWarps ? codes + P::code_offset(0, first)
                                           : source + P::code_offset(quarter, unit);
      copy_unit_async(to + static_cast<uint32_t>(16 * unit), from, chunk < left ? 16 : 0, policy);
    }
    if constexpr (P::kScaleUnits > 0) {
      if (lane < P::kStageChunks * P::kScaleUnits) {
        copy_unit_async(to + static_cast<uint32_t>(P::kScalesAt + 16 * lane), scales,
                        lane / P::kScaleUnits < left ? 16 : 0, policy);
      }
    }
    commit_copies();
    source += P::kStageChunks * P::kTileBytes;
    codes += P::kStageChunks * P::kTileBytes;
    scales += P::kStageChunks * P::kTileBytes;
    left -= P::kStageChunks;
    place = place + 1 == P::kPlaces ? 0 : place + 1;
  }
};

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

/// A task with all that its end needs.
template <typename P>
struct FewJob {
  typename FewRun<P>::Task run;
  int tile, count, slot, group;  // slot: of the lane's token
  int64_t pair;                  // first product: the lane's pair of channels in h
  float bias[2];                 // gate and up, or of two neighbouring channels

  __device__ __forceinline__ FewJob(const FewArgs& args, int number, const WarpTasks& tasks,
                                    const SlotTiles& slots, const FewTiles& lists,
                                    const uint8_t* rows, int lane) {
    const bool down = number >= tasks.own_ups;
    const FewTask task = tasks.at(number);
    const int g = lane / 4, t = lane % 4, expert = slots.expert_of(task.tile);
    tile = task.tile;
    group = task.group;
    count = lists.rows[tile];
    slot = lists.slots[tile][g < count ? g : 0];  // columns without a token: any
    pair = packed_row(Product::kGateUp, task.block, task.quarter, 2 * t, 0);
    const int64_t channel =
        packed_row(down ? Product::kDown : Product::kGateUp, task.block, task.quarter, g, 0);
    const int64_t width = down ? args.shape.hidden : args.shape.inter;
    const float* first = down ? args.weights.down_bias : args.weights.gate_bias;
    bias[0] = bias[1] = 0.0f;
    if (first != nullptr && channel < width) {
      bias[0] = first[expert * width + channel];
      bias[1] = down ? first[expert * width + channel + 1]
                     : args.weights.up_bias[expert * width + channel];
    }
    const int blocks = down ? tasks.down_blocks : tasks.up_blocks;
    const int chunk_count = down ? tasks.down_chunks : tasks.up_chunks;
    const int row =
        down ? slot * few_row_bytes(args.shape.inter)
             : slot / static_cast<int>(args.shape.top_k) * few_row_bytes(args.shape.hidden);
    run = {down, task.quarter, chunk_count, (int64_t{expert} * blocks + task.block) * chunk_count,
           rows + row + 32 * t};
  }
  /// To h (first product: eight channels of the tile's tokens, activated) or to `shares` in shared
  /// memory, [slot][16] (second product).
  __device__ __forceinline__ void store(const FewArgs& args, const float (&acc)[4],
                                        const WarpTasks& tasks, const FewTiles& lists,
                                        float* shares, int lane) const {
    const int g = lane / 4, t = lane % 4;
    if (!run.down) {
      const uint32_t two = activated_channels(args.shape, acc, lists.gate_factor[tile],
                                              lists.up_factor[tile], bias[0], bias[1]);
      uint8_t* row = args.h + slot * (tasks.down_chunks * kRowBytes);
      if (g < count) *reinterpret_cast<uint32_t*>(row + pair * 2) = two;
      return;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * t + c >= count) continue;
      const int own = lists.slots[tile][2 * t + c];
      float* share = shares + (group * args.slots + own) * kFewGroup;
      *reinterpret_cast<float2*>(share + 2 * g) =
          weighted_pair(acc[c], acc[2 + c], lists.down_factor[tile], bias, lists.router[own]);
    }
  }
};

/// `rows` rows of `units` 16-byte units to shared memory, at row_bytes each; what is behind `valid`
/// units becomes zero.
__device__ __forceinline__ void copy_rows_async(const uint8_t* from, int64_t stride, int rows,
                                                int valid, int units, uint32_t to, int row_bytes) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * units; i += kFewThreads) {
    const int row = i / units, unit = i % units;
    copy_unit_async(to + static_cast<uint32_t>(row * row_bytes + unit * 16),
                    from + row * stride + (unit < valid ? unit * 16 : 0), unit < valid ? 16 : 0);
  }
}

/// The slots' rows of h to shared memory, zeros behind them.
__device__ __forceinline__ void stage_h(const FewArgs& args, uint8_t* rows) {
  const int stride = few_row_bytes(args.shape.inter), units = stride / 16 - 1;
  const int valid = static_cast<int>(chunks(args.shape.inter)) * 8;
  for (int u = static_cast<int>(threadIdx.x); u < args.slots * units; u += kFewThreads) {
    const int row = u / units, unit = u % units;
    const auto* from = reinterpret_cast<const uint4*>(args.h) + row * valid + unit;
    *reinterpret_cast<uint4*>(rows + row * stride + unit * 16) =
        unit < valid ? __ldcg(from) : make_uint4(0, 0, 0, 0);
  }
}

/// All CTAs have come here, and what they wrote before is visible.
__device__ __forceinline__ void wait_for_grid(FewCounters& counters) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&counters.arrived, 1);
    while (load_acquire(&counters.arrived) < static_cast<int>(gridDim.x)) {
    }
    __threadfence();
  }
  __syncthreads();
  // The last CTA to get through leaves the counters as the next launch wants them.
  if (threadIdx.x == kFewThreads - 1 &&
      atomicInc(&counters.through, gridDim.x - 1) == gridDim.x - 1) {
    counters.arrived = 0;
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kBound, 1)
    moe_few_kernel(const __grid_constant__ FewArgs args) {
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const FewLayout layout(args.shape, args.tokens, P::kRingBytes, static_cast<int>(gridDim.x));
  FewTiles& lists = *reinterpret_cast<FewTiles*>(few_smem + layout.tiles);
  float* shares = reinterpret_cast<float*>(few_smem + layout.shares);
  uint8_t* rows = few_smem + layout.rows;
  const uint8_t* ring = few_smem + warp * P::kPlaces * P::kPlaceBytes;
  const int hidden = static_cast<int>(args.shape.hidden);

  WarpTasks tasks(args.shape, warp);

  allow_next_kernel();
  wait_for_previous_kernel();
  const bool valid = lane < args.slots;
  const int expert = valid && args.ids != nullptr ? args.ids[lane] : 0;
  copy_rows_async(args.x, int64_t{2} * hidden, args.tokens, hidden / 8,
                  few_row_bytes(hidden) / 16 - 1, smem_address(rows), few_row_bytes(hidden));
  commit_copies();
  const SlotTiles slots = sort_slots(expert, valid, lists, warp == 0, lane);
  tasks.set_tiles(slots.count);
  float factors[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (warp == 0 && valid) {
    factors[0] = args.weights.gate_factor[slots.expert];
    factors[1] = args.weights.up_factor[slots.expert];
    factors[2] = args.weights.down_factor[slots.expert];
    if (args.router_weights != nullptr) factors[3] = args.router_weights[lane];
  }
  FewStream<P> stream(args, slots, tasks, smem_address(ring), lane);
  // With warps to spare, those wait: the second product's weights should not come before the
  // first's.
  const bool spare = tasks.up_count < kFewWarps, waits = spare && tasks.own_ups == 0;
  stream.holds = spare && !waits;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {  // one place in the code for both kinds of warps
    if (turn == (waits ? 1 : 0)) {
#pragma unroll 1
      for (int i = 0; i < P::kPlaces; ++i) stream.advance();
    }
    if (turn == 1) break;
    if (warp == 0 && valid) {
      lists.gate_factor[slots.tile] = factors[0];  // by all slots of the expert: the same
      lists.up_factor[slots.tile] = factors[1];
      lists.down_factor[slots.tile] = factors[2];
      lists.router[lane] = factors[3];
    }
    if (waits) {
      wait_copies<0>();
    } else {
      wait_copies<P::kPlaces>();
    }
    __syncthreads();  // x and the lists are there
    if (waits) named_barrier(kFewStart, kFewThreads);
  }
  FewRun<P> run(args, stream, ring, lane);
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int number = min(i, tasks.own - 1);
    const bool any = i < tasks.own;
    const FewJob<P> job(args, max(number, 0), tasks, slots, lists, rows, lane);
    if (any) run.begin(job.run);
    if (i == tasks.own_ups) {
      wait_for_grid(*args.counters);
      stage_h(args, rows);
      __syncthreads();
    }
    if (!any) break;
    float acc[4];
    run.multiply(acc, job.run);
    job.store(args, acc, tasks, lists, shares, lane);
  }
  __syncthreads();
  const int top_k = static_cast<int>(args.shape.top_k);
  const int outputs = tasks.down_groups * args.tokens * kFewGroup;
  for (int i = static_cast<int>(threadIdx.x); i < outputs; i += kFewThreads) {
    const int group = i / kFewGroup / args.tokens, token = i / kFewGroup % args.tokens;
    const int channel = (tasks.down_begin + group) * kFewGroup + i % kFewGroup;
    if (channel >= hidden) continue;
    const float* share = shares + (group * args.slots + token * top_k) * kFewGroup + i % kFewGroup;
    float sum = share[0];
    for (int k = 1; k < top_k; ++k) sum = __fadd_rn(sum, share[k * kFewGroup]);
    const int64_t at = static_cast<int64_t>(token) * hidden + channel;
    if (args.add != nullptr) sum = __fadd_rn(sum, args.add[at]);
    args.y[at] = sum;
  }
}

template <FormatId format, ScaleForm form = ScaleForm::kPlain>
FewKernel pick_few_kernel(bool deep) {
  using Deep = FewPiece<format, form, true>;
  using Shallow = FewPiece<format, form, false>;
  return deep ? FewKernel{moe_few_kernel<Deep>, Deep::kRingBytes}
              : FewKernel{moe_few_kernel<Shallow>, Shallow::kRingBytes};
}

}  // namespace nibble::kernels::cuda
