// How weights come to the kernel for a few slots (moe_few.cuh): a warp's share of the tiles, by its
// own asynchronous copies, to its own ring in shared memory.
#pragma once

#include "kernels/cuda/moe_few_tasks.cuh"

namespace nibble::kernels::cuda {

/// Named barrier, see FewStream::holds. It only orders requests to memory; racecheck takes it for
/// the barrier that other warps are at, so its build has none.
constexpr int kFewStart = 1;

/// Where a warp's share of a tile lies, in units of 16 bytes (codes, then what it needs of the
/// scales), and how it travels: kStageChunks chunks at a time, first all their codes. Compressed
/// scales come with the first stage of their group, what they need of the rows with the task's.
template <FormatId format, ScaleForm form, bool deep>
struct FewPiece {
  static constexpr FormatId kFormat = format;
  static constexpr bool kCsf = form == ScaleForm::kCsf;
  static constexpr bool kRescale = format == FormatId::kFp8Block;
  static constexpr int kCodes = tile_scales_at(format);               // of the whole tile
  static constexpr int kStride = kCsf ? kCodes : tile_bytes(format);  // from chunk to chunk
  static constexpr int kCodeUnits = kCodes / 64;
  static constexpr int kScaleUnits = kCsf       ? 0
                                     : kRescale ? 1
                                                : (tile_bytes(format) - kCodes) / 64;  // of a chunk
  static constexpr int kGroupUnits = kCsf ? csf_group_bytes(format) / 64 : 0;
  static constexpr int kStageChunks = (deep || kCsf) && kCodeUnits <= 32 ? 4 : 2;
  static constexpr int kScalesAt = kStageChunks * kCodeUnits * 16;  // in a place of the ring
  static constexpr int kRowsAt = kScalesAt + (kStageChunks * kScaleUnits + kGroupUnits) * 16;
  static constexpr int kCsfUnits =
      kCsf ? kGroupUnits + static_cast<int>(sizeof(CsfWarpRows) / 16) : 0;  // group, then rows
  static constexpr int kPlaceBytes = kRowsAt + (kCsfUnits - kGroupUnits) * 16;
  static constexpr int kPlaces = deep || kPlaceBytes < 1300 ? 3 : 2;
  // More threads than there are, for at most 80 registers: so the router before has room beside
  // this kernel (norm_route.cuh), and so has a CTA of the next product, which copies its weights
  // while it waits.
  static constexpr int kBound = kFewThreads + 256;
  static constexpr int kRingBytes = kFewWarps * kPlaces * kPlaceBytes;
  static constexpr bool kWholeWarps = kCodeUnits % 32 == 0;  // 32 lanes copy of one chunk
  static_assert(kStageChunks * kScaleUnits <= 32 && kCsfUnits <= 32);

  /// Of code unit `unit` (counted over the stage's chunks), from the first tile's start.
  static __device__ __forceinline__ int code_offset(int quarter, int unit) {
    const int chunk = unit / kCodeUnits, u = unit % kCodeUnits;
    if constexpr (format == FormatId::kNf3) {  // two planes
      return chunk * kStride +
             (u < 16 ? quarter * 256 + u * 16 : 1024 + quarter * 128 + (u - 16) * 16);
    } else {
      return chunk * kStride + (quarter * kCodeUnits + u) * 16;
    }
  }
  /// The same of a unit of scales: plain ones from the first tile's start, compressed ones of the
  /// row block's first group from the row block's.
  static __device__ __forceinline__ int scale_offset(int quarter, int unit) {
    if constexpr (kCsf) {
      constexpr int kOwn = csf_pairs_at(format) / 64, kPairs = kGroupUnits - kOwn;
      constexpr int kRows = kCsfUnits - kGroupUnits;
      return unit < kOwn ? kCsfLead + (quarter * kOwn + unit) * 16
             : unit < kGroupUnits
                 ? kCsfLead + csf_pairs_at(format) + (quarter * kPairs + unit - kOwn) * 16
                 : kCsfRowsAt + (quarter * kRows + unit - kGroupUnits) * 16;
    } else {
      const int chunk = unit / kScaleUnits, u = unit % kScaleUnits;
      const int tile = chunk * kStride + kCodes;
      return tile + (kRescale ? u : quarter * kScaleUnits + u) * 16;
    }
  }
};

/// A warp's weights on their way from memory: one asynchronous group a stage, and after its last
/// stage empty groups, so that the number of groups tells what has arrived.
template <typename P>
struct FewStream {
  const FewArgs& args;
  const SlotTiles& slots;
  const WarpTasks& tasks;
  const int lane;
  // The lane's first unit of the next stage in the ring. Kept as an address, not worked out from
  // the stage's number: ptxas 13.0 may encode asynchronous copies to a register plus a uniform one
  // wrongly.
  uint32_t to;
  const uint64_t policy = evict_first_policy();
  // Of the next stage: its first tile, and the lane's first unit of codes and unit of scales.
  const uint8_t *source = nullptr, *codes = nullptr, *scales = nullptr;
  int quarter = 0, task = 0, left = 0, place = 0;
  bool group_starts = true;  // compressed scales: with the next stage
  int units = 0;             // of them, that come with it
  bool holds = false;        // other warps wait until the first product's copies are all queued

