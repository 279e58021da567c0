#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/attention/attention.h"

namespace nibble::kernels {
namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2;

struct Case {
  const char* name;
  int64_t k_dim, v_dim, rotary_dim;
  bool interleaved, norm;
  float scale;
  KvType type;
};
constexpr Case kCases[] = {
    {"whole head, half split", 32, 32, 32, false, false, 1.0f, KvType::kF32},
    {"partial, norm", 64, 64, 32, false, true, 1.0f, KvType::kF32},
    {"interleaved, yarn factor", 48, 32, 16, true, false, 1.25f, KvType::kF32},
    {"bf16, tails", 20, 12, 10, false, true, 1.0f, KvType::kBf16},
    {"no rotation", 16, 16, 0, false, true, 1.0f, KvType::kBf16},
};

struct How {
  device::Isa isa = device::available_isas().back();
  int threads = 1;
  bool table = false;
};

/// Two sequences: rows 0..19 at positions 9.., rows 20..22 at positions 100000...
struct Step {
  explicit Step(const Case& shape) : c(shape) {
    std::mt19937 random(21);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, int64_t n) {
      x.resize(static_cast<size_t>(n));
      for (float& e : x) e = normal(random);
    };
    fill(q, kRows * kHeads * c.k_dim);
    fill(k, kRows * kKvHeads * c.k_dim);
    fill(v, kRows * kKvHeads * c.v_dim);
    fill(q_norm, c.k_dim);
    fill(k_norm, c.k_dim);
    for (int64_t i = 0; i < c.rotary_dim / 2; ++i) {
      inv_freq.push_back(
          std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(c.rotary_dim)));
    }
    pages.geometry = {.layers = 2,
                      .kv_heads = kKvHeads,
                      .k_dim = c.k_dim,
                      .v_dim = c.v_dim,
                      .page_tokens = 32,
                      .type = c.type};
    pages.pages = 2;
    far_table.assign(100016 / 32 + 1, 1);
  }
  std::vector<SequenceRows> sequences() const {
    return {{.row_begin = 0, .rows = 20, .position_begin = 9, .pages = near_table},
            {.row_begin = 20, .rows = 3, .position_begin = 100000, .pages = far_table.data()}};
  }
  int64_t position(int64_t row) const { return row < 20 ? 9 + row : 100000 + row - 20; }

  void run(const How& how) {
    memory.assign(static_cast<size_t>(4 * pages.geometry.layer_page_bytes()), std::byte{0xFF});
    pages.data = memory.data();
    ThreadPool pool(how.threads);
    std::vector<std::byte> block(
        static_cast<size_t>(attention_workspace_bytes(kRows, kHeads, pages.geometry, how.threads)));
    Workspace workspace(block);
    const Exec exec{
        .pool = &pool, .isa = how.isa, .activations = Activations::kF32, .workspace = &workspace};
    const std::vector<SequenceRows> parts = sequences();
    AttentionPrepareArgs args;
    args.q = q.data();
    args.k = k.data();
    args.v = v.data();
    args.q_stride = kHeads * c.k_dim;
    args.k_stride = kKvHeads * c.k_dim;
    args.v_stride = kKvHeads * c.v_dim;
    args.heads = kHeads;
    args.layer = 1;
    args.q_norm = c.norm ? q_norm.data() : nullptr;
    args.k_norm = c.norm ? k_norm.data() : nullptr;
    args.norm_eps = 1e-5f;
    args.rope = {.rotary_dim = c.rotary_dim,
                 .inv_freq = inv_freq.data(),
                 .interleaved = c.interleaved,
                 .scale = c.scale};
    args.sequences = parts;
    std::vector<float> table(static_cast<size_t>(kRows * c.rotary_dim));
    if (how.table) {
      rope_table(exec, args.rope, parts, table.data());
      args.cos_sin = table.data();
    }
    attention_prepare(exec, args, pages);
  }

  /// One head after norm and RoPE, in double.
  std::vector<double> expected(const float* x, const std::vector<float>& weight,
                               int64_t row) const {
    std::vector<double> y(x, x + c.k_dim);
    if (c.norm) {
      double sum = 0;
      for (const double e : y) sum += e * e;
      const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(c.k_dim) + 1e-5);
      for (size_t i = 0; i < y.size(); ++i) y[i] *= inverse * static_cast<double>(weight[i]);
    }
    const size_t half = static_cast<size_t>(c.rotary_dim / 2);
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position(row)) * inv_freq[i];
      const double cosine = std::cos(static_cast<double>(angle)) * static_cast<double>(c.scale);
      const double sine = std::sin(static_cast<double>(angle)) * static_cast<double>(c.scale);
      const size_t a = c.interleaved ? 2 * i : i, b = c.interleaved ? 2 * i + 1 : i + half;
      const double first = y[a], second = y[b];
      y[a] = first * cosine - second * sine;
      y[b] = second * cosine + first * sine;
    }
    return y;
  }

  /// Element of a page as FP32.
  float stored(const std::byte* head, int64_t elem) const {
    if (c.type == KvType::kF32) {
      float x;
      std::memcpy(&x, head + 4 * elem, 4);
      return x;
    }
    uint16_t bits;
    std::memcpy(&bits, head + 2 * elem, 2);
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

  static constexpr int64_t kRows = 23;
  static constexpr int32_t near_table[] = {0};
  Case c;
  std::vector<float> q, k, v, q_norm, k_norm, inv_freq;
  std::vector<int32_t> far_table;
  std::vector<std::byte> memory;
  KvPages pages;
};

