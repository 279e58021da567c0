#include "formats/scale_tile.h"

#include <cstring>

namespace nibble::formats {

void scales_to_tiles(const std::byte* plane, int64_t rows, int64_t cols, std::byte* tiles) {
  std::memset(tiles, 0, static_cast<size_t>(scale_tile_bytes(rows, cols)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) tiles[scale_tile_offset(r, c, cols)] = plane[r * cols + c];
  }
}

void scales_from_tiles(const std::byte* tiles, int64_t rows, int64_t cols, std::byte* plane) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) plane[r * cols + c] = tiles[scale_tile_offset(r, c, cols)];
  }
}

}  // namespace nibble::formats