  __device__ __forceinline__ FewStream(const FewArgs& a, const SlotTiles& s, const WarpTasks& t,
                                       uint32_t ring, int own_lane)
      : args(a),
        slots(s),
        tasks(t),
        lane(own_lane),
        to(ring + static_cast<uint32_t>(16 * own_lane)) {}

  __device__ __forceinline__ void start_task() {
    const bool down = task >= tasks.own_ups;
    const FewTask t = tasks.at(task++);
    const int blocks = down ? tasks.down_blocks : tasks.up_blocks;
    const int64_t block = int64_t{slots.expert_of(t.tile)} * blocks + t.block;
    const auto* tiles = down ? args.weights.down.tiles : args.weights.gate_up.tiles;
    left = down ? tasks.down_chunks : tasks.up_chunks;
    quarter = t.quarter;
    source = reinterpret_cast<const uint8_t*>(tiles) +
             block * (down ? args.down_block_bytes : args.up_block_bytes);
    if constexpr (P::kScaleUnits + P::kGroupUnits > 0) {
      scales = source + P::scale_offset(quarter, lane);
    }
    if constexpr (P::kCsf) {
      group_starts = true;
      units = P::kCsfUnits;
      source += kCsfLead + csf_group_bytes(P::kFormat);
    }
    codes = source + P::code_offset(quarter, lane);
  }
  /// Queues the next stage's copies. Chunks behind the matrix's last, and all behind the last task,
  /// become zeros. But for a new task this is straight code: it runs beside the products.
  __device__ __forceinline__ void advance() {
    if (left <= 0) {
      if (holds && task == tasks.own_ups) {
        if (!kRacecheck) named_barrier_arrive(kFewStart, kFewThreads);
        holds = false;
      }
      if (task < tasks.own) start_task();
    }
    constexpr int kUnits = P::kStageChunks * P::kCodeUnits;
#pragma unroll
    for (int first = 0; first < kUnits; first += 32) {
      const int unit = first + lane, chunk = unit / P::kCodeUnits;
      if (first + 32 > kUnits && unit >= kUnits) continue;
      const uint8_t* from = P::kWholeWarps ? codes + P::code_offset(0, first)
                                           : source + P::code_offset(quarter, unit);
      copy_unit_async(to + static_cast<uint32_t>(16 * first), from, chunk < left ? 16 : 0, policy);
    }
    if constexpr (P::kScaleUnits > 0) {
      if (lane < P::kStageChunks * P::kScaleUnits) {
        copy_unit_async(to + P::kScalesAt, scales, lane / P::kScaleUnits < left ? 16 : 0, policy);
      }
    }
    if constexpr (P::kCsf) {
      if (group_starts && lane < units) {  // behind the last task: as they are
        copy_unit_async(to + P::kScalesAt, scales, 16, policy);
      }
    }
    commit_copies();
    left -= P::kStageChunks;
    int step = P::kStageChunks * P::kStride;
    if constexpr (P::kCsf) {
      units = left > 0 ? P::kGroupUnits : 0;  // rows come with the first stage alone
      if constexpr (P::kStageChunks < kCsfChunks) group_starts = !group_starts;
      if (group_starts) step += csf_group_bytes(P::kFormat);
    }
    scales += step;
    source += step;
    codes += step;
    const bool last = ++place == P::kPlaces;
    to += static_cast<uint32_t>(last ? -(P::kPlaces - 1) * P::kPlaceBytes : P::kPlaceBytes);
    if (last) place = 0;
  }
};

}  // namespace nibble::kernels::cuda
