// Products with compressed scales against the same with plain ones: the bits must be equal,
// whatever the scales are.
#include <gtest/gtest.h>

#include "codec/csf_tile16.h"
#include "device/cpu.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/random_matrix.h"

namespace nibble::kernels {
namespace {

using formats::FormatId;
using formats::ScaleKind;
using testing::Matrix;
using testing::random_floats;
using testing::random_matrix;

/// `tiled` of m with its scales compressed; `tiles` owns them.
tensor::TensorRef compress(const Matrix& m, codec::CsfTiles& tiles) {
  const formats::MatrixView& v = m.rows_view;
  const bool nvfp4 = v.format == FormatId::kNvfp4;
  tiles = codec::stored_to_tiles(
      codec::encode_csf(nvfp4 ? codec::CsfKind::kNvfp4 : codec::CsfKind::kMxfp4, v.rows,
                        v.cols / (nvfp4 ? 16 : 32),
                        {reinterpret_cast<const uint8_t*>(m.scales.data()), m.scales.size()})
          .value()
          .view());
  tensor::TensorRef ref = m.tiled;
  ref.scale_encoding = tensor::ScaleEncoding::kCsf;
  ref.view.scales = reinterpret_cast<const std::byte*>(tiles.fixed.data());
  ref.exceptions = tiles.exceptions.data();
  ref.exception_begin = tiles.exception_begin.data();
  return ref;
}

std::vector<uint32_t> product_bits(const Exec& exec, const tensor::TensorRef& w,
                                   const std::vector<float>& x, int64_t rows) {
  std::vector<float> y(static_cast<size_t>(rows * w.rows()), -7.0f);
  std::vector<std::byte> block(static_cast<size_t>(matmul_workspace_bytes(rows, w.cols(), 1) + 64));
  std::byte* aligned = block.data() + (64 - reinterpret_cast<uintptr_t>(block.data()) % 64) % 64;
  Workspace workspace({aligned, block.size() - 64});
  Exec own = exec;
  own.workspace = &workspace;
  const MatmulJob job{w, nullptr, y.data(), w.rows()};
  matmul(own, x.data(), w.cols(), rows, {&job, 1});
  std::vector<uint32_t> bits;
  for (const float v : y) bits.push_back(std::isnan(v) ? 0x7FC00000u : std::bit_cast<uint32_t>(v));
  return bits;
}

void expect_same_bits(const Matrix& m, const std::string& what) {
  codec::CsfTiles tiles;
  const tensor::TensorRef csf = compress(m, tiles);
  const std::vector<float> x = random_floats(9 * m.rows_view.cols, 77);
  for (const device::Isa isa : device::available_isas()) {
    for (const Activations activations : {Activations::kF32, Activations::kBf16}) {
      for (const int64_t rows : {1, 2, 9}) {
        SCOPED_TRACE(cat(what, ", ", device::isa_name(isa), ", rows ", rows));
        Exec exec;
        exec.isa = isa;
        exec.activations = activations;
        EXPECT_EQ(product_bits(exec, m.tiled, x, rows), product_bits(exec, csf, x, rows));
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
