// Times CSF encoding and indexing on the GPU for the planes of four layers; scale bytes are already
// there. Wall time of the whole call with a synchronisation at both ends, median of 15; the output
// is compared with the CPU codec first.
//   csf_cuda_bench
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "kernels/cuda/csf_case.h"
#include "kernels/cuda/csf_index.h"

namespace nibble::kernels::cuda {
namespace {

template <typename F>
void time_calls(const F& f, double& median, double& fastest, double& slowest) {
  std::vector<double> times;
  for (int i = 0; i < 18; ++i) {
    must(cudaDeviceSynchronize(), "before");
    const auto begin = std::chrono::steady_clock::now();
    f();
    must(cudaDeviceSynchronize(), "after");
    const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - begin;
    if (i >= 3) times.push_back(ms.count());
  }
  std::sort(times.begin(), times.end());
  median = times[times.size() / 2];
  fastest = times.front();
  slowest = times.back();
}

struct Totals {
  double bytes = 0, encode = 0, index = 0;
};

void bench_plane(const char* name, FormatId f, Product product, int64_t experts, int64_t hidden,
                 int64_t inter, Totals& totals) {
  const bool down = product == Product::kDown;
  const CsfStack stack{csf_kind_of(f), experts, down ? hidden : 2 * inter,
                       (down ? inter : hidden) / group_cols(f)};
  const int64_t cells = experts * stack.rows * stack.cols;
  DeviceBuffer planes((cells + 15) / 16 * 16);
  fill_scales(planes.as<uint8_t>(), experts * stack.rows, stack.cols, f != FormatId::kNvfp4, 9);
  const StreamBuffers out(stack, cells / 16);
  double encode, encode_min, encode_max, index, index_min, index_max;
  int64_t count = 0;
  time_calls(
      [&] {
        must(csf_encode(stack, planes.as<uint8_t>(), out.view(), out.scratch.data(), nullptr),
             "encode");
        count = out.count();
      },
      encode, encode_min, encode_max);
  const bool exact =
      count <= out.room && equals_cpu_codec(out, download(planes.as<uint8_t>(), cells));
  CsfIndexArgs args{f, product, experts, hidden, inter, {}, {}, nullptr, nullptr};
  args.first = {out.view(), stack.rows, 0};
  args.second = {out.view(), stack.rows, inter};
  DeviceBuffer packed(experts * packed_bytes(f, product, hidden, inter, ScaleForm::kCsf)),
      words(4 * count + 16);
  args.packed = packed.as<uint8_t>();
  args.exceptions = words.as<uint32_t>();
  time_calls([&] { must(csf_index(args, nullptr), "index"); }, index, index_min, index_max);
  const auto mb = static_cast<double>(cells) * 1e-6;
  const double stored = static_cast<double>(out.fixed.bytes() + 4 * count);
  const double resident = static_cast<double>(
      experts * packed_scale_bytes(f, product, hidden, inter, ScaleForm::kCsf) + 4 * count);
  std::printf(
      "| %s [%lld,%lld,%lld] | %.1f | %.2f %% | %.3f (%.3f-%.3f) | %.1f | %.3f | %.3f (%.3f-%.3f) "
      "| "
      "%.3f | %s |\n",
      name, static_cast<long long>(experts), static_cast<long long>(stack.rows),
      static_cast<long long>(stack.cols), mb,
      100.0 * static_cast<double>(count) / static_cast<double>(cells), encode, encode_min,
      encode_max, mb / encode, stored * 1e-6 / mb, index, index_min, index_max,
      resident * 1e-6 / mb, exact ? "yes" : "NO");
  std::fflush(stdout);
  if (!exact) std::exit(1);
  totals.bytes += mb;
  totals.encode += encode;
  totals.index += index;
}

void bench_layer(const char* name, FormatId f, int64_t experts, int64_t hidden, int64_t inter) {
  Totals t;
  bench_plane(name, f, Product::kGateUp, experts, hidden, inter, t);
  bench_plane(name, f, Product::kDown, experts, hidden, inter, t);
  std::printf("| %s, both planes | %.1f | | %.3f | %.1f | | %.3f | | encode + index %.3f ms |\n",
              name, t.bytes, t.encode, t.bytes / t.encode, t.index, t.encode + t.index);
}

int run() {
  std::printf(
      "| planes | MB | exceptions | encode ms (min-max) | GB/s | out/in | index ms (min-max) | "
      "resident/in | equals CPU codec |\n");
  bench_layer("Qwen NVFP4", FormatId::kNvfp4, 512, 2560, 640);
  bench_layer("GLM TP2 NVFP4", FormatId::kNvfp4, 288, 4096, 1024);
  bench_layer("DS4.1 TP4 MXFP4", FormatId::kMxfp4, 384, 5120, 576);
  bench_layer("Kimi TP16 MXFP4", FormatId::kMxfp4, 896, 3584, 192);
  return 0;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main() { return nibble::kernels::cuda::run(); }
