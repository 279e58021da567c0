// Both products of the layer in one launch for a few slots: what the kernel is given, and its
// instances, in a file per family of formats (moe_few_<family>.cu).
#pragma once

#include "kernels/cuda/divisor.h"
#include "kernels/cuda/workspace.h"

namespace nibble::kernels::cuda {

constexpr int kFewThreads = 512, kFewWarps = kFewThreads / 32;

/// Limits of Geometry::kFew, which has no route kernel and sums by itself.
constexpr int kFewSlots = 32;  // tokens * top_k: one a lane
constexpr int kFewTokens = 8;  // tokens, so that an expert has one token tile

/// Geometry::kFew: the slots of each expert, in order, and what their sums are multiplied with.
struct FewTiles {
  int rows[kFewSlots];
  float gate_factor[kFewSlots], up_factor[kFewSlots], down_factor[kFewSlots];
  float router[kFewSlots];  // by slot
  uint8_t slots[kFewSlots][kFewTokens];
};

struct FewArgs {
  MoeShape shape;
  MoeWeights weights;
  const uint8_t* x;             // [tokens, hidden] BF16
  const int32_t* ids;           // [slots]; null: expert 0
  const float* router_weights;  // [slots]; null: 1
  const float* add;             // or null
  float* y;                     // [tokens, hidden]
  uint8_t* h;                   // [slots][chunks(inter)][64] BF16
  FewCounters* counters;
  int tokens, slots;
  int up_block_bytes, down_block_bytes;  // of a row block of each product
  // CTAs; (expert, 16 rows) of one expert in the first product; units of a row of x, and of h
  Divisor ctas, expert_ups, x_units, h_units;
};

/// A launchable instance; kernel == nullptr: none was found.
struct FewKernel {
  void (*kernel)(FewArgs) = nullptr;
  int64_t ring_bytes = 0;  // of shared memory, all warps' weights on their way
};
/// `form`: kCsf where the format has it. `deep`: twice the weights on their way, where shared
/// memory has room for them.
FewKernel few_kernel_nvfp4(ScaleForm form, bool deep);
FewKernel few_kernel_mxfp4(ScaleForm form, bool deep);
FewKernel few_kernel_mxfp8(ScaleForm form, bool deep);
FewKernel few_kernel_bf16(ScaleForm form, bool deep);
FewKernel few_kernel_fp8_block(ScaleForm form, bool deep);
FewKernel few_kernel_nf3(ScaleForm form, bool deep);

/// One row of activations in shared memory: whole stages of chunks, zeros behind the last column,
/// and 16 bytes so that eight rows' units of 32 bytes meet no bank twice.
constexpr int64_t kFewRowCols = 4 * kTileCols;
NIBBLE_HD constexpr int few_row_bytes(int64_t cols) {
  return static_cast<int>((cols + kFewRowCols - 1) / kFewRowCols * kFewRowCols * 2) + 16;
}
/// Its units of 16 bytes without those last 16.
NIBBLE_HD constexpr int few_row_units(int64_t cols) { return few_row_bytes(cols) / 16 - 1; }
/// Channels of the second product that one CTA adds up: whole groups of 16, dealt evenly.
constexpr int kFewGroup = 16;
NIBBLE_HD constexpr int few_groups(int64_t hidden) {
  return static_cast<int>((hidden + kFewGroup - 1) / kFewGroup);
}

/// Shared memory behind the ring: the slots by expert, the shares of a CTA's channels, x or h.
struct FewLayout {
  int64_t tiles, shares, rows, bytes;
  NIBBLE_HD FewLayout(const MoeShape& shape, int64_t tokens, int64_t ring_bytes, int ctas)
      : tiles(ring_bytes),
        shares(tiles + static_cast<int64_t>(sizeof(FewTiles))),
        rows(shares +
             (few_groups(shape.hidden) + ctas - 1) / ctas * tokens * shape.top_k * kFewGroup * 4),
        bytes(rows) {
    const int64_t x = tokens * few_row_bytes(shape.hidden);
    const int64_t h = tokens * shape.top_k * few_row_bytes(shape.inter);
    bytes += (x > h ? x : h) + kRowBytes;  // the last row is read a chunk past its end
  }
};

}  // namespace nibble::kernels::cuda
