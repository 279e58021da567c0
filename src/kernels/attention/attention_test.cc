#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace nibble::kernels {
namespace {

struct Case {
  const char* name;
  int64_t heads, kv_heads, k_dim, v_dim;
  int64_t context;    // positions of the sequence
  int64_t first = 0;  // rows [first, context) are computed
  int64_t window = 0;
  bool sinks = false;
  KvType type = KvType::kF32;
  int64_t page_tokens = 64;
};

float round_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

/// q, k and v of one sequence, k and v already representable in the page type.
struct Sequence {
  Sequence(const Case& c, uint32_t seed) : shape(c) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, int64_t n, bool round) {
      x.resize(static_cast<size_t>(n));
      for (float& e : x) e = round ? round_bf16(normal(random)) : normal(random);
    };
    fill(q, c.context * c.heads * c.k_dim, false);
    fill(k, c.context * c.kv_heads * c.k_dim, c.type == KvType::kBf16);
    fill(v, c.context * c.kv_heads * c.v_dim, c.type == KvType::kBf16);
    fill(sinks, c.heads, false);
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.k_dim)); }
  const float* key(int64_t position, int64_t head) const {
    return k.data() + (position * shape.kv_heads + head) * shape.k_dim;
  }
  const float* value(int64_t position, int64_t head) const {
    return v.data() + (position * shape.kv_heads + head) * shape.v_dim;
  }
  Case shape;
  std::vector<float> q, k, v, sinks;
};

