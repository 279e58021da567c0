// Products against what the machine can do, measured in the same run: read bandwidth for one row
// (decode), multiply-add peaks for 512 rows (prefill). Weights rotate through more than any cache.
// Every case is checked against formats::decode_rows before it is timed.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <functional>

#include "kernels/matmul/matmul.h"
#include "kernels/matmul/random_matrix.h"
#include "kernels/moe/moe.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the deliberately undefined operands inside its own AVX-512 header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace nibble::kernels {
namespace {

using formats::FormatId;
using formats::ScaleKind;
using testing::MatrixCase;

constexpr int64_t kSetBytes = 320LL << 20;

double seconds_of(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
double best_of(int runs, const std::function<void()>& f) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) best = std::min(best, seconds_of(f));
  return best;
}

/// Memory on huge pages, as loaded weights have it.
struct HugeBlock {
  std::byte* data = nullptr;
  explicit HugeBlock(int64_t bytes) {
    constexpr int64_t kHuge = 2 << 20;
    const auto size = static_cast<size_t>((bytes + kHuge - 1) / kHuge * kHuge);
    data = static_cast<std::byte*>(std::aligned_alloc(kHuge, size));
    NIBBLE_CHECK(data != nullptr, size);
    ::madvise(data, size, MADV_HUGEPAGE);
    std::memset(data, 1, size);
  }
  HugeBlock(const HugeBlock&) = delete;
  HugeBlock& operator=(const HugeBlock&) = delete;
  ~HugeBlock() { std::free(data); }
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float read_all(const std::byte* p, int64_t bytes) {
  __m512i sum[8];
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  for (int64_t i = 0; i + 512 <= bytes; i += 512) {
    for (int j = 0; j < 8; ++j) {
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(p + i + 64 * j));
    }
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm512_xor_si512(sum[0], sum[j]);
  return _mm512_reduce_add_ps(_mm512_castsi512_ps(sum[0]));
}
constexpr int64_t kPeakLoops = 4'000'000;
__attribute__((target("avx512f"))) float fma_loop() {
  __m512 a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{};
  const __m512 w = _mm512_set1_ps(1.5f), x = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < kPeakLoops; ++i) {
    a0 = _mm512_fmadd_ps(a0, w, x), a1 = _mm512_fmadd_ps(a1, w, x);
    a2 = _mm512_fmadd_ps(a2, w, x), a3 = _mm512_fmadd_ps(a3, w, x);
    a4 = _mm512_fmadd_ps(a4, w, x), a5 = _mm512_fmadd_ps(a5, w, x);
    a6 = _mm512_fmadd_ps(a6, w, x), a7 = _mm512_fmadd_ps(a7, w, x);
    a8 = _mm512_fmadd_ps(a8, w, x), a9 = _mm512_fmadd_ps(a9, w, x);
  }
  return _mm512_reduce_add_ps(a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9);
}
__attribute__((target("avx512f,avx512bf16"))) float dot_loop() {
  __m512 a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{}, aa{}, ab{}, ac{}, ad{};
  const auto w = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3F803F80));
  for (int64_t i = 0; i < kPeakLoops; ++i) {
    a0 = _mm512_dpbf16_ps(a0, w, w), a1 = _mm512_dpbf16_ps(a1, w, w);
    a2 = _mm512_dpbf16_ps(a2, w, w), a3 = _mm512_dpbf16_ps(a3, w, w);
    a4 = _mm512_dpbf16_ps(a4, w, w), a5 = _mm512_dpbf16_ps(a5, w, w);
    a6 = _mm512_dpbf16_ps(a6, w, w), a7 = _mm512_dpbf16_ps(a7, w, w);
    a8 = _mm512_dpbf16_ps(a8, w, w), a9 = _mm512_dpbf16_ps(a9, w, w);
    aa = _mm512_dpbf16_ps(aa, w, w), ab = _mm512_dpbf16_ps(ab, w, w);
    ac = _mm512_dpbf16_ps(ac, w, w), ad = _mm512_dpbf16_ps(ad, w, w);
  }
  return _mm512_reduce_add_ps(a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + aa + ab + ac + ad);
}
#endif

