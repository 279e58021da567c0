#include "kernels/moe/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "kernels/matmul/random_matrix.h"

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

struct Net {
  std::unique_ptr<Matrix> gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;
  ExpertRef ref() const {
    ExpertRef r;
    r.gate = gate->tiled;
    r.up = up->tiled;
    r.down = down->tiled;
    if (!gate_bias.empty()) r.gate_bias = gate_bias.data();
    if (!up_bias.empty()) r.up_bias = up_bias.data();
    if (!down_bias.empty()) r.down_bias = down_bias.data();
    return r;
  }
};

Net random_net(const MatrixCase& g, const MatrixCase& u, const MatrixCase& d, int64_t hidden,
               int64_t intermediate, uint32_t seed, bool bias) {
  Net n;
  n.gate = random_matrix(g, intermediate, hidden, seed);
  n.up = random_matrix(u, intermediate, hidden, seed + 1);
  n.down = random_matrix(d, hidden, intermediate, seed + 2);
  if (bias) {
    n.gate_bias = random_floats(intermediate, seed + 3);
    n.up_bias = random_floats(intermediate, seed + 4);
    n.down_bias = random_floats(hidden, seed + 5);
  }
  return n;
}

/// One call's inputs, owned.
struct Block {
  int64_t tokens = 0, hidden = 0, top_k = 0;
  std::vector<float> x, weights, shared_weights;
  std::vector<int32_t> ids;
  std::vector<Net> experts;
  std::optional<Net> shared;
  MlpShape mlp;

  int64_t max_intermediate() const {
    int64_t most = shared ? shared->gate->rows_view.rows : 1;
    for (const Net& n : experts) most = std::max(most, n.gate->rows_view.rows);
    return most;
  }
  /// Tokens [first, first + count).
  std::vector<float> run(Isa isa, Activations act, ThreadPool* pool, int64_t first,
                         int64_t count) const {
    const int threads = pool != nullptr ? pool->threads() : 1;
    testing::AlignedBlock block(moe_workspace_bytes(count, hidden, max_intermediate(), top_k,
                                                    static_cast<int64_t>(experts.size()), threads));
    Workspace workspace(block.span());
    Exec exec;
    exec.pool = pool;
    exec.isa = isa;
    exec.activations = act;
    exec.workspace = &workspace;
    std::vector<ExpertRef> refs;
    for (const Net& n : experts) refs.push_back(n.ref());
    ExpertRef shared_ref;
    MoeArgs a;
    a.x = x.data() + first * hidden;
    a.tokens = count;
    a.hidden = hidden;
    a.experts = refs;
    a.top_k = top_k;
    a.ids = ids.data() + first * top_k;
    a.weights = weights.data() + first * top_k;
    if (shared) {
      shared_ref = shared->ref();
      a.shared = &shared_ref;
      if (!shared_weights.empty()) a.shared_weights = shared_weights.data() + first;
    }
    a.mlp = mlp;
    std::vector<float> y(static_cast<size_t>(count * hidden), -99.0f);
    a.y = y.data();
    moe(exec, a);
    EXPECT_EQ(workspace.mark(), 0);
    return y;
  }
  std::vector<float> run_all(Isa isa, Activations act, ThreadPool* pool) const {
    return run(isa, act, pool, 0, tokens);
  }
};

Block random_block(int64_t tokens, int64_t hidden, int64_t top_k, int64_t experts, uint32_t seed) {
  Block b;
  b.tokens = tokens;
  b.hidden = hidden;
  b.top_k = top_k;
  b.x = random_floats(tokens * hidden, seed);
  b.weights = random_floats(tokens * top_k, seed + 1);
  std::mt19937 rng(seed + 2);
  std::vector<int32_t> order(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) order[static_cast<size_t>(e)] = static_cast<int32_t>(e);
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(order.begin(), order.end(), rng);
    b.ids.insert(b.ids.end(), order.begin(), order.begin() + top_k);
  }
  return b;
}

double rounded(double x, bool round) {
  const float f = static_cast<float>(x);
  return round ? static_cast<double>(formats::decode_bf16(formats::encode_bf16(f))) : x;
}

double activation(const MlpShape& s, double g, double u) {
  auto sigmoid = [](double v) { return 1.0 / (1.0 + std::exp(-v)); };
  const double limit = static_cast<double>(s.limit);
  switch (s.activation) {
    case MlpActivation::kSilu: return g * sigmoid(g) * u;
    case MlpActivation::kGptOss:
      g = std::min(g, limit);
      u = std::clamp(u, -limit, limit);
      return (u + 1.0) * g * sigmoid(static_cast<double>(s.alpha) * g);
    case MlpActivation::kSiluLimit:
      g = std::min(g, limit);
      return g * sigmoid(g) * std::clamp(u, -limit, limit);
  }
  return 0.0;
}

