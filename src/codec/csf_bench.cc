// Speed of the codec on realistic scale planes, one core: bytes of plain plane a second, and as a
// share of memcpy of the same plane in the same run. Checks correctness first and stops if wrong.
// Planes: scales of weights drawn from Student's t with 5 degrees of freedom, a spread per row.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <random>

#include "codec/csf_tile16.h"

namespace nibble::codec {
namespace {

using Bytes = std::vector<uint8_t>;

// Nearest E4M3 code of a positive value; only positive codes matter for scales.
uint8_t e4m3(float value) {
  static const std::vector<float> table = [] {
    std::vector<float> values;
    for (int code = 0; code < 127; ++code) {
      const int exponent = code >> 3, fraction = code & 7;
      const float v = exponent == 0
                          ? static_cast<float>(fraction) / 8.0f * 0x1p-6f
                          : std::ldexp(1.0f + static_cast<float>(fraction) / 8.0f, exponent - 7);
      values.push_back(v);
    }
    return values;
  }();
  const auto above = std::ranges::lower_bound(table, value);
  if (above == table.begin()) return 0;
  if (above == table.end()) return 126;
  const bool low = value - *(above - 1) < *above - value;
  return static_cast<uint8_t>(above - table.begin() - (low ? 1 : 0));
}

struct Plane {
  CsfKind kind;
  int64_t rows, cols;
  Bytes bytes;
};

Plane make_plane(CsfKind kind, int64_t rows, int64_t cols) {
  std::mt19937 rng(static_cast<unsigned>(rows * 7 + cols));
  std::student_t_distribution<float> weight(5.0f);
  std::lognormal_distribution<float> row_spread(0.0f, 0.3f);
  const int group = kind == CsfKind::kNvfp4 ? 16 : 32;
  std::vector<float> amax(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    const float spread = row_spread(rng);
    for (int64_t c = 0; c < cols; ++c) {
      float most = 0;
      for (int i = 0; i < group; ++i) most = std::max(most, std::fabs(weight(rng)) * spread);
      amax[static_cast<size_t>(r * cols + c)] = most;
    }
  }
  const float global = *std::ranges::max_element(amax) / 448.0f;
  Plane plane{kind, rows, cols, {}};
  for (const float a : amax) {
    int exponent;
    std::frexp(a * 0.02f / 6.0f, &exponent);
    plane.bytes.push_back(kind == CsfKind::kNvfp4 ? e4m3(a / global)
                                                  : static_cast<uint8_t>(127 + exponent));
  }
  return plane;
}

const Plane& plane_of(const benchmark::State& state) {
  static std::map<std::pair<int64_t, int64_t>, Plane> planes;
  const std::pair key{state.range(0), state.range(1)};
  auto found = planes.find(key);
  if (found == planes.end()) {
    const CsfKind kind = key.first == 0 ? CsfKind::kNvfp4 : CsfKind::kMxfp4;
    found = planes.emplace(key, make_plane(kind, 2048, key.second)).first;
  }
  return found->second;
}

// CPU time, as Google Benchmark's rates: other processes on the core do not count.
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Median bytes a second of memcpy over a buffer of this size.
double memcpy_speed(size_t bytes) {
  static std::map<size_t, double> known;
  if (known.contains(bytes)) return known[bytes];
  const Bytes from(bytes, 1);
  Bytes to(bytes);
  std::vector<double> speeds;
  for (int run = 0; run < 51; ++run) {
    const double start = cpu_seconds();
    for (int i = 0; i < 8; ++i) {
      std::memcpy(to.data(), from.data(), bytes);
      benchmark::ClobberMemory();
    }
    speeds.push_back(8.0 * static_cast<double>(bytes) / (cpu_seconds() - start));
  }
  std::ranges::nth_element(speeds, speeds.begin() + 25);
  return known[bytes] = speeds[25];
}

CsfIsa isa_of(const benchmark::State& state) { return static_cast<CsfIsa>(state.range(2)); }

void report(benchmark::State& state, const Plane& plane) {
  const auto bytes = static_cast<double>(plane.bytes.size());
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(plane.bytes.size()));
  state.counters["memcpy_share"] = benchmark::Counter(
      bytes / memcpy_speed(plane.bytes.size()), benchmark::Counter::kIsIterationInvariantRate);
  const CsfPlane stored = *encode_csf(plane.kind, plane.rows, plane.cols, plane.bytes);
  state.counters["memcpy_GB/s"] = memcpy_speed(plane.bytes.size()) / 1e9;
  state.counters["exceptions_%"] = 100.0 * static_cast<double>(stored.exceptions.size()) / bytes;
  state.counters["size_%"] = 100.0 * static_cast<double>(stored.view().stored_bytes()) / bytes;
  state.SetLabel(cat(csf_kind_name(plane.kind), " ", csf_isa_name(isa_of(state))));
}

void BM_Encode(benchmark::State& state) {
  const Plane& plane = plane_of(state);
  for (auto _ : state) {
    auto stored = encode_csf(plane.kind, plane.rows, plane.cols, plane.bytes, isa_of(state));
    benchmark::DoNotOptimize(stored);
  }
  report(state, plane);
}

void BM_Decode(benchmark::State& state) {
  const Plane& plane = plane_of(state);
  const CsfPlane stored = *encode_csf(plane.kind, plane.rows, plane.cols, plane.bytes);
  Bytes out(plane.bytes.size());
  for (auto _ : state) {
    benchmark::DoNotOptimize(decode_csf(stored.view(), out, isa_of(state)));
    benchmark::ClobberMemory();
  }
  report(state, plane);
}

void BM_DecodeTiles(benchmark::State& state) {
  const Plane& plane = plane_of(state);
  const CsfTiles tiles =
      stored_to_tiles(encode_csf(plane.kind, plane.rows, plane.cols, plane.bytes)->view());
  Bytes scratch(static_cast<size_t>(csf_tile_scratch_bytes(plane.cols)));
  for (auto _ : state) {
    for (int64_t t = 0; t < plane.rows / 16; ++t) {
      decode_csf_tile(csf_tile(tiles, t), scratch.data(), isa_of(state));
      benchmark::ClobberMemory();
    }
  }
  report(state, plane);
}

void BM_StoredToTiles(benchmark::State& state) {
  const Plane& plane = plane_of(state);
  const CsfPlane stored = *encode_csf(plane.kind, plane.rows, plane.cols, plane.bytes);
  CsfTiles tiles = stored_to_tiles(stored.view());
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        stored_to_tiles(stored.view(), tiles.fixed, tiles.exceptions, tiles.exception_begin));
  }
  report(state, plane);
}

