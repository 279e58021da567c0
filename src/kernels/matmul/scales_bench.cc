// Does reading compressed scales cost time? One row (and 64 rows) against copies of a quantized
// matrix that together exceed any cache: plain and compressed scales in turn, medians of both,
// after checking that every output has the same bits. Weights are heavy-tailed, so the scales are
// realistic. usage: scales_bench [THREADS]
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codec/csf_tile16.h"
#include "formats/element.h"
#include "formats/quantize.h"
#include "kernels/matmul/matmul.h"
#include "kernels/repack/repack.h"

namespace nibble::kernels {
namespace {

constexpr int64_t kRows = 4096, kCols = 2048, kCopies = 64, kRounds = 31;

/// Huge pages, as loaded weights have them.
std::byte* huge_block(int64_t bytes) {
  constexpr int64_t kHuge = 2 << 20;
  const int64_t size = (bytes + kHuge - 1) / kHuge * kHuge;
  void* p = std::aligned_alloc(static_cast<size_t>(kHuge), static_cast<size_t>(size));
  NIBBLE_CHECK(p != nullptr, size);
  ::madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);
  return static_cast<std::byte*>(p);
}

/// Gaussian weights, or with heavier tails (Student t, 4 degrees of freedom): trained experts lie
/// between, near the first.
std::vector<float> random_weights(int64_t count, bool heavy) {
  std::mt19937_64 random(7);
  std::student_t_distribution<float> tails(4.0f);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) {
    v = formats::decode_bf16(
        formats::encode_bf16((heavy ? tails(random) : normal(random)) * 0.02f));
  }
  return values;
}

struct Copies {
  std::vector<tensor::TensorRef> plain, csf;
  int64_t plain_bytes = 0, csf_bytes = 0;
};

Copies make_copies(const formats::MatrixView& source, codec::CsfTiles& tiles) {
  const TiledBytes sizes = tile16_bytes(source);
  const int64_t fixed = static_cast<int64_t>(tiles.fixed.size());
  const int64_t words =
      static_cast<int64_t>(tiles.exceptions.size() + tiles.exception_begin.size());
  const int64_t stride = (sizes.codes + sizes.scales + fixed + 4 * words + 256) / 64 * 64;
  std::byte* p = huge_block(stride * kCopies);
  Copies out;
  out.plain_bytes = sizes.codes + sizes.scales;
  out.csf_bytes = sizes.codes + fixed + 4 * words;
  for (int64_t i = 0; i < kCopies; ++i, p += stride) {
    std::byte* scales = p + sizes.codes;
    tensor::TensorRef ref = repack_tile16(source, {p, static_cast<size_t>(sizes.codes)},
                                          {scales, static_cast<size_t>(sizes.scales)})
                                .value();
    out.plain.push_back(ref);
    auto* exceptions = reinterpret_cast<uint32_t*>(scales + (sizes.scales + 63) / 64 * 64);
    uint32_t* begin = exceptions + tiles.exceptions.size();
    auto* stream = reinterpret_cast<std::byte*>(begin + tiles.exception_begin.size());
    std::copy(tiles.exceptions.begin(), tiles.exceptions.end(), exceptions);
    std::copy(tiles.exception_begin.begin(), tiles.exception_begin.end(), begin);
    std::memcpy(stream, tiles.fixed.data(), tiles.fixed.size());
    ref.scale_encoding = tensor::ScaleEncoding::kCsf;
    ref.view.scales = stream;
    ref.exceptions = exceptions;
    ref.exception_begin = begin;
    out.csf.push_back(ref);
  }
  return out;
}

double seconds_for(const Exec& exec, const std::vector<tensor::TensorRef>& copies, int64_t rows,
                   const std::vector<float>& x, std::vector<float>& y) {
  const auto begin = std::chrono::steady_clock::now();
  for (const tensor::TensorRef& w : copies) {
    const MatmulJob job{w, nullptr, y.data(), kRows};
    matmul(exec, x.data(), kCols, rows, {&job, 1});
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run(const char* name, const formats::QuantizedMatrix& matrix, int threads,
         Activations activations, int64_t rows) {
  const formats::MatrixView view = matrix.view();
  const bool nvfp4 = view.format == formats::FormatId::kNvfp4;
  const codec::CsfPlane plane =
      codec::encode_csf(
          nvfp4 ? codec::CsfKind::kNvfp4 : codec::CsfKind::kMxfp4, kRows, kCols / (nvfp4 ? 16 : 32),
          {reinterpret_cast<const uint8_t*>(matrix.scales.data()), matrix.scales.size()})
          .value();
  codec::CsfTiles tiles = codec::stored_to_tiles(plane.view());
  const Copies copies = make_copies(view, tiles);
  ThreadPool pool(threads);
  const int64_t scratch_bytes = matmul_workspace_bytes(rows, kCols, threads);
  Workspace workspace({huge_block(scratch_bytes), static_cast<size_t>(scratch_bytes)});
  const Exec exec{&pool, device::choose_isa().value(), activations, &workspace};
  const std::vector<float> x = random_weights(rows * kCols, false);
  std::vector<float> y(static_cast<size_t>(rows * kRows)), z(y.size());
  seconds_for(exec, {copies.plain[0]}, rows, x, y);
  seconds_for(exec, {copies.csf[0]}, rows, x, z);
  NIBBLE_CHECK(std::memcmp(y.data(), z.data(), y.size() * 4) == 0, name, ": bits differ");

  std::vector<double> plain, csf;
  for (int64_t i = 0; i < kRounds; ++i) {
    plain.push_back(seconds_for(exec, copies.plain, rows, x, y));
    csf.push_back(seconds_for(exec, copies.csf, rows, x, z));
  }
  std::sort(plain.begin(), plain.end());
  std::sort(csf.begin(), csf.end());
  const size_t middle = kRounds / 2;
  std::printf("| %s | %s | %lld | %d | %.1f | %.1f | %.3f | %.3f | %.3f-%.3f |\n", name,
              activations == Activations::kF32 ? "f32" : "bf16", static_cast<long long>(rows),
              threads, static_cast<double>(copies.plain_bytes * kCopies) / plain[middle] / 1e9,
              static_cast<double>(copies.csf_bytes * kCopies) / csf[middle] / 1e9,
              static_cast<double>(copies.csf_bytes) / static_cast<double>(copies.plain_bytes),
              plain[middle] / csf[middle], plain[2] / csf[kRounds - 3],
              plain[kRounds - 3] / csf[2]);
}

}  // namespace

int run_bench(int threads) {
  std::printf(
      "| scales | activations | rows | threads | plain GB/s | csf GB/s | bytes csf/plain | "
      "speed csf/plain (medians) | spread |\n|---|---|---|---|---|---|---|---|---|\n");
  for (const bool heavy : {false, true}) {
    const std::vector<float> w = random_weights(kRows * kCols, heavy);
    const auto nvfp4 = formats::quantize_nvfp4(w, kRows, kCols, "w").value();
    const auto mxfp4 = formats::quantize_mxfp4(w, kRows, kCols, "w").value();
    for (const int64_t rows : {int64_t{1}, int64_t{64}}) {
      for (const Activations activations : {Activations::kF32, Activations::kBf16}) {
        run(heavy ? "nvfp4, heavy tails" : "nvfp4", nvfp4, threads, activations, rows);
        run(heavy ? "mxfp4, heavy tails" : "mxfp4", mxfp4, threads, activations, rows);
      }
    }
  }
  return 0;
}

}  // namespace nibble::kernels

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : nibble::usable_cores();
  return nibble::kernels::run_bench(threads);
}