std::vector<double> times(const Matrix& m, const std::vector<double>& x,
                          const std::vector<float>& bias, Activations act) {
  const FormatId f = m.rows_view.format;
  const bool round = act == Activations::kBf16 && f != FormatId::kF32 && f != FormatId::kF16;
  const std::vector<float> w = m.decoded();
  const auto k = static_cast<size_t>(m.rows_view.cols);
  std::vector<double> y(static_cast<size_t>(m.rows_view.rows));
  for (size_t r = 0; r < y.size(); ++r) {
    double sum = bias.empty() ? 0.0 : static_cast<double>(bias[r]);
    for (size_t c = 0; c < k; ++c) sum += static_cast<double>(w[r * k + c]) * rounded(x[c], round);
    y[r] = sum;
  }
  return y;
}

void add_net(const Block& b, const Net& n, const std::vector<double>& x, double weight,
             Activations act, std::vector<double>& y) {
  const std::vector<double> g = times(*n.gate, x, n.gate_bias, act);
  const std::vector<double> u = times(*n.up, x, n.up_bias, act);
  std::vector<double> h(g.size());
  for (size_t i = 0; i < h.size(); ++i) h[i] = activation(b.mlp, g[i], u[i]);
  const std::vector<double> d = times(*n.down, h, n.down_bias, act);
  for (size_t i = 0; i < y.size(); ++i) y[i] += weight * d[i];
}

std::vector<double> reference(const Block& b, Activations act) {
  std::vector<double> all;
  const auto top_k = static_cast<size_t>(b.top_k);
  for (size_t t = 0; t < static_cast<size_t>(b.tokens); ++t) {
    const auto begin = b.x.begin() + static_cast<int64_t>(t) * b.hidden;
    const std::vector<double> x(begin, begin + b.hidden);
    std::vector<double> y(static_cast<size_t>(b.hidden));
    for (size_t s = 0; s < top_k; ++s) {
      const auto e = static_cast<size_t>(b.ids[t * top_k + s]);
      add_net(b, b.experts[e], x, static_cast<double>(b.weights[t * top_k + s]), act, y);
    }
    if (b.shared) {
      const double w = b.shared_weights.empty() ? 1.0 : static_cast<double>(b.shared_weights[t]);
      add_net(b, *b.shared, x, w, act, y);
    }
    all.insert(all.end(), y.begin(), y.end());
  }
  return all;
}

/// Cosine and the largest error against the largest value.
void expect_close(const std::vector<float>& got, const std::vector<double>& want,
                  double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0.0, error = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::fabs(want[i]));
    const double e = std::fabs(static_cast<double>(got[i]) - want[i]);
    ASSERT_FALSE(std::isnan(e)) << i;
    error = std::max(error, e);
  }
  EXPECT_GT(largest, 0.0);
  EXPECT_LE(error, tolerance * largest);
}

// FP32 sums, and with BF16 a few intermediates that round to the other neighbour.
double tolerance(Activations act) { return act == Activations::kF32 ? 2e-5 : 4e-3; }

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

/// Experts whose projections go through all formats, each at its own place.
Block mixed_block(int64_t tokens, uint32_t seed) {
  const auto cases = all_matrix_cases();
  const auto count = static_cast<int64_t>(cases.size());
  // 416 = 32 * 13 columns suit every format; intermediates differ by expert.
  Block b = random_block(tokens, 416, 3, count, seed);
  for (size_t e = 0; e < cases.size(); ++e) {
    const int64_t intermediate = 32 + 32 * static_cast<int64_t>(e % 4);
    b.experts.push_back(random_net(cases[e], cases[(e + 3) % cases.size()],
                                   cases[(e + 7) % cases.size()], 416, intermediate,
                                   seed + 100 + static_cast<uint32_t>(e), e % 3 == 0));
  }
  b.shared = random_net(cases[3], cases[4], cases[2], 416, 160, seed + 50, false);
  return b;
}

TEST(Moe, MixedFormatsAgreeWithTheReference) {
  Block b = mixed_block(9, 1);
  ThreadPool pool(2);
  for (const Activations act : {Activations::kF32, Activations::kBf16}) {
    const std::vector<double> want = reference(b, act);
    for (const Isa isa : device::available_isas()) {
      SCOPED_TRACE(cat(device::isa_name(isa), " activations ", static_cast<int>(act)));
      expect_close(b.run_all(isa, act, &pool), want, tolerance(act));
    }
  }
}