bool correct() {
  for (const CsfKind kind : {CsfKind::kNvfp4, CsfKind::kMxfp4}) {
    const Plane plane = make_plane(kind, 64, 448);
    const CsfPlane want = *encode_csf(kind, 64, 448, plane.bytes, CsfIsa::kScalar);
    for (const CsfIsa isa : csf_isas()) {
      Bytes out(plane.bytes.size());
      if (*encode_csf(kind, 64, 448, plane.bytes, isa) != want) return false;
      if (!decode_csf(want.view(), out, isa) || out != plane.bytes) return false;
    }
    if (tiles_to_stored(stored_to_tiles(want.view())) != want) return false;
  }
  return true;
}

void every_case(benchmark::internal::Benchmark* bench) {
  for (const int64_t kind : {0, 1}) {
    for (const int64_t cols : {128, 448}) {
      for (const CsfIsa isa : csf_isas()) bench->Args({kind, cols, static_cast<int64_t>(isa)});
    }
  }
}
BENCHMARK(BM_Encode)->Apply(every_case)->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_Decode)->Apply(every_case)->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_DecodeTiles)->Apply(every_case)->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_StoredToTiles)->Apply(every_case)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace nibble::codec

int main(int argc, char** argv) {
  if (!nibble::codec::correct()) {
    std::fprintf(stderr, "csf_bench: wrong bytes, nothing measured\n");
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