/// What the machine does at its best, per thread count 1 and 2; 0 where it cannot be measured.
struct Peaks {
  double read_gb[3] = {}, fma_gflop[3] = {}, dot_gflop[3] = {};
};

Peaks measure_peaks() {
  Peaks p;
#if defined(__x86_64__)
  const auto isas = device::available_isas();
  auto has = [&](device::Isa isa) {
    return std::find(isas.begin(), isas.end(), isa) != isas.end();
  };
  if (!has(device::Isa::kAvx512)) return p;
  constexpr int64_t kBytes = 1LL << 30;
  const HugeBlock memory(kBytes);
  for (int threads = 1; threads <= std::min(2, usable_cores()); ++threads) {
    ThreadPool pool(threads);
    auto on_all = [&](const std::function<float(int64_t)>& f) {
      pool.parallel_for(threads, [&](int64_t i, int) { benchmark::DoNotOptimize(f(i)); });
    };
    const int64_t share = kBytes / threads;
    p.read_gb[threads] =
        static_cast<double>(kBytes) / 1e9 / best_of(15, [&] {
          on_all([&](int64_t i) { return read_all(memory.data + i * share, share); });
        });
    const double loops = static_cast<double>(kPeakLoops) * threads / 1e9;
    p.fma_gflop[threads] =
        loops * 10 * 32 / best_of(5, [&] { on_all([](int64_t) { return fma_loop(); }); });
    if (!has(device::Isa::kAvx512Bf16)) continue;
    p.dot_gflop[threads] =
        loops * 14 * 64 / best_of(5, [&] { on_all([](int64_t) { return dot_loop(); }); });
  }
#endif
  return p;
}
const Peaks& peaks() {
  static const Peaks kPeaks = measure_peaks();
  return kPeaks;
}

/// Copies of one matrix, together larger than any cache.
struct WeightSet {
  std::unique_ptr<testing::Matrix> first;
  std::unique_ptr<HugeBlock> storage;
  std::vector<tensor::TensorRef> copies;
  int64_t bytes_each = 0;
};

WeightSet make_set(const MatrixCase& c, int64_t rows, int64_t cols, int64_t set_bytes) {
  WeightSet set;
  set.first = testing::random_matrix(c, rows, cols, 5);
  const TiledBytes sizes = tile16_bytes(set.first->rows_view);
  set.bytes_each = sizes.codes + sizes.scales;
  const int64_t scale_begin = (sizes.codes + 63) / 64 * 64;
  const int64_t stride = scale_begin + (sizes.scales + 63) / 64 * 64;
  const int64_t count = set_bytes / stride + 1;
  set.storage = std::make_unique<HugeBlock>(count * stride);
  std::byte* base = set.storage->data;
  const tensor::TensorRef& t = set.first->tiled;
  for (int64_t i = 0; i < count; ++i) {
    std::byte* p = base + i * stride;
    std::memcpy(p, t.view.codes, static_cast<size_t>(sizes.codes));
    if (sizes.scales > 0) {
      std::memcpy(p + scale_begin, t.view.scales, static_cast<size_t>(sizes.scales));
    }
    set.copies.push_back(t);
    set.copies.back().view.codes = p;
    set.copies.back().view.scales = sizes.scales > 0 ? p + scale_begin : nullptr;
  }
  return set;
}

struct Run {
  ThreadPool pool;
  testing::AlignedBlock scratch;
  Workspace workspace;
  Exec exec;
  Run(int threads, Activations activations, int64_t bytes)
      : pool(threads), scratch(bytes), workspace(scratch.span()) {
    exec.pool = &pool;
    exec.isa = device::choose_isa().value();
    exec.activations = activations;
    exec.workspace = &workspace;
  }
};

