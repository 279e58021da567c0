// How a matrix of expert weights lies in GPU memory: the order in which tensor cores want it.
//
// A packed matrix is a grid of tiles of 64 rows x 64 columns ("row block" x "k chunk"), stored row
// block by row block, chunks of one row block one after the other, so that one row block of an
// expert is one contiguous stream over K. Each of the four warps of a warpgroup owns 16 rows of a
// tile; lane (g = lane / 4, t = lane % 4) holds rows g and g + 8 ("low" and "high") and, in step j
// of four, columns 16 t + 4 j + {0, 1, 2, 3}. With columns dealt that way a lane meets one scale
// group a row (one group of 16 for NVFP4, half a group of 32 for MX formats), so a scale is decoded
// once per 16 weights. The activations are stored in the same column order (column_slot below).
//
// Which source rows a row block holds depends on the product (see packed_row):
//   gate_up: low rows are gate rows, high rows the up rows of the same channels, so the activation
//            happens in registers in the first product's epilogue;
//   down:    low and high are neighbours, so that a lane writes two adjacent floats.
// Source of the fragment order: PTX ISA, wgmma and mma.m16n8k16 register fragments.
#pragma once

#include <cstdint>

#include "formats/block_format.h"

#if defined(__CUDACC__)
#define NIBBLE_HD __host__ __device__
#else
#define NIBBLE_HD
#endif

