// The 128 x 4 tile order in which GPU block-scaled matrix instructions want scale bytes. A layout
// in memory, never on disk. Source: formats spec, section 1.4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::formats {

constexpr int64_t kScaleTileRows = 128;
constexpr int64_t kScaleTileCols = 4;

/// Bytes of a [rows, cols] scale plane once rows are padded to 128 and columns to 4.
constexpr int64_t scale_tile_bytes(int64_t rows, int64_t cols) {
  return (rows + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows *
         ((cols + kScaleTileCols - 1) / kScaleTileCols * kScaleTileCols);
}
/// Place of byte (r, c) in the tiled plane; `cols` before padding.
constexpr int64_t scale_tile_offset(int64_t r, int64_t c, int64_t cols) {
  const int64_t tiles_across = (cols + kScaleTileCols - 1) / kScaleTileCols;
  return (r / 128 * tiles_across + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

/// plane [rows, cols] to tiles [scale_tile_bytes(rows, cols)]; the padding becomes 0.
void scales_to_tiles(const std::byte* plane, int64_t rows, int64_t cols, std::byte* tiles);
/// The inverse; the padding is not read.
void scales_from_tiles(const std::byte* tiles, int64_t rows, int64_t cols, std::byte* plane);

}  // namespace nibble::formats
