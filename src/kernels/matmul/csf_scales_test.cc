// Products with compressed scales against the same with plain ones: the bits must be equal,
// whatever the scales are.
#include <gtest/gtest.h>

#include "device/cpu.h"
#include "kernels/matmul/product_check.h"

namespace nibble::kernels {
namespace {

using formats::FormatId;
using formats::ScaleKind;
using testing::compress_scales;
using testing::Matrix;
using testing::random_floats;
using testing::random_matrix;

/// Bits of y, all NaN alike.
std::vector<uint32_t> product_bits(device::Isa isa, Activations activations,
                                   const tensor::TensorRef& w, const std::vector<float>& x,
                                   int64_t rows) {
  std::vector<uint32_t> bits;
  for (const float v : testing::product(isa, activations, nullptr, w, x, rows)) {
    bits.push_back(std::isnan(v) ? 0x7FC00000u : std::bit_cast<uint32_t>(v));
  }
  return bits;
}

void expect_same_bits(const Matrix& m, const std::string& what) {
  codec::CsfTiles tiles;
  const tensor::TensorRef csf = compress_scales(m, tiles);
  const std::vector<float> x = random_floats(9 * m.rows_view.cols, 77);
  for (const device::Isa isa : device::available_isas()) {
    for (const Activations activations : {Activations::kF32, Activations::kBf16}) {
      for (const int64_t rows : {1, 2, 9}) {
        SCOPED_TRACE(cat(what, ", ", device::isa_name(isa), ", rows ", rows));
        EXPECT_EQ(product_bits(isa, activations, m.tiled, x, rows),
                  product_bits(isa, activations, csf, x, rows));
      }
    }
  }
}

constexpr struct {
  const char* name;
  FormatId format;
  ScaleKind kind;
  int64_t group;
} kFormats[] = {{"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3, 16},
                {"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0, 32},
                {"mxfp8", FormatId::kMxfp8, ScaleKind::kE8M0, 32}};

/// Bytes base .. base + width of each row, and every `exception_period`-th any byte at all.
void fill_scales(Matrix& m, int64_t group, int base, int width, uint32_t exception_period,
                 uint32_t seed) {
  std::mt19937 rng(seed);
  const int64_t columns = m.rows_view.cols / group;
  for (size_t i = 0; i < m.scales.size(); ++i) {
    const int row_base = base + static_cast<int>(i / static_cast<size_t>(columns) % 3);
    uint64_t byte = static_cast<uint64_t>(row_base) + rng() % static_cast<uint64_t>(width);
    if (exception_period > 0 && rng() % exception_period == 0) byte = rng();
    m.scales[i] = static_cast<std::byte>(byte & 0xFFu);
  }
  m.tile();
}

TEST(CsfScales, ProductsHaveThePlainBits) {
  uint32_t seed = 1;
  for (const auto& f : kFormats) {
    for (const int64_t blocks : {1, 2, 3, 7, 8, 9, 20, 65}) {
      if (f.format == FormatId::kNvfp4 && blocks % 2 != 0) continue;  // planes need even columns
      for (const int64_t rows : {16, 48}) {
        auto m = random_matrix({f.name, f.format, f.kind}, rows, blocks * f.group, ++seed);
        const int width = f.format == FormatId::kNvfp4 ? 16 : 2;
        for (const uint32_t period : {0u, 200u, 20u, 3u, 1u}) {
          fill_scales(*m, f.group, f.format == FormatId::kNvfp4 ? 40 : 118, width, period, ++seed);
          expect_same_bits(*m,
                           cat(f.name, " ", rows, "x", blocks, " blocks, exceptions 1/", period));
        }
      }
    }
  }
}

TEST(CsfScales, LargeBasesAndSigns) {
  for (const int base : {100, 110, 111, 112, 126, 127, 160, 236}) {
    auto m = random_matrix({"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3}, 32, 160, 5);
    fill_scales(*m, 16, base, 16, 0, 6);
    expect_same_bits(*m, cat("nvfp4, base ", base));
  }
  for (const int base : {0, 1, 253}) {
    auto m = random_matrix({"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0}, 32, 320, 5);
    fill_scales(*m, 32, base, 2, 50, 6);
    expect_same_bits(*m, cat("mxfp4, base ", base));
  }
}

TEST(CsfScales, GlobalsNearTheEndsOfFp32) {
  for (const float global : {0x1p-149f, 0x1.8p-127f, 0x1p119f, 0x1p121f, 0x1.8p127f}) {
    auto m = random_matrix({"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3}, 16, 160, 9);
    m->rows_view.global = global;
    m->tile();
    expect_same_bits(*m, cat("global ", global));
  }
}

}  // namespace
}  // namespace nibble::kernels
