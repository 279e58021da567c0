#include "codec/csf_resident.h"

#include <gtest/gtest.h>

#include "codec/csf_test_vectors.h"

namespace nibble::codec {
namespace {

using namespace nibble::codec::testing;

std::vector<CsfView> views_of(const std::vector<CsfPlane>& planes) {
  std::vector<CsfView> views;
  for (const CsfPlane& plane : planes) views.push_back(plane.view());
  return views;
}

// All words of the index in tile order: the 128 x 4 tiles of formats.md 1.4.
Bytes tiles_of(const CsfWordIndex& index) {
  Bytes out;
  for (int64_t tile = 0; tile < index.tiles(); ++tile) {
    for (int n = 0; n < 128; ++n) {
      const uint32_t word = csf_index_word(index, tile, n);
      for (int i = 0; i < 4; ++i) out.push_back(static_cast<uint8_t>(word >> 8 * i));
    }
  }
  return out;
}

TEST(CsfResidentVectors, FormOffsetsIndexAndTiles) {
  const VectorSet set = VectorSet::load();
  ASSERT_FALSE(set.cases("csf.resident").empty());
  for (const Case& c : set.cases("csf.resident")) {
    SCOPED_TRACE(c.id);
    const int64_t experts = param(c, "experts"), rows = param(c, "rows"),
                  cols = param(c, "columns");
    std::vector<CsfPlane> planes;
    for (int64_t e = 0; e < experts; ++e) {
      planes.push_back(plane_of(CsfKind::kNvfp4, rows, cols, c.in(cat(e, ".fixed")),
                                c.in(cat(e, ".exceptions"))));
    }
    const Result<CsfResident> resident = make_csf_resident(views_of(planes));
    ASSERT_TRUE(resident) << resident.error().message();
    EXPECT_EQ(resident->fixed, c.out("fixed").as<uint8_t>());
    EXPECT_EQ(resident->exceptions, c.out("exceptions").as<uint32_t>());
    EXPECT_EQ(resident->task_offsets, c.out("task_offsets").as<int64_t>());
    for (int64_t e = 0; e < experts; ++e) {
      EXPECT_EQ(resident_to_stored(*resident, e), planes[static_cast<size_t>(e)]);
    }
    const Result<CsfWordIndex> index = make_csf_word_index(views_of(planes));
    ASSERT_TRUE(index) << index.error().message();
    EXPECT_EQ(index->bytes, c.out("index").as<uint8_t>());
    EXPECT_EQ(tiles_of(*index), c.out("tiles").as<uint8_t>());
    // And from the published index alone.
    const CsfWordIndex published{experts, rows, cols, c.out("index").as<uint8_t>()};
    EXPECT_EQ(tiles_of(published), c.out("tiles").as<uint8_t>());
  }
}

TEST(CsfResident, RandomStreamsComeBackBitForBit) {
  std::mt19937 rng(31);
  for (int round = 0; round < 120; ++round) {
    const int64_t rows = 128 * (1 + static_cast<int64_t>(rng() % 3));
    const int64_t cols = 4 * (1 + static_cast<int64_t>(rng() % 6));
    std::vector<CsfPlane> planes;
    for (int e = 0; e < 1 + round % 3; ++e) {
      planes.push_back(
          round % 2 == 0 ? random_legal_stream(CsfKind::kNvfp4, rows, cols, rng)
                         : encode(CsfKind::kNvfp4, rows, cols, random_plane(-1, rows, cols, rng)));
    }
    const Result<CsfResident> resident = make_csf_resident(views_of(planes));
    const Result<CsfWordIndex> index = make_csf_word_index(views_of(planes));
    ASSERT_TRUE(resident && index);
    ASSERT_EQ(index->bytes.size() % 16, 0U);
    for (size_t e = 0; e < planes.size(); ++e) {
      ASSERT_EQ(resident_to_stored(*resident, static_cast<int64_t>(e)), planes[e]);
      const Bytes plane = reference_decode(planes[e]);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) {
          const int64_t tile =
              (static_cast<int64_t>(e) * (rows / 128) + r / 128) * (cols / 4) + c / 4;
          // Row 32 (n mod 4) + n / 4 of the slab, solved for n.
          const int n = static_cast<int>(r % 32 * 4 + r % 128 / 32);
          const uint32_t word = csf_index_word(*index, tile, n);
          ASSERT_EQ(word >> 8 * (c % 4) & 255, plane[static_cast<size_t>(r * cols + c)]);
        }
      }
    }
  }
}

TEST(CsfResident, RefusesOtherGeometries) {
  const CsfPlane rows64 = encode(CsfKind::kNvfp4, 64, 4, Bytes(256));
  const CsfPlane cols6 = encode(CsfKind::kNvfp4, 128, 6, Bytes(768));
  const CsfPlane good = encode(CsfKind::kNvfp4, 128, 4, Bytes(512));
  const CsfPlane wider = encode(CsfKind::kNvfp4, 128, 8, Bytes(1024));
  const CsfPlane mxfp4 = encode(CsfKind::kMxfp4, 128, 4, Bytes(512));
  for (const std::vector<CsfView>& views :
       {std::vector<CsfView>{}, std::vector{rows64.view()}, std::vector{cols6.view()},
        std::vector{good.view(), wider.view()}, std::vector{mxfp4.view()}}) {
    const Result<CsfResident> resident = make_csf_resident(views);
    ASSERT_FALSE(resident);
    EXPECT_TRUE(names(resident.error(), "resident_geometry"));
    EXPECT_FALSE(make_csf_word_index(views));
  }
  EXPECT_TRUE(make_csf_resident(std::vector{good.view(), good.view()}));
}

}  // namespace
}  // namespace nibble::codec
