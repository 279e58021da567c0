// Products against decode_rows in double: what the tests of matmul and `nibble selftest` share.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/csf_tile16.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/random_matrix.h"

namespace nibble::kernels::testing {

/// Runs `jobs` with exactly the documented workspace, which must be given back.
inline void run_matmul(device::Isa isa, Activations activations, ThreadPool* pool, const float* x,
                       int64_t x_stride, int64_t rows, std::span<const MatmulJob> jobs) {
  const int threads = pool != nullptr ? pool->threads() : 1;
  AlignedBlock block(matmul_workspace_bytes(rows, jobs.front().w.cols(), threads));
  Workspace workspace(block.span());
  Exec exec;
  exec.pool = pool;
  exec.isa = isa;
  exec.activations = activations;
  exec.workspace = &workspace;
  matmul(exec, x, x_stride, rows, jobs);
  NIBBLE_CHECK(workspace.mark() == 0, "matmul keeps ", workspace.mark(), " bytes of workspace");
}

/// y [rows, w.rows()] of one matrix; x without padding.
inline std::vector<float> product(device::Isa isa, Activations activations, ThreadPool* pool,
                                  const tensor::TensorRef& w, const std::vector<float>& x,
                                  int64_t rows, const float* bias = nullptr) {
  std::vector<float> y(static_cast<size_t>(rows * w.rows()), -77.0f);
  const MatmulJob job{w, bias, y.data(), w.rows()};
  run_matmul(isa, activations, pool, x.data(), w.cols(), rows, {&job, 1});
  return y;
}

/// What a product is multiplied with: BF16 activations are rounded but for F32 and F16 weights.
inline bool rounds_x(Activations activations, formats::FormatId format) {
  return activations == Activations::kBf16 && format != formats::FormatId::kF32 &&
         format != formats::FormatId::kF16;
}

/// Largest |y - reference| in units of the bound of matmul.h; infinity for NaN.
inline double worst_product_error(const Matrix& m, const std::vector<float>& x, int64_t rows,
                                  Activations activations, const std::vector<float>& y,
                                  const float* bias) {
  const int64_t n = m.rows_view.rows, k = m.rows_view.cols;
  const std::vector<float> w = m.decoded();
  const bool rounded = rounds_x(activations, m.rows_view.format);
  double worst = 0.0;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t r = 0; r < n; ++r) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t c = 0; c < k; ++c) {
        const float xv = x[static_cast<size_t>(t * k + c)];
        const double xd = rounded ? formats::decode_bf16(formats::encode_bf16(xv)) : xv;
        const double p = xd * static_cast<double>(w[static_cast<size_t>(r * k + c)]);
        sum += p;
        magnitude += std::fabs(p);
      }
      if (bias != nullptr) {
        sum += static_cast<double>(bias[r]);
        magnitude += std::fabs(sum);
      }
      const double bound =
          static_cast<double>(k) * (0x1p-23 * magnitude + 0x1p-149);  // the last for subnormals
      const double error = std::fabs(static_cast<double>(y[static_cast<size_t>(t * n + r)]) - sum);
      const double share = error / bound;
      worst = std::max(worst, share == share ? share : HUGE_VAL);
    }
  }
  return worst;
}

/// `m` (NVFP4, MXFP4 or MXFP8) with its scales compressed; `tiles` owns them.
inline tensor::TensorRef compress_scales(const Matrix& m, codec::CsfTiles& tiles) {
  const formats::MatrixView& v = m.rows_view;
  const bool nvfp4 = v.format == formats::FormatId::kNvfp4;
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

}  // namespace nibble::kernels::testing