/// One row against the decoded weights; false if any output is off.
bool correct(const WeightSet& set, const Exec& exec, const std::vector<float>& x) {
  const int64_t n = set.first->rows_view.rows, k = set.first->rows_view.cols;
  std::vector<float> y(static_cast<size_t>(n)), w(static_cast<size_t>(k));
  const MatmulJob job{set.copies.back(), nullptr, y.data(), n};
  matmul(exec, x.data(), k, 1, {&job, 1});
  for (int64_t r = 0; r < n; r += 97) {
    formats::decode_rows(set.first->rows_view, r, 1, w.data());
    double sum = 0.0, magnitude = 0.0;
    for (size_t c = 0; c < w.size(); ++c) {
      const float xv = exec.activations == Activations::kBf16
                           ? formats::decode_bf16(formats::encode_bf16(x[c]))
                           : x[c];
      const double p = static_cast<double>(xv) * static_cast<double>(w[c]);
      sum += p;
      magnitude += std::fabs(p);
    }
    if (!(std::fabs(static_cast<double>(y[static_cast<size_t>(r)]) - sum) <=
          static_cast<double>(k) * 0x1p-23 * magnitude)) {
      return false;
    }
  }
  return true;
}

void decode_case(benchmark::State& state, const MatrixCase& c, Activations act, int threads) {
  constexpr int64_t kN = 4096, kK = 2048;
  const WeightSet set = make_set(c, kN, kK, kSetBytes);
  Run run(threads, act, matmul_workspace_bytes(1, kK, threads));
  const std::vector<float> x = testing::random_floats(kK, 3);
  std::vector<float> y(static_cast<size_t>(kN));
  if (!correct(set, run.exec, x)) return state.SkipWithError("wrong result");
  size_t next = 0;
  for (auto _ : state) {
    const MatmulJob job{set.copies[next], nullptr, y.data(), kN};
    matmul(run.exec, x.data(), kK, 1, {&job, 1});
    benchmark::DoNotOptimize(y.data());
    next = (next + 1) % set.copies.size();
  }
  const double gb = static_cast<double>(set.bytes_each * state.iterations()) / 1e9;
  state.counters["GB/s"] = benchmark::Counter(gb, benchmark::Counter::kIsRate);
  if (peaks().read_gb[threads] > 0) {
    state.counters["%read"] =
        benchmark::Counter(gb / peaks().read_gb[threads] * 100, benchmark::Counter::kIsRate);
  }
}

void prefill_case(benchmark::State& state, const MatrixCase& c, Activations act, int threads) {
  constexpr int64_t kN = 2048, kK = 2048, kRows = 512;
  const WeightSet set = make_set(c, kN, kK, 1);
  Run run(threads, act, matmul_workspace_bytes(kRows, kK, threads));
  const std::vector<float> x = testing::random_floats(kRows * kK, 3);
  std::vector<float> y(static_cast<size_t>(kRows * kN));
  if (!correct(set, run.exec, x)) return state.SkipWithError("wrong result");
  for (auto _ : state) {
    const MatmulJob job{set.copies[0], nullptr, y.data(), kN};
    matmul(run.exec, x.data(), kK, kRows, {&job, 1});
    benchmark::DoNotOptimize(y.data());
  }
  const double gflop = 2e-9 * kN * kK * kRows * static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(gflop, benchmark::Counter::kIsRate);
  const double peak = act == Activations::kBf16 && run.exec.isa == device::Isa::kAvx512Bf16
                          ? peaks().dot_gflop[threads]
                          : peaks().fma_gflop[threads];
  if (peak > 0) {
    state.counters["%peak"] = benchmark::Counter(gflop / peak * 100, benchmark::Counter::kIsRate);
  }
}

