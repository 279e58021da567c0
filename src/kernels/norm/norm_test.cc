#include "kernels/norm/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace nibble::kernels {
namespace {

constexpr struct {
  int64_t rows, n;
} kShapes[] = {{1, 1},   {1, 15},   {2, 16},  {3, 17},    {5, 31},
               {7, 128}, {1, 5120}, {40, 64}, {9, 20000}, {300, 128}};

struct Data {
  Data(int64_t rows, int64_t n, float magnitude) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (auto* x : {&x0, &delta}) {
      x->resize(static_cast<size_t>(rows * n));
      for (float& e : *x) e = magnitude * normal(random);
    }
    weight.resize(static_cast<size_t>(n));
    for (float& e : weight) e = normal(random);
  }
  std::vector<float> x0, delta, weight;
};

/// In double. eps inside the square root.
std::vector<double> reference(const std::vector<float>& x, int64_t rows, int64_t n,
                              const std::vector<float>& weight, float eps) {
  std::vector<double> out;
  for (int64_t t = 0; t < rows; ++t) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double e = static_cast<double>(x[static_cast<size_t>(t * n + i)]);
      sum += e * e;
    }
    const double inverse = 1 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps));
    for (int64_t i = 0; i < n; ++i) {
      out.push_back(static_cast<double>(x[static_cast<size_t>(t * n + i)]) * inverse *
                    static_cast<double>(weight[static_cast<size_t>(i)]));
    }
  }
  return out;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& want, int64_t n) {
  ASSERT_EQ(got.size(), want.size());
  // A lane adds n / 16 squares; the rest is some ten roundings.
  const double relative = (static_cast<double>(n) / 32 + 10) * 0x1p-24;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(got[i]), want[i], relative * std::fabs(want[i]) + 1e-37) << i;
  }
}

TEST(RmsNorm, IsNearTheDoubleReference) {
  ThreadPool pool(1);
  const Exec exec{.pool = &pool, .isa = device::available_isas().back()};
  for (const auto& shape : kShapes) {
    for (const float magnitude : {1e-4f, 1.0f, 1e6f}) {
      SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.n << " of " << magnitude);
      Data d(shape.rows, shape.n, magnitude);
      std::vector<float> out(d.x0.size());
      rms_norm(exec, d.x0.data(), shape.rows, shape.n, d.weight.data(), 1e-5f, out.data());
      expect_near(out, reference(d.x0, shape.rows, shape.n, d.weight, 1e-5f), shape.n);
      std::vector<float> in_place = d.x0;
      rms_norm(exec, in_place.data(), shape.rows, shape.n, d.weight.data(), 1e-5f, in_place.data());
      EXPECT_EQ(in_place, out);
    }
  }
}

TEST(RmsNorm, FusedEqualsAddThenNorm) {
  for (const device::Isa isa : device::available_isas()) {
    for (const int threads : {1, 2, 3}) {
      ThreadPool pool(threads);
      const Exec exec{.pool = &pool, .isa = isa};
      for (const auto& shape : kShapes) {
        SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.n << " "
                                        << device::isa_name(isa) << " " << threads);
        Data d(shape.rows, shape.n, 1.0f);
        std::vector<float> sum = d.x0, fused = d.x0, want(d.x0.size()), got(d.x0.size());
        const int64_t count = shape.rows * shape.n;
        add(exec, sum.data(), d.delta.data(), count);
        for (size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], d.x0[i] + d.delta[i]);
        // One row at a time on one scalar thread: the bits must not know the difference.
        ThreadPool one(1);
        const Exec plain{.pool = &one, .isa = device::Isa::kScalar};
        for (int64_t t = 0; t < shape.rows; ++t) {
          rms_norm(plain, sum.data() + t * shape.n, 1, shape.n, d.weight.data(), 1e-6f,
                   want.data() + t * shape.n);
        }
        add_rms_norm(exec, fused.data(), d.delta.data(), shape.rows, shape.n, d.weight.data(),
                     1e-6f, got.data());
        EXPECT_EQ(fused, sum);
        EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0);
      }
    }
  }
}

TEST(RmsNorm, Edges) {
  ThreadPool pool(1);
  const Exec exec{.pool = &pool, .isa = device::available_isas().back()};
  const std::vector<float> zero(20, 0.0f), weight(20, 3.0f);
  std::vector<float> out(20, -1.0f);
  rms_norm(exec, zero.data(), 1, 20, weight.data(), 1e-5f, out.data());
  EXPECT_EQ(out, zero);  // eps keeps the division finite
  std::vector<float> x(40, 1.0f);
  x[3] = NAN;
  std::vector<float> two(40);
  rms_norm(exec, x.data(), 2, 20, weight.data(), 0.0f, two.data());
  EXPECT_TRUE(std::isnan(two[0]));
  EXPECT_EQ(two[20], 3.0f);  // a NaN stays in its row
  rms_norm(exec, x.data(), 0, 20, weight.data(), 0.0f, two.data());
  add(exec, x.data(), x.data(), 0);
}

}  // namespace
}  // namespace nibble::kernels
