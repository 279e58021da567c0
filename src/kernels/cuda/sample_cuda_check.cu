// Sampling. The reference is the definition in runtime/sampler.h written with sorts; tokens must be
// equal, logprobs close.
#include <cmath>
#include <numeric>

#include "kernels/cuda/sample.h"
#include "kernels/cuda/test_device.h"

namespace nibble::kernels::cuda {
namespace {

using namespace test;

// Host code of this file is compiled without FMA contraction (x86-64 baseline has none).
float exp_nonpositive(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 0x1.715476p+0f + 0x1.8p23f;
  const float n = shifted - 0x1.8p23f;
  const float f = (clamped - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
  float sum = 1.0f / 5040.0f;
  for (const float c :
       {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f}) {
    sum = sum * f + c;
  }
  return x < -87.0f ? 0.0f : std::ldexp(sum, static_cast<int>(n));
}

uint64_t random_bits(uint64_t seed, uint64_t draw) {
  uint32_t c[4] = {static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32), 0, 0};
  uint32_t k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {
        static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
        static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return uint64_t{c[1]} << 32 | c[0];
}

struct Answer {
  int32_t token;
  double logprob;
};

Answer reference(const float* logits, int64_t vocab, const RowSampling& p) {
  float max = -INFINITY;
  for (int64_t i = 0; i < vocab; ++i) {
    if (!(logits[i] < INFINITY)) return {-1, 0};
    max = std::max(max, logits[i]);
  }
  if (max == -INFINITY) return {-1, 0};
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - max);
  const auto answer = [&](int32_t token) {
    return Answer{token, static_cast<double>(logits[token]) - max - std::log(sum)};
  };
  if (p.temperature == 0.0f) {
    return answer(static_cast<int32_t>(std::find(logits, logits + vocab, max) - logits));
  }
  struct Entry {
    float scaled;
    int32_t id;
    uint64_t weight;
  };
  const float cutoff = p.min_p > 0 ? std::max(std::log(p.min_p), -30.0f) : -30.0f;
  std::vector<Entry> kept;
  for (int64_t i = 0; i < vocab; ++i) {
    const float scaled = (logits[i] - max) / p.temperature;
    if (scaled >= cutoff) {
      kept.push_back({scaled, static_cast<int32_t>(i),
                      static_cast<uint64_t>(exp_nonpositive(scaled) * 0x1p42f)});
    }
  }
  std::stable_sort(kept.begin(), kept.end(),
                   [](const Entry& a, const Entry& b) { return a.scaled > b.scaled; });
  const auto total = [&] {
    return std::accumulate(kept.begin(), kept.end(), uint64_t{0},
                           [](uint64_t s, const Entry& e) { return s + e.weight; });
  };
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < kept.size()) {
    kept.resize(static_cast<size_t>(p.top_k));
  }
  if (p.top_p < 1.0f) {
    const double want = std::ceil(static_cast<double>(p.top_p) * static_cast<double>(total()));
    const uint64_t need = std::clamp<uint64_t>(static_cast<uint64_t>(want), 1, total());
    size_t n = 0;
    for (uint64_t mass = 0; mass < need; ++n) mass += kept[n].weight;
    kept.resize(n);
  }
  std::sort(kept.begin(), kept.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  __extension__ using Wide = unsigned __int128;
  uint64_t rest =
      static_cast<uint64_t>(static_cast<Wide>(random_bits(p.seed, p.draw)) * total() >> 64);
  for (const Entry& e : kept) {
    if (rest < e.weight) return answer(e.id);
    rest -= e.weight;
  }
  return {-2, 0};
}

std::vector<RowSampling> all_params() {
  std::vector<RowSampling> params;
  uint64_t seed = 1;
  for (const float temperature : {0.0f, 0.3f, 1.0f, 5.0f}) {
    for (const int32_t top_k : {0, 1, 20, 3000, 100000000}) {
      for (const float top_p : {1.0f, 0.95f, 0.2f}) {
        for (const float min_p : {0.0f, 0.05f}) {
          params.push_back({temperature, top_p, min_p, top_k, seed * 0x123456789u, seed % 5});
          ++seed;
        }
      }
    }
  }
  return params;
}

enum class Shape { kNormal, kSteep, kFlat, kFewValues, kHoles };

std::vector<float> make_logits(Random& random, Shape shape, int64_t vocab) {
  std::vector<float> v = random.normals(vocab, shape == Shape::kSteep ? 8.0f : 2.0f);
  for (float& x : v) {
    if (shape == Shape::kFlat) x = 1.25f;
    if (shape == Shape::kFewValues) x = std::floor(x);
    if (shape == Shape::kHoles && random.below(3) != 0) x = -INFINITY;
  }
  if (shape == Shape::kHoles) v[static_cast<size_t>(random.below(vocab))] = 3.0f;
  return v;
}

struct Case {
  std::vector<float> logits;  // [rows][stride]
  int64_t rows, vocab, stride;
  std::vector<RowSampling> params;
};

struct Output {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> again;  // SampleArgs::again
  bool operator==(const Output& o) const {
    return tokens == o.tokens && again == o.again &&
           std::memcmp(logprobs.data(), o.logprobs.data(), logprobs.size() * sizeof(float)) == 0;
  }
};

class Runner {
 public:
  Runner(int64_t max_rows, int64_t vocab) : scratch_(sample_scratch_bytes(max_rows, vocab)) {
    scratch_.fill(0);
  }
  Output run(const Case& c, int64_t first, int64_t rows, bool greedy_only = false) {
    const Device<float> logits(c.logits);
    const Device<RowSampling> params(c.params);
    Device<int32_t> tokens(rows), again(rows);
    Device<float> logprobs(rows);
    tokens.fill(0xEE);
    again.fill(0xDD);
    SampleArgs args;
    args.logits = logits.get() + first * c.stride;
    args.rows = rows;
    args.vocab = c.vocab;
    args.row_stride = c.stride;
    args.params = params.get() + first;
    args.greedy_only = greedy_only;
    args.tokens = tokens.get();
    args.again = rows % 2 == 0 ? nullptr : again.get();
    args.logprobs = logprobs.get();
    must(sample(args, scratch_.get(), scratch_.bytes(), nullptr), "sample");
    must(cudaDeviceSynchronize(), "sample run");
    return {tokens.download(), logprobs.download(),
            args.again == nullptr ? tokens.download() : again.download()};
  }