/// 128 experts of 768, top 8, hidden 2048: experts of one layer; decode reads 8 of them a token.
void moe_case(benchmark::State& state, const MatrixCase& c, Activations act, int threads,
              int64_t tokens) {
  constexpr int64_t kHidden = 2048, kIntermediate = 768, kExperts = 128, kTopK = 8;
  const int64_t sets = kExperts * 3;
  const WeightSet wide = make_set(c, kIntermediate, kHidden, 0);
  const WeightSet gates = make_set(c, kIntermediate, kHidden, wide.bytes_each * sets * 2 / 3);
  const WeightSet downs = make_set(c, kHidden, kIntermediate, wide.bytes_each * sets / 3);
  std::vector<ExpertRef> experts(kExperts);
  for (size_t e = 0; e < kExperts; ++e) {
    experts[e].gate = gates.copies[2 * e];
    experts[e].up = gates.copies[2 * e + 1];
    experts[e].down = downs.copies[e];
  }
  Run run(threads, act,
          moe_workspace_bytes(tokens, kHidden, kIntermediate, kTopK, kExperts, threads));
  if (!correct(gates, run.exec, testing::random_floats(kHidden, 3))) {
    return state.SkipWithError("wrong result");
  }
  const std::vector<float> x = testing::random_floats(tokens * kHidden, 3);
  std::vector<float> y(x.size());
  constexpr int64_t kRoutings = 64;
  std::vector<int32_t> ids;
  std::vector<int32_t> order(kExperts);
  for (size_t e = 0; e < kExperts; ++e) order[e] = static_cast<int32_t>(e);
  std::mt19937 rng(9);
  for (int64_t t = 0; t < tokens * kRoutings; ++t) {
    std::shuffle(order.begin(), order.end(), rng);
    ids.insert(ids.end(), order.begin(), order.begin() + kTopK);
  }
  const std::vector<float> weights(static_cast<size_t>(tokens * kTopK), 0.125f);
  MoeArgs a;
  a.x = x.data();
  a.tokens = tokens;
  a.hidden = kHidden;
  a.experts = experts;
  a.top_k = kTopK;
  a.weights = weights.data();
  a.y = y.data();
  int64_t routing = 0;
  for (auto _ : state) {
    a.ids = ids.data() + routing * tokens * kTopK;
    moe(run.exec, a);
    benchmark::DoNotOptimize(y.data());
    routing = (routing + 1) % kRoutings;
  }
  const auto calls = static_cast<double>(state.iterations());
  if (tokens == 1) {
    const double gb = static_cast<double>(wide.bytes_each * 3 * kTopK) / 1e9 * calls;
    state.counters["GB/s"] = benchmark::Counter(gb, benchmark::Counter::kIsRate);
    if (peaks().read_gb[threads] > 0) {
      state.counters["%read"] =
          benchmark::Counter(gb / peaks().read_gb[threads] * 100, benchmark::Counter::kIsRate);
    }
  } else {
    const double gflop =
        6e-9 * kHidden * kIntermediate * kTopK * static_cast<double>(tokens) * calls;
    state.counters["GFLOP/s"] = benchmark::Counter(gflop, benchmark::Counter::kIsRate);
  }
}

void register_all() {
  const std::vector<MatrixCase> cases = {
      {"nvfp4", FormatId::kNvfp4, ScaleKind::kE4M3}, {"mxfp4", FormatId::kMxfp4, ScaleKind::kE8M0},
      {"mxfp8", FormatId::kMxfp8, ScaleKind::kE8M0}, {"nf3", FormatId::kNf3, ScaleKind::kE4M3},
      {"bf16", FormatId::kBf16, ScaleKind::kNone},
  };
  const int most = std::min(2, usable_cores());
  auto add = [&](const std::string& what, const MatrixCase& c, auto fn) {
    for (const Activations act : {Activations::kF32, Activations::kBf16}) {
      for (int threads = 1; threads <= most; ++threads) {
        const std::string name =
            cat(what, "/", c.name, "/x_", act == Activations::kF32 ? "f32" : "bf16", "/threads_",
                threads);
        benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& s) {
          fn(s, c, act, threads);
        })->UseRealTime();
      }
    }
  };
  for (const MatrixCase& c : cases) add("decode", c, decode_case);
  for (const MatrixCase& c : cases) add("prefill512", c, prefill_case);
  for (size_t i = 0; i < 2; ++i) {
    add("moe_decode", cases[i],
        [](benchmark::State& s, const MatrixCase& c, Activations act, int threads) {
          moe_case(s, c, act, threads, 1);
        });
    add("moe_prefill512", cases[i],
        [](benchmark::State& s, const MatrixCase& c, Activations act, int threads) {
          moe_case(s, c, act, threads, 512);
        });
  }
}

}  // namespace
}  // namespace nibble::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const auto& p = nibble::kernels::peaks();
  for (int threads = 1; threads <= 2; ++threads) {
    std::printf("peak, %d threads: read %.1f GB/s, FP32 FMA %.0f GFLOP/s, BF16 dot %.0f GFLOP/s\n",
                threads, p.read_gb[threads], p.fma_gflop[threads], p.dot_gflop[threads]);
  }
  std::fflush(stdout);
  nibble::kernels::register_all();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