float to_page(float x, KvType type) {
  if (type == KvType::kF32) return x;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

TEST(AttentionPrepare, NormsRotatesAndWrites) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const Step before(c);
    Step step(c);
    step.run({});
    for (int64_t row = 0; row < Step::kRows; ++row) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t at = (row * kHeads + h) * c.k_dim;
        const std::vector<double> want = before.expected(before.q.data() + at, before.q_norm, row);
        for (int64_t d = 0; d < c.k_dim; ++d) {
          ASSERT_NEAR(static_cast<double>(step.q[static_cast<size_t>(at + d)]),
                      want[static_cast<size_t>(d)], 1e-5)
              << "row " << row << " head " << h << " dim " << d;
        }
      }
      const int64_t position = step.position(row), at = position % 32;
      for (int64_t h = 0; h < kKvHeads; ++h) {
        const int64_t k_at = (row * kKvHeads + h) * c.k_dim;
        const std::vector<double> want =
            before.expected(before.k.data() + k_at, before.k_norm, row);
        const std::byte* head = step.pages.head(1, row < 20 ? 0 : 1, h);
        for (int64_t d = 0; d < c.k_dim; ++d) {
          const float k = step.k[static_cast<size_t>(k_at + d)];
          ASSERT_NEAR(static_cast<double>(k), want[static_cast<size_t>(d)], 1e-5);
          ASSERT_EQ(step.stored(head, (at / 16 * c.k_dim + d) * 16 + at % 16), to_page(k, c.type));
        }
        for (int64_t d = 0; d < c.v_dim; ++d) {
          const float v = before.v[static_cast<size_t>((row * kKvHeads + h) * c.v_dim + d)];
          ASSERT_EQ(step.stored(head, 32 * c.k_dim + at * c.v_dim + d), to_page(v, c.type));
        }
      }
    }
  }
}

TEST(AttentionPrepare, BitsDependNeitherOnIsaThreadsNorTable) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    Step want(c);
    want.run({});
    std::vector<How> ways = {{.threads = 2}, {.threads = 3, .table = true}, {.table = true}};
    for (const device::Isa isa : device::available_isas()) ways.push_back({.isa = isa});
    for (const How& how : ways) {
      Step got(c);
      got.run(how);
      EXPECT_EQ(got.q, want.q);
      EXPECT_EQ(got.k, want.k);
      EXPECT_EQ(got.memory, want.memory);  // and nothing else was written
    }
  }
}

TEST(AttentionPrepare, Bf16RoundsToNearestEven) {
  const struct {
    const char* name;
    uint32_t bits;
    uint16_t want;
  } cases[] = {
      {"tie to even below", 0x3F808000u, 0x3F80}, {"tie to even above", 0x3F818000u, 0x3F82},
      {"just over a tie", 0x3F808001u, 0x3F81},   {"overflow", 0x7F7FFFFFu, 0x7F80},
      {"infinity", 0xFF800000u, 0xFF80},          {"NaN stays NaN", 0x7F800001u, 0x7FC0},
      {"minus zero", 0x80000000u, 0x8000},        {"subnormal", 0x00018000u, 0x0002},
  };
  const Case c{"", 16, 8, 0, false, false, 1.0f, KvType::kBf16};
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name);
    Step step(c);
    for (float& x : step.v) x = std::bit_cast<float>(test.bits);
    step.run({});
    uint16_t got;
    std::memcpy(&got, step.pages.head(1, 0, 0) + 2 * (32 * 16 + 9 * 8), 2);
    EXPECT_EQ(got, test.want);
  }
}

TEST(RopeTable, HoldsCosinesThenSines) {
  ThreadPool pool(2);
  std::vector<std::byte> block(4096);
  Workspace workspace(block);
  const Exec exec{.pool = &pool,
                  .isa = device::Isa::kScalar,
                  .activations = Activations::kF32,
                  .workspace = &workspace};
  const float inv_freq[] = {1.0f, 0.5f};
  const RopeParams rope{.rotary_dim = 4, .inv_freq = inv_freq, .interleaved = false, .scale = 2.0f};
  const SequenceRows sequence{.row_begin = 1, .rows = 2, .position_begin = 0, .pages = nullptr};
  std::vector<float> got(16, -7.0f);
  rope_table(exec, rope, std::span(&sequence, 1), got.data());
  EXPECT_EQ(got[3], -7.0f);
  EXPECT_EQ(got[12], -7.0f);
  const float want[] = {2, 2, 0, 0, 1.0806046f, 1.7551651f, 1.6829419f, 0.9588511f};
  for (size_t i = 0; i < 8; ++i) EXPECT_FLOAT_EQ(got[4 + i], want[i]) << i;
}

}  // namespace
}  // namespace nibble::kernels
