// The form in which CPU kernels keep compressed scales: tiles of 16 rows, one vector lane a row.
// A tile holds exactly the bytes of a stored slab with its packed rows transposed, so it has the
// same size, and its exceptions are sorted by column. Kernels expand one tile (or a part of its
// columns) into scratch right before they use it.
// Leaves to kernels/repack where tiles live, and to csf.h what a legal stream is.
//
//   tile       [16 bases][csf_row_bytes groups][16 rows], one byte each
//   NVFP4      byte r of group j = code(r, 2j) | code(r, 2j + 1) << 4
//   MXFP4      byte r of group j: bit i is the code of (r, 8j + i)
//   exception  (value << 24) + column * 16 + row in tile; ascending, so by column, then row
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "codec/csf.h"

namespace nibble::codec {

/// All tiles of a plane. Sizes: fixed csf_fixed_bytes, exceptions exception_count, begin slabs + 1.
struct CsfTiles {
  CsfKind kind = CsfKind::kNvfp4;
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> fixed;
  std::vector<uint32_t> exceptions;
  std::vector<uint32_t> exception_begin;  // tile t owns exceptions [begin[t], begin[t + 1])
};
CsfTiles stored_to_tiles(const CsfView& view);
/// The same into memory of the caller; the sizes must be those of CsfTiles.
/// Errors: kInvalidArgument if a length disagrees; nothing is then written.
Result<void> stored_to_tiles(const CsfView& view, std::span<uint8_t> fixed,
                             std::span<uint32_t> exceptions, std::span<uint32_t> exception_begin);
/// Bit for bit the stream the tiles were made from.
CsfPlane tiles_to_stored(const CsfTiles& tiles);

/// One tile, not owned.
struct CsfTile {
  CsfKind kind = CsfKind::kNvfp4;
  int64_t cols = 0;
  const uint8_t* fixed = nullptr;        // csf_slab_bytes, any alignment
  const uint32_t* exceptions = nullptr;  // sorted
  int64_t exception_count = 0;
};
CsfTile csf_tile(const CsfTiles& tiles, int64_t tile);

/// Scratch for columns [0, cols) of a tile: [cols rounded up to 8][16] bytes, of which MXFP4 may
/// write the columns past `cols` (their content means nothing).
constexpr int64_t csf_tile_scratch_bytes(int64_t cols) { return (cols + 7) / 8 * 8 * 16; }

/// Expands a tile column by column: out[column][row], 16 row bytes a column. `out` holds
/// csf_tile_scratch_bytes(tile.cols), any alignment. Allocates nothing.
void decode_csf_tile(const CsfTile& tile, uint8_t* out, CsfIsa isa = csf_isa());
/// The same for columns [col_begin, col_end), which start at out: col_begin a multiple of 8,
/// col_begin <= col_end <= tile.cols, out csf_tile_scratch_bytes(col_end - col_begin).
void decode_csf_tile_columns(const CsfTile& tile, int64_t col_begin, int64_t col_end, uint8_t* out,
                             CsfIsa isa = csf_isa());

}  // namespace nibble::codec
