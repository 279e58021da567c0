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

/// How tiles keep their scales: as the checkpoint's bytes, or compressed (csf_index.h): one base a
/// row of the row block, a few bits a scale, and a list of the few scales that do not fit.
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
/// What kernels need of 16 rows of a row block to read their compressed scales. Those of its four
/// warps lead the row block.
struct alignas(16) CsfWarpRows {
  uint16_t bases[8];  // of the lanes' low row, and of their high row << 8, by g
  uint32_t first;     // exceptions: where they begin in the list,
  uint32_t count;     // their number over all of K
  uint32_t odd;       // not 0: a base is not plain (csf_index.h)
  uint32_t unused;
};
constexpr int kCsfRowsBytes = 4 * sizeof(CsfWarpRows);
/// Bytes before a row block's first group, of which they are the last: so groups and codes begin at
/// multiples of 256 bytes.
constexpr int kCsfLead = 256, kCsfRowsAt = kCsfLead - kCsfRowsBytes;
/// Compressed scales of four chunks of a row block ("group"; the last may have fewer) lie together,
/// before the chunks' codes: words of codes of csf_bits each, where a lane finds its scales of the
/// low and the high row by fixed shifts, in the halves of a word.
///   NVFP4: a word for each lane, [warp][lane], and one for two lanes, [warp][lane / 2].
///   MX:    one for two lanes, who share their scales.
constexpr int kCsfChunks = 4;
NIBBLE_HD constexpr int csf_bits(FormatId f) { return f == FormatId::kNvfp4 ? 6 : 4; }
NIBBLE_HD constexpr int csf_group_bytes(FormatId f) { return f == FormatId::kNvfp4 ? 768 : 256; }
/// Where the words for two lanes begin.
NIBBLE_HD constexpr int csf_pairs_at(FormatId f) { return f == FormatId::kNvfp4 ? 512 : 0; }
/// Place of a scale byte in the halves of a word: where its expansion (dequant.cuh) wants it.
NIBBLE_HD constexpr int csf_shift(FormatId f) { return f == FormatId::kNvfp4 ? 4 : 7; }
/// How far a lane turns its word for two lanes to the right.
NIBBLE_HD constexpr int csf_turn(FormatId f, int lane) {
  return f == FormatId::kNvfp4 ? lane % 2 * 8 : 0;
}
NIBBLE_HD constexpr uint32_t turn_right(uint32_t word, int bits) {
  return bits % 32 == 0 ? word : word >> bits % 32 | word << (32 - bits % 32);
}
/// A lane's words of a group: its own and, turned, the one for two lanes.
struct CsfWords {
  uint32_t own = 0, pair = 0;
};
/// The codes, csf_shift up in the halves, of chunk `c` (0..3) of the group.
NIBBLE_HD constexpr uint32_t csf_codes(FormatId f, const CsfWords& words, int c) {
  if (f != FormatId::kNvfp4) return turn_right(words.pair, 4 * c) & 0x07800780u;
  return c == 0   ? words.own & 0x03F003F0u
         : c == 1 ? words.own >> 6 & 0x03F003F0u
         : c == 2 ? words.pair & 0x03F003F0u
                  : (words.own << 6 & 0x03C003C0u) | (words.pair >> 6 & 0x00300030u);
}
/// Its inverse: the bits of the words that say so.
NIBBLE_HD constexpr CsfWords csf_place(FormatId f, uint32_t codes, int c) {
  if (f != FormatId::kNvfp4) return {0, turn_right(codes, 32 - 4 * c)};
  return c == 0   ? CsfWords{codes, 0}
         : c == 1 ? CsfWords{codes << 6, 0}
         : c == 2 ? CsfWords{0, codes}
                  : CsfWords{codes >> 6 & 0x000F000Fu, (codes & 0x00300030u) << 6};
}
/// Bytes of a tile's plain scales, which follow its codes.
NIBBLE_HD constexpr int tile_scale_bytes(FormatId f) {
  return f == FormatId::kNvfp4                                                   ? 256
         : f == FormatId::kMxfp4 || f == FormatId::kMxfp8 || f == FormatId::kNf3 ? 128
                                                                                 : 0;
}
/// Of a tile with plain scales.
NIBBLE_HD constexpr int tile_bytes(FormatId f) { return tile_code_bytes(f) + tile_scale_bytes(f); }
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

/// Where a row block's group of compressed scales begins that has chunk `chunk`'s.
NIBBLE_HD constexpr int64_t csf_group_at(FormatId f, int64_t chunk) {
  return kCsfLead +
         chunk / kCsfChunks * (csf_group_bytes(f) + kCsfChunks * int64_t{tile_code_bytes(f)});
}
/// Where the codes of chunk `chunk` begin in a row block.
NIBBLE_HD constexpr int64_t tile_at(FormatId f, ScaleForm form, int64_t chunk) {
  if (form == ScaleForm::kPlain) return chunk * tile_bytes(f);
  return csf_group_at(f, chunk) + csf_group_bytes(f) + chunk % kCsfChunks * tile_code_bytes(f);
}
NIBBLE_HD constexpr int64_t row_block_bytes(FormatId f, ScaleForm form, int64_t chunk_count) {
  if (form == ScaleForm::kPlain) return chunk_count * tile_bytes(f);
  return tile_at(f, form, chunk_count - 1) + tile_code_bytes(f);
}

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
  return row_blocks(p, hidden, inter) *
         row_block_bytes(f, form, chunks(p == Product::kGateUp ? hidden : inter));
}

/// Of these, all but the codes: the scales and, compressed, what is needed of their rows.
NIBBLE_HD constexpr int64_t packed_scale_bytes(FormatId f, Product p, int64_t hidden, int64_t inter,
                                               ScaleForm form) {
  return packed_bytes(f, p, hidden, inter, form) -
         tile_count(p, hidden, inter) * tile_code_bytes(f);
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
