// Encode speed on one core, in bytes of text: with a warm word cache, and the first text of a new
// tokenizer. NIBBLE_BENCH_TOKENIZER names a tokenizer.json and
// NIBBLE_BENCH_TEXT a file of prose or code; without them there is nothing to measure.
#include <benchmark/benchmark.h>

#include <cstdlib>

#include "base/file.h"
#include "text/tokenizer.h"

namespace nibble::text {
namespace {

void encode(benchmark::State& state) {
  const char* vocabulary = std::getenv("NIBBLE_BENCH_TOKENIZER");
  const char* path = std::getenv("NIBBLE_BENCH_TEXT");
  if (vocabulary == nullptr || path == nullptr) {
    state.SkipWithError("set NIBBLE_BENCH_TOKENIZER and NIBBLE_BENCH_TEXT");
    return;
  }
  const auto tokenizer = Tokenizer::open(vocabulary);
  const auto text = read_text_file(path);
  if (!tokenizer || !text) {
    state.SkipWithError(!tokenizer ? tokenizer.error().message().c_str()
                                   : text.error().message().c_str());
    return;
  }
  // Decoding gives the text back, or the figure would be of something else.
  if (tokenizer->decode(tokenizer->encode(*text)) != *text) {
    state.SkipWithError("the text does not survive encode and decode");
    return;
  }
  size_t tokens = 0;
  for (auto _ : state) {
    const auto ids = tokenizer->encode(*text);
    tokens = ids.size();
    benchmark::DoNotOptimize(ids.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text->size()));
  state.counters["bytes_per_token"] =
      static_cast<double>(text->size()) / static_cast<double>(tokens);
}
BENCHMARK(encode)->Unit(benchmark::kMillisecond);

void encode_first(benchmark::State& state) {
  const char* vocabulary = std::getenv("NIBBLE_BENCH_TOKENIZER");
  const char* path = std::getenv("NIBBLE_BENCH_TEXT");
  const auto text = path == nullptr ? Result<std::string>("") : read_text_file(path);
  if (vocabulary == nullptr || !text || text->empty()) {
    state.SkipWithError("set NIBBLE_BENCH_TOKENIZER and NIBBLE_BENCH_TEXT");
    return;
  }
  for (auto _ : state) {
    state.PauseTiming();
    const auto tokenizer = Tokenizer::open(vocabulary);
    if (!tokenizer) {
      state.SkipWithError(tokenizer.error().message().c_str());
      return;
    }
    state.ResumeTiming();
    benchmark::DoNotOptimize(tokenizer->encode(*text).data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text->size()));
}
BENCHMARK(encode_first)->Unit(benchmark::kMillisecond)->Iterations(3);

}  // namespace
}  // namespace nibble::text

BENCHMARK_MAIN();