TEST(Moe, BitsDoNotDependOnBatchOrThreads) {
  Block b = mixed_block(70, 2);
  b.shared_weights = random_floats(70, 3);
  ThreadPool one(1), two(2), three(3);
  for (const Isa isa : device::available_isas()) {
    if (isa == Isa::kScalar) continue;  // equal to the others by the next test, and slow
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      SCOPED_TRACE(cat(device::isa_name(isa), " activations ", static_cast<int>(act)));
      const std::vector<float> all = b.run_all(isa, act, nullptr);
      for (ThreadPool* pool : {&one, &two, &three}) {
        EXPECT_TRUE(same_bits(all, b.run_all(isa, act, pool))) << pool->threads();
      }
      struct Part {
        int64_t first, count;
      };
      for (const Part p : {Part{0, 1}, Part{69, 1}, Part{5, 2}, Part{11, 17}}) {
        const std::vector<float> want(all.begin() + p.first * b.hidden,
                                      all.begin() + (p.first + p.count) * b.hidden);
        EXPECT_TRUE(same_bits(want, b.run(isa, act, &two, p.first, p.count)))
            << p.first << " " << p.count;
      }
    }
  }
}

TEST(Moe, IsasAgreeBitForBitWithF32Activations) {
  const Block b = mixed_block(3, 4);
  const std::vector<float> scalar = b.run_all(Isa::kScalar, Activations::kF32, nullptr);
  for (const Isa isa : device::available_isas()) {
    EXPECT_TRUE(same_bits(scalar, b.run_all(isa, Activations::kF32, nullptr)))
        << device::isa_name(isa);
  }
}

TEST(Moe, EveryActivation) {
  const MatrixCase bf16{"bf16", FormatId::kBf16, ScaleKind::kNone};
  for (const MlpShape shape :
       {MlpShape{MlpActivation::kSilu, 0.0f, 1.0f}, MlpShape{MlpActivation::kGptOss, 7.0f, 1.702f},
        MlpShape{MlpActivation::kSiluLimit, 3.0f, 1.0f}}) {
    Block b = random_block(5, 48, 2, 4, 5);
    b.mlp = shape;
    // 20 = one tile and a quarter: padding lanes and a half block.
    for (uint32_t e = 0; e < 4; ++e) {
      b.experts.push_back(random_net(bf16, bf16, bf16, 48, 20, 60 + 10 * e, true));
    }
    const std::vector<double> want = reference(b, Activations::kF32);
    for (const Isa isa : device::available_isas()) {
      SCOPED_TRACE(cat(device::isa_name(isa), " ", static_cast<int>(shape.activation)));
      expect_close(b.run_all(isa, Activations::kF32, nullptr), want, tolerance(Activations::kF32));
    }
  }
}

TEST(Moe, LimitsClampAndLargeGatesStayFinite) {
  const MatrixCase f32{"f32", FormatId::kF32, ScaleKind::kNone};
  Block b = random_block(2, 32, 1, 1, 6);
  b.experts.push_back(random_net(f32, f32, f32, 32, 32, 61, false));
  for (float& v : b.x) v *= 100.0f;
  for (const MlpShape shape :
       {MlpShape{MlpActivation::kSilu, 0.0f, 1.0f}, MlpShape{MlpActivation::kGptOss, 7.0f, 1.702f},
        MlpShape{MlpActivation::kSiluLimit, 3.0f, 1.0f}}) {
    b.mlp = shape;
    expect_close(b.run_all(Isa::kScalar, Activations::kF32, nullptr),
                 reference(b, Activations::kF32), tolerance(Activations::kF32));
  }
}

TEST(Moe, GateAndUpAreNotInterchanged) {
  // Gate is strongly positive, up alternates in sign: exchanging them turns the output over.
  const MatrixCase f32{"f32", FormatId::kF32, ScaleKind::kNone};
  const int64_t hidden = 16, intermediate = 16;
  Block b;
  b.tokens = 1;
  b.hidden = hidden;
  b.top_k = 1;
  b.ids = {0};
  b.weights = {1.0f};
  b.x.assign(16, 1.0f);
  b.experts.push_back(random_net(f32, f32, f32, hidden, intermediate, 62, false));
  auto fill = [](Matrix& m, auto value) {
    for (int64_t r = 0; r < m.rows_view.rows; ++r) {
      for (int64_t c = 0; c < m.rows_view.cols; ++c) {
        const float v = value(r, c);
        std::memcpy(&m.codes[static_cast<size_t>((r * m.rows_view.cols + c) * 4)], &v, 4);
      }
    }
    m.tile();
  };
  fill(*b.experts[0].gate, [](int64_t, int64_t) { return 0.5f; });                         // 8
  fill(*b.experts[0].up, [](int64_t r, int64_t) { return r % 2 == 0 ? 0.25f : -0.25f; });  // +-4
  fill(*b.experts[0].down, [](int64_t r, int64_t c) { return r == c ? 1.0f : 0.0f; });
  for (const Isa isa : device::available_isas()) {
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      const std::vector<float> y = b.run_all(isa, act, nullptr);
      for (size_t i = 0; i < y.size(); ++i) {
        EXPECT_NEAR(y[i], i % 2 == 0 ? 32.0f : -32.0f, 0.1f) << device::isa_name(isa);
      }
    }
  }
}

