#include "codec/csf_tile16.h"

#include <gtest/gtest.h>

#include "codec/csf_test_vectors.h"

namespace nibble::codec {
namespace {

using namespace nibble::codec::testing;

// Bytes r of every tile column, as the header's drawing says, from the tiles alone.
void expect_layout(const CsfPlane& stored, const CsfTiles& tiles) {
  const bool nvfp4 = stored.kind == CsfKind::kNvfp4;
  const int64_t width = csf_row_bytes(stored.kind, stored.cols);
  const int64_t slab_bytes = 16 * (1 + width);
  for (int64_t t = 0; t < stored.rows / 16; ++t) {
    const uint8_t* slab = stored.fixed.data() + t * slab_bytes;
    const uint8_t* tile = tiles.fixed.data() + t * slab_bytes;
    for (int64_t r = 0; r < 16; ++r) {
      ASSERT_EQ(tile[r], slab[r]);
      for (int64_t c = 0; c < stored.cols; ++c) {
        const int64_t j = nvfp4 ? c / 2 : c / 8, shift = nvfp4 ? c % 2 * 4 : c % 8;
        const int mask = nvfp4 ? 15 : 1;
        ASSERT_EQ(tile[16 + j * 16 + r] >> shift & mask, slab[16 + r * width + j] >> shift & mask);
      }
    }
    const CsfTile one = csf_tile(tiles, t);
    for (int64_t i = 1; i < one.exception_count; ++i) {
      ASSERT_LT(csf_position(one.exceptions[i - 1]), csf_position(one.exceptions[i]));
    }
  }
}

void expect_decodes(const CsfTiles& tiles, const Bytes& plane, std::mt19937& rng) {
  for (int64_t t = 0; t < tiles.rows / 16; ++t) {
    const CsfTile tile = csf_tile(tiles, t);
    const int64_t begin =
        8 * static_cast<int64_t>(rng() % static_cast<uint64_t>((tiles.cols + 7) / 8));
    const int64_t end =
        begin + static_cast<int64_t>(rng() % static_cast<uint64_t>(tiles.cols - begin + 1));
    for (const CsfIsa isa : csf_isas()) {
      // Exactly the promised scratch, so that a sanitizer sees any byte beyond.
      Bytes out(static_cast<size_t>(csf_tile_scratch_bytes(tiles.cols)));
      Bytes part(static_cast<size_t>(csf_tile_scratch_bytes(end - begin)));
      decode_csf_tile(tile, out.data(), isa);
      decode_csf_tile_columns(tile, begin, end, part.data(), isa);
      for (int64_t c = 0; c < tiles.cols; ++c) {
        for (int64_t r = 0; r < 16; ++r) {
          const uint8_t want = plane[static_cast<size_t>((t * 16 + r) * tiles.cols + c)];
          ASSERT_EQ(out[static_cast<size_t>(c * 16 + r)], want) << csf_isa_name(isa);
          if (c >= begin && c < end) {
            ASSERT_EQ(part[static_cast<size_t>((c - begin) * 16 + r)], want)
                << csf_isa_name(isa) << ' ' << begin << ' ' << end;
          }
        }
      }
    }
  }
}

TEST(CsfTile16, VectorsThereAndBack) {
  const VectorSet set = VectorSet::load();
  ASSERT_FALSE(set.cases("csf.round_trip").empty());
  std::mt19937 rng(41);
  for (const Case& c : set.cases("csf.round_trip")) {
    SCOPED_TRACE(c.id);
    const CsfPlane stored = plane_of(kind_of(c), param(c, "rows"), param(c, "columns"),
                                     c.out("fixed"), c.out("exceptions"));
    const CsfTiles tiles = stored_to_tiles(stored.view());
    expect_layout(stored, tiles);
    EXPECT_EQ(tiles_to_stored(tiles), stored);
    expect_decodes(tiles, c.in("scale").as<uint8_t>(), rng);
  }
}

TEST(CsfTile16, RandomStreamsThereAndBack) {
  std::mt19937 rng(42);
  for (int round = 0; round < 4000; ++round) {
    const CsfKind kind = round % 2 == 0 ? CsfKind::kNvfp4 : CsfKind::kMxfp4;
    const int64_t rows = 16 * (1 + static_cast<int64_t>(rng() % 3));
    int64_t cols = 1 + static_cast<int64_t>(rng() % (round % 9 == 0 ? 300 : 24));
    if (kind == CsfKind::kNvfp4) cols += cols % 2;
    const CsfPlane stored = round % 3 == 0
                                ? random_legal_stream(kind, rows, cols, rng)
                                : encode(kind, rows, cols, random_plane(-1, rows, cols, rng));
    const CsfTiles tiles = stored_to_tiles(stored.view());
    ASSERT_EQ(tiles.exception_begin.back(), stored.exceptions.size());
    expect_layout(stored, tiles);
    ASSERT_EQ(tiles_to_stored(tiles), stored);
    expect_decodes(tiles, reference_decode(stored), rng);
    if (HasFatalFailure()) return;
  }
}

TEST(CsfTile16, RefusesMemoryOfAnotherSize) {
  const CsfPlane stored = encode(CsfKind::kNvfp4, 32, 4, Bytes(128, 7));
  Bytes fixed(stored.fixed.size(), 99);
  std::vector<uint32_t> begin(3, 99);
  EXPECT_FALSE(stored_to_tiles(stored.view(), std::span(fixed).first(95), {}, begin));
  EXPECT_FALSE(stored_to_tiles(stored.view(), fixed, {}, std::span(begin).first(2)));
  uint32_t word;
  EXPECT_FALSE(stored_to_tiles(stored.view(), fixed, std::span(&word, 1), begin));
  EXPECT_EQ(fixed, Bytes(stored.fixed.size(), 99));
  EXPECT_TRUE(stored_to_tiles(stored.view(), fixed, {}, begin));
  EXPECT_EQ(begin, (std::vector<uint32_t>{0, 0, 0}));
}

}  // namespace
}  // namespace nibble::codec
