// Random weight matrices in every format, for the tests and benches of the products.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "formats/block_format.h"
#include "formats/element.h"
#include "kernels/matmul/aligned_block.h"
#include "kernels/repack/repack.h"

namespace nibble::kernels::testing {

/// A format with the scale kind and block geometry of one case.
struct MatrixCase {
  std::string name;
  formats::FormatId format;
  formats::ScaleKind scale_kind;
  int64_t block_rows = 0, block_cols = 0, origin_row = 0, origin_col = 0;
  int nf3_bias_log2 = 0;
};

inline std::vector<MatrixCase> all_matrix_cases() {
  using formats::FormatId;
  using formats::ScaleKind;
  return {
      {"f32", FormatId::kF32, ScaleKind::kNone},
      {"f16", FormatId::kF16, ScaleKind::kNone},
      {"bf16", FormatId::kBf16, ScaleKind::kNone},
      {"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3},
      {"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0},
      {"mxfp8", FormatId::kMxfp8, ScaleKind::kE8M0},
      {"fp8_block_f32", FormatId::kFp8Block, ScaleKind::kF32, 128, 128},
      {"fp8_block_bf16_origin", FormatId::kFp8Block, ScaleKind::kBf16, 24, 48, 17, 32},
      {"fp8_block_e8m0", FormatId::kFp8Block, ScaleKind::kE8M0, 32, 32, 5, 16},
      {"fp8_block_one_column", FormatId::kFp8Block, ScaleKind::kF32, 10, 4001, 3, 7},
      {"fp8_channel_bf16", FormatId::kFp8Channel, ScaleKind::kBf16},
      {"fp8_channel_f32", FormatId::kFp8Channel, ScaleKind::kF32},
      {"fp8_tensor", FormatId::kFp8Tensor, ScaleKind::kF32},
      {"nf3", FormatId::kNf3, ScaleKind::kE4M3},
      {"nf3_biased", FormatId::kNf3, ScaleKind::kE4M3, 0, 0, 0, 0, 4},
  };
}

/// Columns that the format allows, at least `cols`.
inline int64_t allowed_cols(formats::FormatId format, int64_t cols) {
  const int64_t group = std::max(formats::block_format(format).group_cols, 1);
  return (cols + group - 1) / group * group;
}

/// Owns the checkpoint planes and the tiled ones.
struct Matrix {
  formats::MatrixView rows_view;
  tensor::TensorRef tiled;
  std::vector<std::byte> codes, scales;
  std::vector<std::byte> tiled_storage;

  std::vector<float> decoded() const {
    std::vector<float> out(static_cast<size_t>(rows_view.rows * rows_view.cols));
    formats::decode_rows(rows_view, 0, rows_view.rows, out.data());
    return out;
  }
  /// Fills `tiled` from the checkpoint planes as they are now.
  void tile() {
    const TiledBytes sizes = tile16_bytes(rows_view);
    tiled_storage.assign(static_cast<size_t>(sizes.codes + sizes.scales + 128), std::byte{0x5A});
    std::byte* code_plane = aligned64(tiled_storage.data());
    std::byte* scale_plane = aligned64(code_plane + sizes.codes);
    tiled = repack_tile16(rows_view, {code_plane, static_cast<size_t>(sizes.codes)},
                          {scale_plane, static_cast<size_t>(sizes.scales)})
                .value();
  }
};

/// Random codes, none of them NaN or infinite, and scales around 2^-6 of either sign where the
/// format has one.
inline std::unique_ptr<Matrix> random_matrix(const MatrixCase& c, int64_t rows, int64_t cols,
                                             uint32_t seed) {
  using formats::ScaleKind;
  auto m = std::make_unique<Matrix>();
  formats::MatrixView& v = m->rows_view;
  v.format = c.format;
  v.scale_kind = c.scale_kind;
  v.rows = rows;
  v.cols = allowed_cols(c.format, cols);
  v.block_rows = c.block_rows;
  v.block_cols = c.block_cols;
  v.origin_row = c.origin_row;
  v.origin_col = c.origin_col;
  v.global = c.format == formats::FormatId::kNvfp4 ? 0.0123f : 1.0f;
  v.nf3_bias_log2 = c.nf3_bias_log2;
  v.nf3_levels = formats::kNf3Levels;
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  m->codes.resize(static_cast<size_t>(v.rows * formats::code_row_bytes(v.format, v.cols)));
  m->scales.resize(static_cast<size_t>(formats::scale_plane_bytes(v)));
  const int bits = formats::block_format(v.format).code_bits;
  auto put16 = [](std::byte* p, uint16_t value) { std::memcpy(p, &value, 2); };
  auto put32 = [](std::byte* p, float value) { std::memcpy(p, &value, 4); };
  for (size_t i = 0; i < m->codes.size(); ++i) {
    if (bits == 32 && i % 4 == 0) put32(&m->codes[i], normal(rng));
    if (bits == 16 && i % 2 == 0) {
      const float x = normal(rng);
      put16(&m->codes[i],
            v.format == formats::FormatId::kF16 ? formats::encode_f16(x) : formats::encode_bf16(x));
    }
    if (bits < 16) {
      uint32_t byte = rng() & 0xFFu;
      if (bits == 8 && (byte & 0x7Fu) == 0x7Fu) byte ^= 1u;
      m->codes[i] = static_cast<std::byte>(byte);
    }
  }
  const auto step = static_cast<size_t>(std::max<int64_t>(formats::scale_bytes(v.scale_kind), 1));
  for (size_t i = 0; i + step <= m->scales.size(); i += step) {
    const float scale = std::exp2(normal(rng) - 6.0f) * (rng() % 2 == 0 ? 1.0f : -1.0f);
    std::byte* p = &m->scales[i];
    switch (v.scale_kind) {
      case ScaleKind::kNone: break;
      case ScaleKind::kE4M3: *p = static_cast<std::byte>(formats::encode_e4m3(scale)); break;
      case ScaleKind::kE8M0: *p = static_cast<std::byte>(115 + rng() % 8); break;
      case ScaleKind::kF32: put32(p, scale); break;
      case ScaleKind::kBf16: put16(p, formats::encode_bf16(scale)); break;
    }
  }
  v.codes = m->codes.data();
  v.scales = m->scales.data();
  m->tile();
  return m;
}

inline std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(rng);
  return out;
}

}  // namespace nibble::kernels::testing