/// Pages of layer 1 of 2, in a random order, everything unwritten is NaN.
struct Pages {
  Pages(const Case& c, int64_t count, uint32_t seed) {
    pages.geometry = {.layers = 2,
                      .kv_heads = c.kv_heads,
                      .k_dim = c.k_dim,
                      .v_dim = c.v_dim,
                      .page_tokens = c.page_tokens,
                      .type = c.type};
    pages.pages = count;
    memory.assign(static_cast<size_t>(2 * count * pages.geometry.layer_page_bytes()),
                  std::byte{0xFF});
    pages.data = memory.data();
    order.resize(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  }
  void put(std::byte* head, int64_t elem, float x) const {
    if (pages.geometry.type == KvType::kF32) {
      std::memcpy(head + 4 * elem, &x, 4);
    } else {
      const uint16_t bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
      std::memcpy(head + 2 * elem, &bits, 2);
    }
  }
  /// The sequence's page table is order[first_page...].
  void write(const Sequence& s, int64_t first_page) const {
    const KvGeometry& g = pages.geometry;
    for (int64_t p = 0; p < s.shape.context; ++p) {
      const int64_t page = order[static_cast<size_t>(first_page + p / g.page_tokens)];
      const int64_t at = p % g.page_tokens;
      for (int64_t h = 0; h < g.kv_heads; ++h) {
        std::byte* head = pages.head(1, page, h);
        for (int64_t d = 0; d < g.k_dim; ++d) {
          put(head, (at / 16 * g.k_dim + d) * 16 + at % 16, s.key(p, h)[d]);
        }
        for (int64_t d = 0; d < g.v_dim; ++d) {
          put(head, g.page_tokens * g.k_dim + at * g.v_dim + d, s.value(p, h)[d]);
        }
      }
    }
  }
  KvPages pages;
  std::vector<std::byte> memory;
  std::vector<int32_t> order;
};

int64_t pages_of(const Case& c) { return (c.context + c.page_tokens - 1) / c.page_tokens; }

const device::Isa kBest = device::available_isas().back();

struct How {
  device::Isa isa = kBest;
  int threads = 1;
  int64_t chunk = 0;  // rows of a step; 0: all
  uint32_t page_seed = 7;
};

/// One call over rows; the workspace is exactly as large as promised.
void call(const How& how, ThreadPool& pool, const Sequence& s, const float* q, int64_t rows,
          std::span<const SequenceRows> sequences, const KvPages& pages, float* out) {
  const Case& c = s.shape;
  std::vector<std::byte> block(static_cast<size_t>(
      attention_workspace_bytes(rows, c.heads, pages.geometry, pool.threads())));
  Workspace workspace(block);
  const Exec exec{
      .pool = &pool, .isa = how.isa, .activations = Activations::kF32, .workspace = &workspace};
  AttentionArgs args;
  args.q = q;
  args.q_stride = c.heads * c.k_dim;
  args.out = out;
  args.out_stride = c.heads * c.v_dim;
  args.heads = c.heads;
  args.layer = 1;
  args.scale = s.scale();
  args.window = c.window;
  args.sinks = c.sinks ? s.sinks.data() : nullptr;
  args.sequences = sequences;
  attention(exec, args, pages);
  EXPECT_EQ(workspace.mark(), 0);
}

/// Rows [first, context) of one sequence alone, in steps of how.chunk rows.
std::vector<float> attend(const Sequence& s, const How& how) {
  const Case& c = s.shape;
  Pages pages(c, pages_of(c) + 2, how.page_seed);
  pages.write(s, 1);
  ThreadPool pool(how.threads);
  const int64_t out_row = c.heads * c.v_dim;
  std::vector<float> out(static_cast<size_t>((c.context - c.first) * out_row), -1.0f);
  const int64_t step = how.chunk == 0 ? c.context : how.chunk;
  for (int64_t p = c.first; p < c.context; p += step) {
    const int64_t rows = std::min(step, c.context - p);
    const SequenceRows part{.row_begin = 0,
                            .rows = static_cast<int32_t>(rows),
                            .position_begin = static_cast<int32_t>(p),
                            .pages = pages.order.data() + 1};
    call(how, pool, s, s.q.data() + p * c.heads * c.k_dim, rows, std::span(&part, 1), pages.pages,
         out.data() + (p - c.first) * out_row);
  }
  return out;
}

/// One (row, head) in double, with the contract's bound.
struct Expected {
  std::vector<double> out;
  double bound;
};
Expected reference(const Sequence& s, int64_t row, int64_t head) {
  const Case& c = s.shape;
  const int64_t kv = head * c.kv_heads / c.heads;
  const float* q = s.q.data() + (row * c.heads + head) * c.k_dim;
  const int64_t begin = c.window == 0 ? 0 : std::max<int64_t>(0, row - c.window + 1);
  std::vector<double> score;
  double most_abs = 0, v_abs = 0;
  for (int64_t p = begin; p <= row; ++p) {
    double sum = 0, abs = 0;
    for (int64_t d = 0; d < c.k_dim; ++d) {
      const double product = static_cast<double>(q[d]) * static_cast<double>(s.key(p, kv)[d]);
      sum += product;
      abs += std::fabs(product);
    }
    score.push_back(sum * static_cast<double>(s.scale()));
    most_abs = std::max(most_abs, abs);
  }
  double top = *std::max_element(score.begin(), score.end());
  const double sink = static_cast<double>(s.sinks[static_cast<size_t>(head)]);
  if (c.sinks) top = std::max(top, sink);
  double total = c.sinks ? std::exp(sink - top) : 0.0;
  Expected e{std::vector<double>(static_cast<size_t>(c.v_dim), 0.0), 0.0};
  for (int64_t p = begin; p <= row; ++p) {
    const double w = std::exp(score[static_cast<size_t>(p - begin)] - top);
    total += w;
    for (int64_t d = 0; d < c.v_dim; ++d) {
      const double v = static_cast<double>(s.value(p, kv)[d]);
      e.out[static_cast<size_t>(d)] += w * v;
      v_abs = std::max(v_abs, std::fabs(v));
    }
  }
  for (double& x : e.out) x /= total;
  const double score_error =
      static_cast<double>(c.k_dim) * 0x1p-23 * static_cast<double>(s.scale()) * most_abs;
  e.bound = v_abs * (2 * score_error + static_cast<double>(row - begin + 33) * 0x1p-23);
  return e;
}

void expect_near_reference(const Sequence& s, const std::vector<float>& got) {
  const Case& c = s.shape;
  for (int64_t row = c.first; row < c.context; ++row) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const Expected want = reference(s, row, h);
      for (int64_t d = 0; d < c.v_dim; ++d) {
        const size_t at = static_cast<size_t>(((row - c.first) * c.heads + h) * c.v_dim + d);
        ASSERT_NEAR(static_cast<double>(got[at]), want.out[static_cast<size_t>(d)], want.bound)
            << "row " << row << " head " << h << " dim " << d;
      }
    }
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

constexpr KvType kBf16 = KvType::kBf16;
constexpr KvType kF32 = KvType::kF32;
constexpr Case kCases[] = {
    // name, heads, kv_heads, k_dim, v_dim, context, first, window, sinks, type, page
    {"one position", 2, 1, 16, 16, 1},
    {"a block less one", 2, 2, 16, 16, 15},
    {"a block", 2, 1, 32, 32, 16},
    {"a block and one", 4, 1, 48, 48, 17},
    {"glm4 shape", 4, 2, 64, 64, 70},
    {"gqa 8", 8, 1, 64, 64, 40},
    {"gqa 12", 24, 2, 128, 128, 37},
    {"heads in parts", 40, 1, 32, 16, 20},
    {"bf16", 8, 2, 64, 64, 75, 0, 0, false, kBf16},
    {"bf16, page of a block", 4, 2, 48, 32, 75, 0, 0, true, kBf16, 16},
    {"page of 48", 2, 1, 16, 32, 130, 0, 0, false, kF32, 48},
    {"dims with tails", 3, 1, 20, 24, 35},
    {"bf16 dims with tails", 3, 3, 7, 5, 35, 0, 0, false, kBf16},
    {"mla", 16, 1, 80, 40, 33},
    {"window 1", 2, 1, 16, 16, 40, 0, 1},
    {"window 5", 4, 2, 32, 32, 60, 0, 5},
    {"window 16, sinks", 8, 2, 64, 64, 70, 0, 16, true},
    {"window 17, bf16", 2, 2, 64, 64, 70, 0, 17, false, kBf16},
    {"window past the context", 2, 1, 16, 16, 20, 0, 100},
    {"sinks", 4, 4, 32, 32, 33, 0, 0, true},
    {"across a chunk", 4, 2, 32, 32, 540, 500},
    {"three chunks", 8, 2, 64, 64, 1100, 1085},
    {"three chunks, sinks, bf16", 2, 1, 64, 64, 1090, 1020, 0, true, kBf16},
    {"window over a chunk border", 4, 1, 32, 32, 1040, 1000, 600},
    {"window inside the last chunk", 4, 1, 32, 32, 1040, 1000, 10},
};

TEST(Attention, IsNearTheDoubleReference) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const Sequence s(c, 11);
    expect_near_reference(s, attend(s, {}));
  }
}

