// Quantizers and the row decoder on one thread, in bytes of BF16 source or result a second. Results
// are checked bit for bit by quantize_test and vectors_formats_test.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "base/check.h"
#include "formats/block_format.h"
#include "formats/element.h"
#include "formats/quantize.h"

namespace nibble::formats {
namespace {

constexpr int64_t kRows = 1024, kCols = 2048;

const std::vector<float>& source() {
  static const std::vector<float> w = [] {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<float> values(static_cast<size_t>(kRows * kCols));
    for (float& v : values) v = decode_bf16(encode_bf16(normal(rng)));
    return values;
  }();
  return w;
}

Result<QuantizedMatrix> quantize(FormatId format) {
  switch (format) {
    case FormatId::kNvfp4: return quantize_nvfp4(source(), kRows, kCols, "w");
    case FormatId::kMxfp4: return quantize_mxfp4(source(), kRows, kCols, "w");
    case FormatId::kMxfp8: return quantize_mxfp8(source(), kRows, kCols, "w");
    case FormatId::kFp8Block: return quantize_fp8_block(source(), kRows, kCols, "w");
    default: return quantize_nf3(source(), kRows, kCols, "w");
  }
}

void quantize_bench(benchmark::State& state, FormatId format) {
  for (auto _ : state) {
    const auto result = quantize(format);
    NIBBLE_CHECK(result.has_value());
    benchmark::DoNotOptimize(result->codes.data());
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * kRows * kCols * 2);
}

void decode_bench(benchmark::State& state, FormatId format) {
  const auto matrix = quantize(format);
  NIBBLE_CHECK(matrix.has_value());
  std::vector<float> out(static_cast<size_t>(kCols));
  for (auto _ : state) {
    for (int64_t r = 0; r < kRows; ++r) {
      decode_rows(matrix->view(), r, 1, out.data());
      benchmark::DoNotOptimize(out.data());
    }
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * kRows * kCols * 2);
}

BENCHMARK_CAPTURE(quantize_bench, nvfp4, FormatId::kNvfp4);
BENCHMARK_CAPTURE(quantize_bench, mxfp4, FormatId::kMxfp4);
BENCHMARK_CAPTURE(quantize_bench, mxfp8, FormatId::kMxfp8);
BENCHMARK_CAPTURE(quantize_bench, fp8_block, FormatId::kFp8Block);
BENCHMARK_CAPTURE(quantize_bench, nf3, FormatId::kNf3);
BENCHMARK_CAPTURE(decode_bench, nvfp4, FormatId::kNvfp4);
BENCHMARK_CAPTURE(decode_bench, mxfp4, FormatId::kMxfp4);
BENCHMARK_CAPTURE(decode_bench, mxfp8, FormatId::kMxfp8);
BENCHMARK_CAPTURE(decode_bench, fp8_block, FormatId::kFp8Block);
BENCHMARK_CAPTURE(decode_bench, nf3, FormatId::kNf3);

}  // namespace
}  // namespace nibble::formats

BENCHMARK_MAIN();
