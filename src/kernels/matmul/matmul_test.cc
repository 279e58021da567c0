#include "kernels/matmul/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/matmul/product_check.h"

namespace nibble::kernels {
namespace {

using device::Isa;
using formats::FormatId;
using formats::ScaleKind;
using testing::all_matrix_cases;
using testing::Matrix;
using testing::MatrixCase;
using testing::random_floats;
using testing::random_matrix;
using testing::run_matmul;

std::vector<float> product(Isa isa, Activations activations, ThreadPool* pool, const Matrix& m,
                           const std::vector<float>& x, int64_t rows, const float* bias = nullptr) {
  return testing::product(isa, activations, pool, m.tiled, x, rows, bias);
}

/// Checks y against decode_rows in double, within the contract's bound.
void expect_close(const Matrix& m, const std::vector<float>& x, int64_t rows,
                  Activations activations, const std::vector<float>& y, const float* bias) {
  EXPECT_LE(testing::worst_product_error(m, x, rows, activations, y, bias), 1.0);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

/// NaN equals NaN, everything else bit by bit.
void expect_same_values(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    EXPECT_EQ(std::bit_cast<uint32_t>(a[i]), std::bit_cast<uint32_t>(b[i])) << i;
  }
}

class MatmulFormats : public ::testing::TestWithParam<MatrixCase> {};
INSTANTIATE_TEST_SUITE_P(All, MatmulFormats, ::testing::ValuesIn(all_matrix_cases()),
                         [](const auto& param) { return param.param.name; });

TEST_P(MatmulFormats, WithinTheBoundForManyRowCounts) {
  struct Shape {
    int64_t rows, cols;
  };
  for (const Shape shape : {Shape{1, 1}, Shape{37, 75}, Shape{16, 512}}) {
    const auto m = random_matrix(GetParam(), shape.rows, shape.cols, 11);
    const std::vector<float> bias = random_floats(shape.rows, 12);
    for (const int64_t rows : {1, 2, 3, 5, 8, 17, 64, 130, 300}) {
      const std::vector<float> x = random_floats(rows * m->rows_view.cols, 13);
      for (const Isa isa : device::available_isas()) {
        if (isa == Isa::kScalar && rows > 17) continue;  // slow, and its bits are compared below
        for (const Activations act : {Activations::kF32, Activations::kBf16}) {
          SCOPED_TRACE(cat(device::isa_name(isa), " rows ", rows, " of [", shape.rows, ", ",
                           shape.cols, "] activations ", static_cast<int>(act)));
          const float* b = rows % 2 == 0 ? bias.data() : nullptr;
          expect_close(*m, x, rows, act, product(isa, act, nullptr, *m, x, rows, b), b);
        }
      }
    }
  }
}

TEST_P(MatmulFormats, BitsDoNotDependOnRowsThreadsOrStrides) {
  const auto m = random_matrix(GetParam(), 83, 230, 21);
  const int64_t n = m->rows_view.rows, k = m->rows_view.cols;
  const int64_t rows = 150;
  const std::vector<float> x = random_floats(rows * k, 22);
  ThreadPool one(1), two(2), three(3);
  for (const Isa isa : device::available_isas()) {
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      SCOPED_TRACE(cat(device::isa_name(isa), " activations ", static_cast<int>(act)));
      const std::vector<float> all = product(isa, act, nullptr, *m, x, rows);
      for (ThreadPool* pool : {&one, &two, &three}) {
        EXPECT_TRUE(same_bits(all, product(isa, act, pool, *m, x, rows))) << pool->threads();
      }
      // Rows alone and in small batches.
      for (const int64_t batch : {1, 2, 3, 4, 5, 7, 13}) {
        const int64_t first = 40 + batch;
        std::vector<float> part(x.begin() + first * k, x.begin() + (first + batch) * k);
        const std::vector<float> want(all.begin() + first * n, all.begin() + (first + batch) * n);
        EXPECT_TRUE(same_bits(want, product(isa, act, &two, *m, part, batch))) << batch;
      }
      // Wider strides, and nothing written between the rows of y.
      const int64_t xs = k + 5, ys = n + 3;
      std::vector<float> wide_x(static_cast<size_t>(rows * xs), NAN);
      for (int64_t t = 0; t < rows; ++t) {
        std::copy_n(x.begin() + t * k, k, wide_x.begin() + t * xs);
      }
      std::vector<float> wide_y(static_cast<size_t>(rows * ys), -5.0f);
      const MatmulJob job{m->tiled, nullptr, wide_y.data(), ys};
      run_matmul(isa, act, &two, wide_x.data(), xs, rows, {&job, 1});
      for (int64_t t = 0; t < rows; ++t) {
        ASSERT_EQ(std::memcmp(&wide_y[static_cast<size_t>(t * ys)],
                              &all[static_cast<size_t>(t * n)], static_cast<size_t>(n) * 4),
                  0);
        for (int64_t i = n; i < ys; ++i) ASSERT_EQ(wide_y[static_cast<size_t>(t * ys + i)], -5.0f);
      }
    }
  }
}

TEST_P(MatmulFormats, IsasAgreeBitForBitWithF32Activations) {
  const auto m = random_matrix(GetParam(), 35, 300, 31);
  for (const int64_t rows : {1, 3, 4, 11}) {
    const std::vector<float> x = random_floats(rows * m->rows_view.cols, 32);
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      const std::vector<float> scalar = product(Isa::kScalar, act, nullptr, *m, x, rows);
      for (const Isa isa : device::available_isas()) {
        // BF16 dot products keep their own order.
        if (isa == Isa::kAvx512Bf16 && act == Activations::kBf16) continue;
        SCOPED_TRACE(cat(device::isa_name(isa), " rows ", rows));
        expect_same_values(product(isa, act, nullptr, *m, x, rows), scalar);
      }
    }
  }
}