TEST(Attention, BitsDependNeitherOnIsaThreadsChunkingNorPages) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const Sequence s(c, 12);
    const std::vector<float> want = attend(s, {});
    for (const device::Isa isa : device::available_isas()) {
      EXPECT_TRUE(same_bits(attend(s, {.isa = isa}), want)) << device::isa_name(isa);
    }
    const How kWays[] = {{.threads = 2},
                         {.threads = 3},
                         {.chunk = 1},
                         {.chunk = 7},
                         {.chunk = 16},
                         {.threads = 2, .chunk = 7},
                         {.threads = 3, .chunk = 1},
                         {.threads = 3, .chunk = 16},
                         {.threads = 8, .chunk = 13}};
    for (const How& how : kWays) {
      EXPECT_TRUE(same_bits(attend(s, how), want))
          << how.threads << " threads, chunks of " << how.chunk;
    }
    EXPECT_TRUE(same_bits(attend(s, {.page_seed = 99}), want));
    for (const int64_t page_tokens : {16, 32, 64}) {
      Sequence other = s;
      other.shape.page_tokens = page_tokens;
      EXPECT_TRUE(same_bits(attend(other, {}), want)) << page_tokens;
    }
  }
}

TEST(Attention, ARaggedBatchEqualsItsSequencesAlone) {
  for (const int64_t window : {0, 24}) {
    constexpr int64_t kContexts[] = {700, 1, 90, 1030, 16};
    constexpr int64_t kFirsts[] = {699, 0, 40, 1000, 0};  // decode, decode, prefill, prefill, all
    std::vector<Sequence> sequences;
    int64_t pages_total = 0, rows_total = 0;
    for (size_t i = 0; i < std::size(kContexts); ++i) {
      const Case c{.name = "",
                   .heads = 8,
                   .kv_heads = 2,
                   .k_dim = 32,
                   .v_dim = 16,
                   .context = kContexts[i],
                   .first = kFirsts[i],
                   .window = window,
                   .sinks = false};
      sequences.emplace_back(c, static_cast<uint32_t>(i));
      pages_total += pages_of(c);
      rows_total += c.context - c.first;
    }
    Pages pages(sequences[0].shape, pages_total, 5);
    std::vector<float> q, want;
    std::vector<SequenceRows> parts;
    int64_t page = 0, row = 0;
    for (const Sequence& s : sequences) {
      const Case& c = s.shape;
      pages.write(s, page);
      parts.push_back({.row_begin = static_cast<int32_t>(row),
                       .rows = static_cast<int32_t>(c.context - c.first),
                       .position_begin = static_cast<int32_t>(c.first),
                       .pages = pages.order.data() + page});
      page += pages_of(c);
      row += c.context - c.first;
      q.insert(q.end(), s.q.begin() + c.first * c.heads * c.k_dim, s.q.end());
      const std::vector<float> alone = attend(s, {});
      want.insert(want.end(), alone.begin(), alone.end());
    }
    for (const int threads : {1, 3, 8}) {
      ThreadPool pool(threads);
      std::vector<float> got(want.size());
      call({}, pool, sequences[0], q.data(), rows_total, parts, pages.pages, got.data());
      EXPECT_TRUE(same_bits(got, want)) << threads << " threads, window " << window;
    }
  }
}