 private:
  Device<std::byte> scratch_;
};

void check_case(Checks& checks, const std::string& name, const Case& c) {
  Runner runner(c.rows, c.vocab);
  const Output got = runner.run(c, 0, c.rows);
  double worst = 0;
  for (int64_t r = 0; r < c.rows; ++r) {
    const auto i = static_cast<size_t>(r);
    const RowSampling& p = c.params[i];
    const Answer want = reference(c.logits.data() + r * c.stride, c.vocab, p);
    checks.expect(got.tokens[i] == want.token,
                  cat(name, " row ", r, " T ", p.temperature, " k ", p.top_k, " p ", p.top_p,
                      " min ", p.min_p, ": ", got.tokens[i], " not ", want.token));
    const double error = std::fabs(got.logprobs[i] - want.logprob) / (1 + std::fabs(want.logprob));
    worst = std::max(worst, error);
    checks.within(error, 2e-6, cat(name, " row ", r, " logprob, relative error"));
  }
  checks.expect(got.again == got.tokens, name + ": tokens once more");
  // Rows alone with the same scratch, then all again.
  for (int64_t r = 0; r < c.rows; r += 7) {
    const Output one = runner.run(c, r, 1);
    checks.expect(one.tokens[0] == got.tokens[static_cast<size_t>(r)] && one.again == one.tokens &&
                      one.logprobs[0] == got.logprobs[static_cast<size_t>(r)],
                  cat(name, " row ", r, " alone"));
  }
  checks.expect(runner.run(c, 0, c.rows) == got, name + ": again");
  checks.line(cat("sample ", name, ": ", c.rows, " rows, worst logprob error ", worst));
}

void check_all(Checks& checks) {
  const bool small = checks.quick();
  const auto params = all_params();
  const auto rows = static_cast<int64_t>(params.size());
  const std::vector<std::pair<Shape, const char*>> shapes = {{Shape::kNormal, "normal"},
                                                             {Shape::kSteep, "steep"},
                                                             {Shape::kFlat, "flat"},
                                                             {Shape::kFewValues, "few values"},
                                                             {Shape::kHoles, "holes"}};
  for (const int64_t vocab : {1, 37, 1024, 5001, 32000}) {
    if (small && vocab != 37 && vocab != 5001) continue;
    if (vocab == 32000 && !checks.full()) continue;
    for (const auto& [shape, name] : shapes) {
      if (small && shape != Shape::kNormal && shape != Shape::kFlat) continue;
      Random random(static_cast<uint64_t>(vocab));
      Case c{{}, rows, vocab, vocab + 3, params};
      for (int64_t r = 0; r < rows; ++r) {
        const auto row = make_logits(random, shape, vocab);
        c.logits.insert(c.logits.end(), row.begin(), row.end());
        c.logits.resize(c.logits.size() + 3, NAN);  // between rows: never read
      }
      check_case(checks, cat(name, " vocab ", vocab), c);
    }
  }
  {  // Logits without a distribution, and one 0 and -0 tie.
    Random random(9);
    const int64_t vocab = 3000;
    Case c{{}, 6, vocab, vocab, std::vector<RowSampling>(6)};
    for (int64_t r = 0; r < 6; ++r) {
      auto row = make_logits(random, Shape::kNormal, vocab);
      if (r < 2) row[2999] = NAN;
      if (r == 2) row[5] = INFINITY;
      if (r == 3) std::fill(row.begin(), row.end(), -INFINITY);
      if (r >= 4) {
        for (float& x : row) x = -std::fabs(x) - 1.0f;
        row[1500] = -0.0f;
        row[2500] = 0.0f;
      }
      c.logits.insert(c.logits.end(), row.begin(), row.end());
      if (r % 2 == 1) c.params[static_cast<size_t>(r)] = {0.7f, 0.9f, 0.0f, 40, 3, 4};
    }
    check_case(checks, "broken", c);
  }
  if (checks.full()) {
    const int64_t vocab = 151552;
    Random random(4);
    Case c{{}, 12, vocab, vocab, {}};
    for (int64_t r = 0; r < 12; ++r) {
      const auto row = make_logits(random, r < 9 ? Shape::kNormal : Shape::kFlat, vocab);
      c.logits.insert(c.logits.end(), row.begin(), row.end());
      c.params.push_back(params[static_cast<size_t>(r * 9 + 1)]);
    }
    check_case(checks, "vocab 151552", c);
    Runner runner(12, vocab);
    const Output first = runner.run(c, 0, 12);
    int different = 0;
    for (int i = 0; i < 50; ++i) different += runner.run(c, 0, 12) == first ? 0 : 1;
    checks.expect(different == 0, cat("50 repeats: ", different, " differ"));
    for (RowSampling& p : c.params) p.temperature = 0;
    checks.expect(runner.run(c, 0, 12) == runner.run(c, 0, 12, true), "greedy_only");
  }
}

}  // namespace

CheckSummary check_sample(const CheckOptions& options, std::ostream& out) {
  return run_checks(options, out, check_all);
}

}  // namespace nibble::kernels::cuda
