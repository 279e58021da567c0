// Time of one token's sampling at a vocabulary of 151,552, on one thread.
#include <benchmark/benchmark.h>

#include "runtime/random.h"
#include "runtime/sampler.h"

namespace nibble::runtime {
namespace {

void run(benchmark::State& state, SamplingParams params) {
  std::vector<float> logits(151552);
  for (size_t i = 0; i < logits.size(); ++i) {
    const uint64_t bits = random_bits(1, i);
    logits[i] = static_cast<float>((bits >> 44) + (bits >> 20 & 0xFFFFF)) * 0x1p-20f * 12.0f;
  }
  std::vector<std::pair<float, int32_t>> scratch;
  uint64_t draw = 0;
  const std::vector<int32_t> history = {1, 2, 3};
  for (auto _ : state) {
    benchmark::DoNotOptimize(sample(logits, history, history, params, draw++, scratch));
  }
}

BENCHMARK_CAPTURE(run, greedy, SamplingParams{});
BENCHMARK_CAPTURE(run, temperature, SamplingParams{.temperature = 1});
BENCHMARK_CAPTURE(run, top_k_40, SamplingParams{.temperature = 1, .top_k = 40});
BENCHMARK_CAPTURE(run, top_p_95, SamplingParams{.temperature = 1, .top_p = 0.95f});
BENCHMARK_CAPTURE(run, min_p_05, SamplingParams{.temperature = 1, .min_p = 0.05f});
BENCHMARK_CAPTURE(run, all,
                  SamplingParams{.temperature = 0.7f,
                                 .top_k = 100,
                                 .top_p = 0.9f,
                                 .min_p = 0.01f,
                                 .repetition_penalty = 1.1f});

}  // namespace
}  // namespace nibble::runtime

BENCHMARK_MAIN();
