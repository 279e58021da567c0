// The per-ISA half of the products: one tile of 16 weight rows times a few packed activation rows.
// tile_matrix.h picks one for a matrix; matmul.cc and moe.cc decide which tiles and rows, and what
// becomes of the sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/block_format.h"
#include "kernels/cpu/isa_list.h"
#include "kernels/cpu/tile16.h"

namespace nibble::kernels {

/// How packed activations are held: the values of x, x rounded to BF16 but held as FP32, or BF16.
enum class PackKind : uint8_t { kF32, kRounded, kBf16 };
constexpr int kPackKinds = 3;

/// Packed activations: for every block of 32 columns, all rows' values of it one after the other
/// (128 bytes a row, 64 for BF16), zero beyond the true columns.
constexpr int64_t packed_row_bytes(PackKind kind) { return kind == PackKind::kBf16 ? 64 : 128; }

/// At most this many rows share one pass over a tile; their sums live in L1.
constexpr int64_t kMaxRowBlock = 64;

struct TileArgs {
  const formats::MatrixView* view = nullptr;  // for extents, global factors and levels
  const std::byte* codes = nullptr;           // this tile's code plane
  const std::byte* scales = nullptr;          // this tile's plain scales, or its compressed stream
  const uint32_t* exceptions = nullptr;       // of the stream, up to exceptions_end
  const uint32_t* exceptions_end = nullptr;
  const std::byte* x = nullptr;  // packed rows
  int64_t x_block_stride = 0;    // bytes from one block of 32 columns to the next
  int64_t rows = 0;              // 1..kMaxRowBlock
  float* sums = nullptr;         // [rows][16], overwritten
};
using TileFn = void (*)(const TileArgs&);

struct TileOps {
  bool bf16_dot;  // kBf16 activations are packed as BF16 and multiplied by dot instructions
  TileFn (*tile_fn)(const formats::MatrixView& view, bool bf16_dot);
  /// One row, scales read from the compressed stream; null where there is no such kernel: then the
  /// tile's scales are decoded first.
  TileFn (*csf_row_fn)(const formats::MatrixView& view, bool bf16_dot);
  /// Rows ids[0..rows) of x (0..rows without ids), each [k], to `out` (64-byte aligned).
  void (*pack)(const float* x, int64_t x_stride, const int32_t* ids, int64_t rows, int64_t k,
               PackKind kind, std::byte* out);
  /// y[t, 0..lanes) = sums[t] + bias for lanes <= 16; bias may be null.
  void (*store)(const float* sums, int64_t rows, const float* bias, int64_t lanes, float* y,
                int64_t y_stride);
};

#define NIBBLE_DECLARE_TILE_OPS(ns, isa) \
  namespace ns {                         \
  const TileOps& tile_ops();             \
  }
NIBBLE_FOR_EACH_ISA(NIBBLE_DECLARE_TILE_OPS)
#undef NIBBLE_DECLARE_TILE_OPS

}  // namespace nibble::kernels
