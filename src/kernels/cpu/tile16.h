// Layout::kTile16, the resident form of a weight matrix for the CPU kernels. It moves bits of the
// checkpoint to where a vector register wants them; codes stay codes, nothing is decoded.
//
// A matrix [n, k] is cut into tiles of 16 rows, one vector lane a row; the last tile is padded with
// zero codes. Along k a tile is a run of blocks of 32 columns (the last one padded with zero
// codes), so a kernel streams both planes front to back. Inside a block, dwords of 16 lanes each
// (64 bytes):
//
//   4-bit  4 dwords, 8 columns each: column 2j at bits 4j, column 2j + 1 at bits 16 + 4j
//   NF3    3 dwords for 32 columns: pair (2j, 2j + 1), j < 15, at bits 3 (j % 5) and 16 + 3 (j % 5)
//          of dword j / 5; bit i of pair 15 at bits 15 and 31 of dword i
//   8-bit  8 dwords, 4 columns each, in byte order 0, 2, 1, 3
//   BF16   16 dwords: column 2j in the low half, 2j + 1 in the high half
//   F32    32 dwords, a column each (F16 is widened to this)
//
// Even columns in low halves and odd ones in high halves: shifting 16-bit words and a 32-entry word
// permute turn codes into (even, odd) BF16 pairs, the operand of a BF16 dot product; a shift or a
// mask of those gives FP32 lanes.
//
// Scales of a tile: one byte a group, [group][16 lanes] for formats with byte scales per 16 or 32
// columns (the last NVFP4 group padded with zero); [block column][16] FP32 for block FP8, [16] FP32
// for channel FP8, both decoded exactly from their stored kind; tensor FP8 keeps one FP32 for the
// whole matrix; others have none. Padding lanes have zero scales.
#pragma once

#include <cstdint>

#include "formats/block_format.h"

namespace nibble::kernels {

// Inlined always, so that no copy compiled for one ISA can stand in for the others at link time.
#define NIBBLE_TILE_INLINE __attribute__((always_inline)) inline

constexpr int64_t kTileRows = 16;
constexpr int64_t kBlockCols = 32;

NIBBLE_TILE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

NIBBLE_TILE_INLINE int64_t tile_count(int64_t rows) { return ceil_div(rows, kTileRows); }
NIBBLE_TILE_INLINE int64_t block_count(int64_t cols) { return ceil_div(cols, kBlockCols); }

/// Bytes of one block of 32 columns in one tile.
NIBBLE_TILE_INLINE int64_t tile_block_bytes(formats::FormatId format) {
  switch (format) {
    case formats::FormatId::kF32:
    case formats::FormatId::kF16: return kTileRows * kBlockCols * 4;
    case formats::FormatId::kBf16: return kTileRows * kBlockCols * 2;
    case formats::FormatId::kNvfp4:
    case formats::FormatId::kMxfp4: return kTileRows * kBlockCols / 2;
    case formats::FormatId::kNf3: return kTileRows * kBlockCols * 3 / 8;
    case formats::FormatId::kMxfp8:
    case formats::FormatId::kFp8Block:
    case formats::FormatId::kFp8Channel:
    case formats::FormatId::kFp8Tensor: return kTileRows * kBlockCols;
  }
  return 0;
}
NIBBLE_TILE_INLINE int64_t tile_code_bytes(const formats::MatrixView& view) {
  return block_count(view.cols) * tile_block_bytes(view.format);
}

/// Block columns of a block FP8 matrix.
NIBBLE_TILE_INLINE int64_t scale_block_cols(const formats::MatrixView& view) {
  return ceil_div(view.origin_col + view.cols, view.block_cols);
}

/// Bytes from one tile's scales to the next one's; 0 where all tiles share one scale or have none.
NIBBLE_TILE_INLINE int64_t tile_scale_bytes(const formats::MatrixView& view) {
  switch (view.format) {
    case formats::FormatId::kNvfp4: return block_count(view.cols) * 2 * kTileRows;
    case formats::FormatId::kMxfp4:
    case formats::FormatId::kMxfp8:
    case formats::FormatId::kNf3: return block_count(view.cols) * kTileRows;
    case formats::FormatId::kFp8Block: return scale_block_cols(view) * kTileRows * 4;
    case formats::FormatId::kFp8Channel: return kTileRows * 4;
    case formats::FormatId::kF32:
    case formats::FormatId::kF16:
    case formats::FormatId::kBf16:
    case formats::FormatId::kFp8Tensor: return 0;
  }
  return 0;
}

#undef NIBBLE_TILE_INLINE

}  // namespace nibble::kernels