TEST_P(MatmulFormats, EveryCodeDecodesExactly) {
  // One row of x with a single one in each column in turn gives back the decoded weights.
  auto m = random_matrix(GetParam(), 16, 256, 41);
  if (m->rows_view.format == FormatId::kMxfp8 || m->rows_view.format == FormatId::kFp8Block ||
      m->rows_view.format == FormatId::kFp8Channel || m->rows_view.format == FormatId::kFp8Tensor) {
    for (size_t i = 0; i < m->codes.size(); ++i) {
      uint32_t code = static_cast<uint32_t>(i + i / 256) & 0xFFu;
      if ((code & 0x7Fu) == 0x7Fu) code = 0x80;  // NaN would poison its row: tested below
      m->codes[i] = static_cast<std::byte>(code);
    }
    m->tile();
  }
  const int64_t n = m->rows_view.rows, k = m->rows_view.cols;
  const std::vector<float> w = m->decoded();
  std::vector<float> x(static_cast<size_t>(k * k));
  for (int64_t c = 0; c < k; ++c) x[static_cast<size_t>(c * k + c)] = 1.0f;
  for (const Isa isa : device::available_isas()) {
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      SCOPED_TRACE(cat(device::isa_name(isa), " activations ", static_cast<int>(act)));
      const std::vector<float> y = product(isa, act, nullptr, *m, x, k);
      int64_t bad = 0;
      for (int64_t c = 0; c < k; ++c) {
        for (int64_t r = 0; r < n; ++r) {
          // == : the sign of a zero is lost in the sum.
          bad += y[static_cast<size_t>(c * n + r)] != w[static_cast<size_t>(r * k + c)] ? 1 : 0;
        }
      }
      EXPECT_EQ(bad, 0);
    }
  }
}

