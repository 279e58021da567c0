#include "codec/csf_tile16.h"

#include <algorithm>

#include "codec/csf_kernels.h"

namespace nibble::codec {
namespace {

using Bytes16 = uint8_t __attribute__((vector_size(16)));

// 16 x 16 bytes: out[j][i] = in[i][j], by four rounds of interleaving rows i and i + 8.
void transpose_16x16(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride) {
  Bytes16 a[16], b[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&a[i], in + i * in_stride, 16);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                         6, 22, 7, 23);
      b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                             13, 29, 14, 30, 15, 31);
    }
    std::copy_n(b, 16, a);
  }
  for (int i = 0; i < 16; ++i) std::memcpy(out + i * out_stride, &a[i], 16);
}

// out[cols][rows] = in[rows][cols]; one of the two extents is 16.
void transpose(const uint8_t* in, int64_t rows, int64_t cols, uint8_t* out) {
  int64_t r = 0;
  for (; r + 16 <= rows; r += 16) {
    int64_t c = 0;
    for (; c + 16 <= cols; c += 16)
      transpose_16x16(in + r * cols + c, cols, out + c * rows + r, rows);
    for (; c < cols; ++c) {
      for (int64_t i = 0; i < 16; ++i) out[c * rows + r + i] = in[(r + i) * cols + c];
    }
  }
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
  }
}

// Stable counting sort of a slab's words (row-major) into a tile's (by column, then row).
// begin: scratch of cols + 1.
void to_tile_exceptions(const CsfView& view, int64_t first, int64_t end, int64_t slab,
                        std::vector<uint32_t>& begin, uint32_t* out) {
  const auto cols = static_cast<uint32_t>(view.cols());
  const auto origin = static_cast<uint32_t>(slab * kCsfSlabRows * view.cols());
  std::fill(begin.begin(), begin.end(), 0U);
  for (int64_t i = first; i < end; ++i) {
    ++begin[(csf_position(view.exception(i)) - origin) % cols + 1];
  }
  for (uint32_t c = 0; c < cols; ++c) begin[c + 1] += begin[c];
  for (int64_t i = first; i < end; ++i) {
    const uint32_t word = view.exception(i), at = csf_position(word) - origin;
    out[begin[at % cols]++] = (word & 0xFF000000) | (at % cols * 16 + at / cols);
  }
}

// The inverse, by row.
void to_slab_exceptions(std::span<const uint32_t> words, int64_t cols, int64_t slab,
                        uint32_t* out) {
  uint32_t begin[kCsfSlabRows + 1] = {};
  for (const uint32_t word : words) ++begin[csf_position(word) % 16 + 1];
  for (int64_t r = 0; r < kCsfSlabRows; ++r) begin[r + 1] += begin[r];
  for (const uint32_t word : words) {
    const int64_t row = csf_position(word) % 16, col = csf_position(word) / 16;
    const int64_t position = (slab * kCsfSlabRows + row) * cols + col;
    out[begin[row]++] = (word & 0xFF000000) | static_cast<uint32_t>(position);
  }
}

}  // namespace

Result<void> stored_to_tiles(const CsfView& view, std::span<uint8_t> fixed,
                             std::span<uint32_t> exceptions, std::span<uint32_t> exception_begin) {
  const int64_t slabs = view.slabs(), cols = view.cols();
  if (fixed.size() != view.fixed().size() ||
      exceptions.size() != static_cast<size_t>(view.exception_count()) ||
      exception_begin.size() != static_cast<size_t>(slabs + 1)) {
    return Error(Code::kInvalidArgument,
                 cat("csf tiles: expected ", view.fixed().size(), " bytes, ",
                     view.exception_count(), " exceptions and ", slabs + 1, " offsets, found ",
                     fixed.size(), ", ", exceptions.size(), " and ", exception_begin.size()));
  }
  const int64_t width = csf_row_bytes(view.kind(), cols);
  std::vector<uint32_t> scratch(static_cast<size_t>(cols + 1));
  int64_t first = 0;
  exception_begin[0] = 0;
  for (int64_t s = 0; s < slabs; ++s) {
    uint8_t* tile = fixed.data() + s * csf_slab_bytes(view.kind(), cols);
    std::copy_n(view.slab(s), kCsfSlabRows, tile);
    transpose(view.slab(s) + kCsfSlabRows, kCsfSlabRows, width, tile + kCsfSlabRows);
    const int64_t end = view.first_exception_at((s + 1) * kCsfSlabRows * cols);
    if (end > first) {
      to_tile_exceptions(view, first, end, s, scratch, exceptions.data() + first);
    }
    exception_begin[static_cast<size_t>(s) + 1] = static_cast<uint32_t>(end);
    first = end;
  }
  return {};
}