TEST(Moe, OneBusyExpertAndManyEmptyOnes) {
  const MatrixCase mx{"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0};
  Block b = random_block(150, 64, 1, 7, 7);
  std::fill(b.ids.begin(), b.ids.end(), 4);
  for (uint32_t e = 0; e < 7; ++e) {
    b.experts.push_back(random_net(mx, mx, mx, 64, 96, 70 + 10 * e, false));
  }
  ThreadPool pool(2);
  const std::vector<double> want = reference(b, Activations::kF32);
  for (const Isa isa : device::available_isas()) {
    expect_close(b.run_all(isa, Activations::kF32, &pool), want, tolerance(Activations::kF32));
  }
}

TEST(Moe, LargeEnoughForManyTasks) {
  const MatrixCase nv{"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3};
  Block b = random_block(33, 512, 4, 8, 8);
  for (uint32_t e = 0; e < 8; ++e) {
    b.experts.push_back(random_net(nv, nv, nv, 512, 256, 80 + 10 * e, false));
  }
  ThreadPool pool(3);
  const Isa isa = device::available_isas().back();
  for (const Activations act : {Activations::kF32, Activations::kBf16}) {
    const std::vector<float> all = b.run_all(isa, act, &pool);
    expect_close(all, reference(b, act), tolerance(act));
    EXPECT_TRUE(same_bits(all, b.run_all(isa, act, nullptr)));
    const std::vector<float> last(all.end() - b.hidden, all.end());
    EXPECT_TRUE(same_bits(last, b.run(isa, act, &pool, 32, 1)));
  }
}

TEST(Moe, SharedExpertAloneIsADenseMlp) {
  const MatrixCase mx8{"mxfp8", FormatId::kMxfp8, ScaleKind::kE8M0};
  Block b = random_block(6, 96, 0, 1, 9);
  b.experts.clear();
  b.shared = random_net(mx8, mx8, mx8, 96, 64, 90, true);
  const std::vector<double> want = reference(b, Activations::kF32);
  for (const Isa isa : device::available_isas()) {
    const std::vector<float> y = b.run_all(isa, Activations::kF32, nullptr);
    expect_close(y, want, tolerance(Activations::kF32));
    testing::AlignedBlock block(moe_workspace_bytes(6, 96, 64, 0, 0, 1));
    Workspace workspace(block.span());
    Exec exec;
    exec.isa = isa;
    exec.workspace = &workspace;
    std::vector<float> dense(y.size());
    mlp(exec, b.x.data(), 6, 96, b.shared->ref(), b.mlp, dense.data());
    EXPECT_TRUE(same_bits(y, dense));
  }
}

TEST(Moe, NanScaleInAPaddedTileStaysInItsExpert) {
  // Tensor FP8 with a NaN scale: padding lanes must not leak it into other rows of h.
  const MatrixCase tensor_fp8{"fp8_tensor", FormatId::kFp8Tensor, ScaleKind::kF32};
  const MatrixCase f32{"f32", FormatId::kF32, ScaleKind::kNone};
  Block b = random_block(1, 32, 1, 2, 10);
  b.experts.push_back(random_net(tensor_fp8, f32, f32, 32, 20, 91, false));
  b.experts.push_back(random_net(f32, f32, f32, 32, 20, 92, false));
  const float inf = INFINITY;
  std::memcpy(b.experts[0].gate->scales.data(), &inf, 4);
  std::fill(b.experts[0].gate->codes.begin(), b.experts[0].gate->codes.end(), std::byte{0xB8});
  b.experts[0].gate->tile();
  for (float& v : b.x) v = 1.0f;
  b.mlp = {MlpActivation::kSiluLimit, 5.0f, 1.0f};
  b.ids = {1};
  for (const Isa isa : device::available_isas()) {
    for (const float v : b.run_all(isa, Activations::kF32, nullptr)) EXPECT_FALSE(std::isnan(v));
  }
}

TEST(Moe, NoTokensIsNothing) {
  Exec exec;
  moe(exec, MoeArgs{});
}

}  // namespace
}  // namespace nibble::kernels