TEST(Matmul, SpecialScalesAndCodes) {
  struct Case {
    MatrixCase matrix;
    uint8_t scale;
    uint8_t code;  // of column 5 in row 3
    bool nan;
  };
  const MatrixCase nvfp4{"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3};
  const MatrixCase mxfp4{"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0};
  const MatrixCase mxfp8{"mxfp8", FormatId::kMxfp8, ScaleKind::kE8M0};
  const MatrixCase nf3{"nf3", FormatId::kNf3, ScaleKind::kE4M3};
  const MatrixCase fp8{"fp8_e8m0", FormatId::kFp8Block, ScaleKind::kE8M0, 16, 32, 0, 0};
  const Case cases[] = {
      {nvfp4, 0x00, 0x22, false}, {nvfp4, 0x01, 0x22, false}, {nvfp4, 0x81, 0x22, false},
      {nvfp4, 0xC4, 0x22, false}, {nvfp4, 0x7E, 0x22, false}, {nvfp4, 0x7F, 0x00, true},
      {nvfp4, 0xFF, 0x00, true},  {mxfp4, 0, 0x22, false},    {mxfp4, 1, 0x22, false},
      {mxfp4, 240, 0x22, false},  {mxfp4, 255, 0x00, true},   {mxfp8, 0, 0x38, false},
      {mxfp8, 255, 0x00, true},   {mxfp8, 127, 0x7F, true},   {mxfp8, 127, 0xFF, true},
      {nf3, 0x00, 0x24, false},   {nf3, 0x85, 0x24, false},   {nf3, 0x7F, 0x24, true},
      {fp8, 0, 0x38, false},      {fp8, 255, 0x00, true},     {fp8, 127, 0x7F, true},
  };
  for (const Case& c : cases) {
    auto m = random_matrix(c.matrix, 20, 64, 51);
    std::fill(m->scales.begin(), m->scales.end(), static_cast<std::byte>(c.scale));
    const bool four_bits = formats::block_format(c.matrix.format).code_bits == 4;
    const int64_t row_bytes = formats::code_row_bytes(c.matrix.format, 64);
    m->codes[static_cast<size_t>(3 * row_bytes + (four_bits ? 2 : 5))] =
        static_cast<std::byte>(c.code);
    m->tile();
    for (const int64_t rows : {1, 9}) {
      std::vector<float> x = random_floats(rows * 64, 52);
      for (const Isa isa : device::available_isas()) {
        for (const Activations act : {Activations::kF32, Activations::kBf16}) {
          SCOPED_TRACE(cat(c.matrix.name, " scale ", c.scale, " code ", c.code, " ",
                           device::isa_name(isa), " rows ", rows, " ", static_cast<int>(act)));
          const std::vector<float> y = product(isa, act, nullptr, *m, x, rows);
          if (c.nan) {
            for (int64_t t = 0; t < rows; ++t) {
              EXPECT_TRUE(std::isnan(y[static_cast<size_t>(t * 20 + 3)]));
            }
          } else {
            expect_close(*m, x, rows, act, y, nullptr);
          }
        }
      }
    }
  }
}

TEST(Matmul, OneNanScaleTouchesItsRowAlone) {
  const MatrixCase c{"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3};
  auto m = random_matrix(c, 33, 48, 61);
  m->scales[3 * 5 + 1] = std::byte{0x7F};  // row 5, second of three groups
  m->tile();
  for (const Isa isa : device::available_isas()) {
    const std::vector<float> y =
        product(isa, Activations::kF32, nullptr, *m, random_floats(48, 62), 1);
    for (size_t r = 0; r < 33; ++r) EXPECT_EQ(std::isnan(y[r]), r == 5) << r;
  }
}

TEST(Matmul, JobsOfDifferentFormatsShareX) {
  const auto cases = all_matrix_cases();
  std::vector<std::unique_ptr<Matrix>> matrices;
  std::vector<std::vector<float>> ys;
  for (size_t i = 0; i < cases.size(); ++i) {
    matrices.push_back(random_matrix(cases[i], 5 + 13 * static_cast<int64_t>(i), 96, 71));
  }
  ThreadPool pool(3);
  for (const Isa isa : device::available_isas()) {
    for (const int64_t rows : {1, 70}) {
      const std::vector<float> x = random_floats(rows * 96, 72);
      const Activations act = Activations::kBf16;
      ys.clear();
      std::vector<MatmulJob> jobs;
      for (const auto& m : matrices) {
        ys.emplace_back(static_cast<size_t>(rows * m->rows_view.rows));
        jobs.push_back({m->tiled, nullptr, ys.back().data(), m->rows_view.rows});
      }
      run_matmul(isa, act, &pool, x.data(), 96, rows, jobs);
      for (size_t i = 0; i < matrices.size(); ++i) {
        SCOPED_TRACE(cat(device::isa_name(isa), " ", cases[i].name, " rows ", rows));
        EXPECT_TRUE(same_bits(ys[i], product(isa, act, nullptr, *matrices[i], x, rows)));
      }
    }
  }
}

TEST(Matmul, InfiniteScaleInOneBlockColumnIsNotSmearedByPadding) {
  // 48 columns: the last block of 32 is half padding.
  const MatrixCase c{"fp8_block", FormatId::kFp8Block, ScaleKind::kF32, 16, 16, 0, 0};
  auto m = random_matrix(c, 16, 48, 81);
  std::fill(m->codes.begin(), m->codes.end(), std::byte{0x38});  // 1.0
  const float inf = INFINITY;
  std::memcpy(&m->scales[8], &inf, 4);
  m->tile();
  const std::vector<float> x(48, 1.0f);
  for (const Isa isa : device::available_isas()) {
    const std::vector<float> y = product(isa, Activations::kF32, nullptr, *m, x, 1);
    for (const float v : y) EXPECT_EQ(v, INFINITY) << device::isa_name(isa);
  }
}

TEST(Matmul, NoRowsOrJobsIsNothing) {
  Exec exec;
  matmul(exec, nullptr, 0, 0, {});
  const MatrixCase c{"f32", FormatId::kF32, ScaleKind::kNone};
  const auto m = random_matrix(c, 3, 3, 91);
  float y = 4.0f;
  const MatmulJob job{m->tiled, nullptr, &y, 1};
  matmul(exec, nullptr, 3, 0, {&job, 1});
  EXPECT_EQ(y, 4.0f);
}

}  // namespace
}  // namespace nibble::kernels