namespace nibble::kernels::cuda {

using formats::FormatId;

constexpr int kTileRows = 64;
constexpr int kTileCols = 64;
constexpr int kRowBytes = kTileCols * 2;  // one activation row of a chunk: 64 BF16

/// How a tile keeps its scales: as the checkpoint's bytes, or compressed (csf_index.h): one base a
/// row of the row block, a few bits a scale in the tile, with room for the few scales that do not
/// fit.
enum class ScaleForm : uint8_t { kPlain, kCsf };

/// Bytes of codes and of scales of one 64 x 64 tile; 0 codes: the format has no packed layout.
/// Block FP8's codes are followed by two FP32 scales (of the tile's low and of its high rows) and
/// padding, counted with the codes.
NIBBLE_HD constexpr int tile_code_bytes(FormatId f) {
  return f == FormatId::kNvfp4 || f == FormatId::kMxfp4 ? 2048
         : f == FormatId::kMxfp8                        ? 4096
         : f == FormatId::kFp8Block                     ? 4096 + 16
         : f == FormatId::kBf16                         ? 8192
         : f == FormatId::kNf3                          ? 1536
                                                        : 0;
}
/// Where a tile's scales begin.
NIBBLE_HD constexpr int tile_scales_at(FormatId f) {
  return f == FormatId::kFp8Block ? 4096 : tile_code_bytes(f);
}
/// Compressed scales of a tile, for each of its four warps: words of codes, of csf_bits each. Scale
/// i of a warp is lane i's (NVFP4) or lanes 2 i's and 2 i + 1's (MX formats), of the low and of the
/// high row.
///   NVFP4: eight scales fill three words: scale i's two codes, the low row's first, lie from bit
///          12 (i % 8) of the three on.
///   MX:    four scales fill a word: turned right by 4 (i % 4), it has the low row's code in bits
///          7..10 and the high row's in bits 23..26, where the expansion of bytes wants them.
NIBBLE_HD constexpr int csf_bits(FormatId f) { return f == FormatId::kNvfp4 ? 6 : 4; }
NIBBLE_HD constexpr int csf_warp_words(FormatId f) { return f == FormatId::kNvfp4 ? 12 : 4; }
/// The words (one, mostly) that hold a scale's codes, and where they begin in the first.
struct CsfPlace {
  int word, next, turn;
};
NIBBLE_HD constexpr CsfPlace csf_place(FormatId f, int i) {
  if (f != FormatId::kNvfp4) return {i / 4, i / 4, 4 * (i % 4)};
  const int bit = 12 * (i % 8), word = i / 8 * 3 + bit / 32;
  return {word, word + (bit % 32 > 20 ? 1 : 0), bit % 32};
}
/// What kernels need of 16 rows of a row block, to read their compressed scales.
struct alignas(16) CsfWarpRows {
  uint16_t bases[8];  // of the lanes' low row, and of their high row << 8, by g
  uint32_t first;     // exceptions: where they begin in the list,
  uint32_t count;     // their number over all of K
  uint32_t odd;       // not 0: a base is not plain (csf_index.h)
  uint32_t unused;
};
NIBBLE_HD constexpr int tile_scale_bytes(FormatId f, ScaleForm form = ScaleForm::kPlain) {
  if (form == ScaleForm::kCsf) return 4 * 4 * csf_warp_words(f);
  return f == FormatId::kNvfp4                                                   ? 256
         : f == FormatId::kMxfp4 || f == FormatId::kMxfp8 || f == FormatId::kNf3 ? 128
                                                                                 : 0;
}
NIBBLE_HD constexpr int tile_bytes(FormatId f, ScaleForm form = ScaleForm::kPlain) {
  return tile_code_bytes(f) + tile_scale_bytes(f, form);
}
/// Columns that share a scale, or (BF16, block FP8) that a row's length must be a multiple of.
NIBBLE_HD constexpr int group_cols(FormatId f) {
  return f == FormatId::kNvfp4 || f == FormatId::kFp8Block ? 16 : f == FormatId::kBf16 ? 8 : 32;
}
/// Formats whose scales CSF compresses.
NIBBLE_HD constexpr bool has_csf(FormatId f) {
  return f == FormatId::kNvfp4 || f == FormatId::kMxfp4 || f == FormatId::kMxfp8;
}

/// Power of two by which weights in registers are smaller than what the checkpoint means; it goes
/// into the FP32 factor of the epilogue. NVFP4 only: e2m1 * e4m3 * 2^-7 keeps the scale finite.
NIBBLE_HD constexpr float register_unit(FormatId f) {
  return f == FormatId::kNvfp4 ? 128.0f : 1.0f;
}

NIBBLE_HD constexpr int64_t chunks(int64_t cols) { return (cols + kTileCols - 1) / kTileCols; }

enum class Product : uint8_t { kGateUp, kDown };

/// Row blocks of one expert. The intermediate size is padded to whole chunks, because the first
/// product's output is the second's input; padding rows hold zeros.
NIBBLE_HD constexpr int64_t row_blocks(Product p, int64_t hidden, int64_t inter) {
  return p == Product::kGateUp ? 2 * chunks(inter) : (hidden + kTileRows - 1) / kTileRows;
}
NIBBLE_HD constexpr int64_t tile_count(Product p, int64_t hidden, int64_t inter) {
  return row_blocks(p, hidden, inter) * chunks(p == Product::kGateUp ? hidden : inter);
}
NIBBLE_HD constexpr int64_t packed_bytes(FormatId f, Product p, int64_t hidden, int64_t inter,
                                         ScaleForm form = ScaleForm::kPlain) {
  return tile_count(p, hidden, inter) * tile_bytes(f, form);
}

/// Place (in elements, 0..63) of column c of a chunk: step j = (c % 16) / 4 of lane t = c / 16.
NIBBLE_HD constexpr int column_slot(int c) {
  const int t = c / 16, j = (c % 16) / 4, b = c % 4;
  return 16 * j + 8 * (b / 2) + 2 * t + b % 2;
}
/// Inverse of column_slot.
NIBBLE_HD constexpr int slot_column(int s) {
  const int j = s / 16, half = (s % 16) / 8, t = (s % 8) / 2;
  return 16 * t + 4 * j + 2 * half + s % 2;
}

/// Source row of (row block, warp, g, high). For kGateUp `high` chooses gate or up, not the row: a
/// warp's eight channels are eight neighbouring slots of the second product's column order.
NIBBLE_HD constexpr int64_t packed_row(Product p, int64_t block, int warp, int g, int high) {
  if (p == Product::kDown) return block * kTileRows + warp * 16 + 2 * g + high;
  return block / 2 * kTileCols + slot_column(8 * (4 * static_cast<int>(block % 2) + warp) + g);
}

}  // namespace nibble::kernels::cuda