CsfTiles stored_to_tiles(const CsfView& view) {
  CsfTiles tiles{view.kind(), view.rows(), view.cols(), {}, {}, {}};
  tiles.fixed.resize(view.fixed().size());
  tiles.exceptions.resize(static_cast<size_t>(view.exception_count()));
  tiles.exception_begin.resize(static_cast<size_t>(view.slabs() + 1));
  const Result<void> done =
      stored_to_tiles(view, tiles.fixed, tiles.exceptions, tiles.exception_begin);
  NIBBLE_CHECK(done.has_value());
  return tiles;
}

CsfPlane tiles_to_stored(const CsfTiles& tiles) {
  CsfPlane out{tiles.kind, tiles.rows, tiles.cols, {}, {}};
  out.fixed.resize(tiles.fixed.size());
  out.exceptions.resize(tiles.exceptions.size());
  const int64_t width = csf_row_bytes(tiles.kind, tiles.cols);
  for (int64_t t = 0; t < tiles.rows / kCsfSlabRows; ++t) {
    const int64_t offset = t * csf_slab_bytes(tiles.kind, tiles.cols);
    std::copy_n(tiles.fixed.data() + offset, kCsfSlabRows, out.fixed.data() + offset);
    transpose(tiles.fixed.data() + offset + kCsfSlabRows, width, kCsfSlabRows,
              out.fixed.data() + offset + kCsfSlabRows);
    const size_t first = tiles.exception_begin[static_cast<size_t>(t)];
    const size_t end = tiles.exception_begin[static_cast<size_t>(t) + 1];
    to_slab_exceptions(std::span(tiles.exceptions).subspan(first, end - first), tiles.cols, t,
                       out.exceptions.data() + first);
  }
  return out;
}

CsfTile csf_tile(const CsfTiles& tiles, int64_t tile) {
  const uint32_t first = tiles.exception_begin[static_cast<size_t>(tile)];
  const uint32_t end = tiles.exception_begin[static_cast<size_t>(tile) + 1];
  return {tiles.kind, tiles.cols,
          tiles.fixed.data() + tile * csf_slab_bytes(tiles.kind, tiles.cols),
          tiles.exceptions.data() + first, end - first};
}

void decode_csf_tile_columns(const CsfTile& tile, int64_t col_begin, int64_t col_end, uint8_t* out,
                             CsfIsa isa) {
  NIBBLE_CHECK(0 <= col_begin && col_begin % 8 == 0 && col_begin <= col_end && col_end <= tile.cols,
               col_begin, "..", col_end, " of ", tile.cols);
  const CsfKernels& kernels = csf_kernels(isa);
  const uint8_t* groups = tile.fixed + kCsfSlabRows;
  const int64_t cols = col_end - col_begin;
  if (tile.kind == CsfKind::kNvfp4) {
    kernels.tile_nvfp4(tile.fixed, groups + col_begin / 2 * 16, (cols + 1) / 2, out);
  } else {
    kernels.tile_mxfp4(tile.fixed, groups + col_begin / 8 * 16, (cols + 7) / 8, out);
  }
  const uint32_t* word = tile.exceptions;
  const uint32_t* const end = word + tile.exception_count;
  const auto origin = static_cast<uint32_t>(col_begin * 16);
  if (origin != 0) {
    word = std::partition_point(word, end, [&](uint32_t w) { return csf_position(w) < origin; });
  }
  const auto stop = static_cast<uint32_t>(cols * 16);
  for (; word != end; ++word) {
    const uint32_t at = csf_position(*word) - origin;
    if (at >= stop) break;
    out[at] = csf_value(*word);
  }
}

void decode_csf_tile(const CsfTile& tile, uint8_t* out, CsfIsa isa) {
  decode_csf_tile_columns(tile, 0, tile.cols, out, isa);
}

}  // namespace nibble::codec