TEST(Attention, ANaNReachesNoEarlierRow) {
  const Case c{.name = "", .heads = 8, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .context = 60};
  Sequence s(c, 3);
  const std::vector<float> clean = attend(s, {});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  s.v[static_cast<size_t>(20 * c.kv_heads * c.v_dim)] = nan;        // value 0 of KV head 0
  s.k[static_cast<size_t>((50 * c.kv_heads + 1) * c.k_dim)] = nan;  // KV head 1
  const std::vector<float> got = attend(s, {});
  for (int64_t row = 0; row < c.context; ++row) {
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t d = 0; d < c.v_dim; ++d) {
        const size_t at = static_cast<size_t>((row * c.heads + h) * c.v_dim + d);
        const bool spoilt = h < 4 ? row >= 20 && d == 0 : row >= 50;
        if (spoilt) {
          ASSERT_TRUE(std::isnan(got[at])) << row << " " << h;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(got[at]), std::bit_cast<uint32_t>(clean[at]))
              << row << " " << h;
        }
      }
    }
  }
}

TEST(Attention, LargeScoresStayFinite) {
  const Case c{.name = "", .heads = 2, .kv_heads = 1, .k_dim = 16, .v_dim = 16, .context = 40};
  Sequence s(c, 4);
  for (float& x : s.q) x *= 1000.0f;
  expect_near_reference(s, attend(s, {}));
}

TEST(Attention, NothingToDo) {
  const Case c{.name = "", .heads = 2, .kv_heads = 1, .k_dim = 16, .v_dim = 16, .context = 4};
  const Sequence s(c, 4);
  const Pages pages(c, 1, 1);
  ThreadPool pool(2);
  const SequenceRows none{.row_begin = 0, .rows = 0, .position_begin = 3, .pages = nullptr};
  float out = 5.0f;
  call({}, pool, s, s.q.data(), 1, std::span(&none, 1), pages.pages, &out);
  call({}, pool, s, s.q.data(), 0, {}, pages.pages, &out);
  EXPECT_EQ(out, 5.0f);
}

TEST(KvPages, OffsetsPass2To31) {
  KvPages pages;
  pages.geometry = {.layers = 92, .kv_heads = 8, .k_dim = 128, .v_dim = 128};
  pages.pages = 4096;
  pages.data = reinterpret_cast<std::byte*>(uintptr_t{1} << 20);
  const int64_t head_bytes = 64 * 256 * 4;
  const int64_t want = (int64_t{91} * 4096 + 4095) * 8 * head_bytes + 7 * head_bytes;
  ASSERT_GT(want, int64_t{1} << 36);
  EXPECT_EQ(reinterpret_cast<intptr_t>(pages.head(91, 4095, 7)), (intptr_t{1} << 20) + want);
  EXPECT_EQ(pages.geometry.bytes_per_token(), 92 * 8 * 256 * 4);
}

}  // namespace
}  // namespace nibble::kernels
