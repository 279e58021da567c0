// Times dense linear layers and routers as CUDA graph replays; prints one row per case.
//   linear_cuda_bench [decode] [prefill] [router]      default: all
// A graph holds a chain of launches; weights rotate through 1 GiB (or twice the matrix), so that
// they come from memory and not from the L2. Launches follow each other as in a decode step: the
// next one's weights may be on their way while one ends. % is of a device-to-device copy (read +
// write) measured in the same run. Correctness is linear_cuda_check's.
#include <algorithm>
#include <random>

#include "device/cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_case.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/router.h"

namespace nibble::kernels::cuda {
namespace {

__global__ void fill_kernel(uint32_t* data, int64_t words, uint32_t mask, uint32_t set) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t v = static_cast<uint32_t>(i) * 0x9E3779B9u;
    v = (v ^ v >> 15) * 0x85EBCA6Bu;
    v = (v ^ v >> 13) * 0xC2B2AE35u;
    data[i] = ((v ^ v >> 16) & mask) | set;
  }
}
/// Random bits that are finite in every format, BF16 x included.
void fill(const DeviceBuffer& b, uint32_t mask = 0xBFBFBFBFu, uint32_t set = 0x30003000u) {
  fill_kernel<<<1024, 256>>>(b.as<uint32_t>(), b.bytes() / 4, mask, set);
  must(cudaGetLastError(), "fill");
}

constexpr int kReplays = 15;
double spread_of(const test::Times& t) { return 100.0 * (t.high - t.low) / t.median; }

/// Stands for the small kernels between products (norms): one CTA, waits, reads and writes little.
__global__ void __launch_bounds__(512) between_kernel(const float* y, uint32_t* x) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const float v = y[threadIdx.x * 4] * 0.0f + y[threadIdx.x * 4 + 1] * 0.0f;
  x[threadIdx.x] = 0x3F803F80u + (__float_as_uint(v) & 1u);
}

struct Shape {
  const char* name;
  int64_t out, cols;
};

void bench_linear(FormatId f, const Shape& s, const std::vector<int64_t>& counts, double copy,
                  LinearPath path, bool between = false) {
  const int64_t bytes = linear_packed_bytes(f, s.out, s.cols);
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{1} << 30) / bytes, 2, 48));
  DeviceBuffer weights(bytes * sets), factor(s.out * 4);
  fill(weights);
  fill(factor, 0x007FFFFFu, 0x3F800000u);
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  DeviceBuffer x(most * s.cols * 2), y(most * s.out * 4),
      scratch(linear_scratch_bytes(most, s.cols));
  fill(x, 0x807F807Fu, 0x3F803F80u);
  must(cudaDeviceSynchronize(), "fill");
  for (const int64_t rows : counts) {
    const int count = rows > 256 || bytes > (64 << 20) ? 8 : 48;
    const test::Times t = test::time_graph(count, kReplays, [&](cudaStream_t stream, int i) {
      LinearWeight w{f, s.out, s.cols, weights.data() + i % sets * bytes};
      if (f == FormatId::kNvfp4) w.factor = factor.as<float>();
      LinearArgs a;
      a.x = x.data();
      a.rows = rows;
      a.y = y.as<float>();
      if (between) {
        must(launch_overlapped(between_kernel, 1, 512, 0, stream, y.as<float>(), x.as<uint32_t>()),
             "between");
      }
      must(linear(w, a, scratch.data(), stream, path), "linear");
    });
    const double rate = static_cast<double>(bytes) / (t.median * 1e-6);
    const double flops = 2.0 * static_cast<double>(rows * s.out * s.cols) / (t.median * 1e-6);
    std::printf("| %s | %s %lld x %lld | %s | %lld | %.2f | %.1f | %.2f | %.0f | %.1f |\n",
                formats::block_format(f).name.data(), s.name, static_cast<long long>(s.out),
                static_cast<long long>(s.cols),
                between                        ? "between"
                : path == LinearPath::kAuto    ? "auto"
                : path == LinearPath::kFewRows ? "few"
                                               : "many",
                static_cast<long long>(rows), t.median, spread_of(t), rate * 1e-12,
                100 * rate / copy, flops * 1e-12);
    std::fflush(stdout);
  }
}

void bench_router(FormatId f, int64_t experts, int64_t top_k, int64_t hidden,
                  const std::vector<int64_t>& counts) {
  constexpr int kSets = 48;
  const int64_t bytes = experts * hidden * (f == FormatId::kBf16 ? 2 : 4);
  const int64_t most = counts.back();
  DeviceBuffer weights(bytes * kSets), bias(experts * 4), x(most * hidden * 4);
  DeviceBuffer scratch(router_scratch_bytes(most, experts)), ids(most * top_k * 4);
  DeviceBuffer out(most * top_k * 4);
  fill(weights, 0x807F807Fu, 0x3C803C80u);
  fill(bias, 0x007FFFFFu, 0x3C000000u);
  fill(x, 0x807FFFFFu, 0x3D800000u);
  must(cudaMemset(scratch.data(), 0, static_cast<size_t>(scratch.bytes())), "zero");
  must(cudaDeviceSynchronize(), "fill");
  RouterParams p;
  p.score = RouterScore::kSigmoid;
  p.experts = experts;
  p.top_k = top_k;
  p.correction_bias = bias.as<float>();
  for (const int64_t rows : counts) {
    const test::Times t = test::time_graph(48, kReplays, [&](cudaStream_t stream, int i) {
      const RouterWeight w{f, experts, hidden, weights.data() + i % kSets * bytes};
      must(route(w, p, x.as<float>(), 0, rows, scratch.data(), ids.as<int32_t>(), out.as<float>(),
                 stream),
           "route");
    });
    std::printf("| router %s | %lld x %lld top %lld | - | %lld | %.2f | %.1f | - | - | %.1f |\n",
                formats::block_format(f).name.data(), static_cast<long long>(experts),
                static_cast<long long>(hidden), static_cast<long long>(top_k),
                static_cast<long long>(rows), t.median, spread_of(t),
                2e-6 * static_cast<double>(rows * experts * hidden) / t.median);
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  const std::vector<std::string> wanted(argv + 1, argv + argc);
  const auto has = [&](const char* name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "device");
  const double copy = must(device::cuda_copy_bandwidth(), "copy bandwidth");
  std::printf("%s, copy %.2f TB/s\n", device.name, copy * 1e-12);
  std::printf("| format | matrix | kernel | rows | us | spread %% | TB/s | %% copy | TFLOP/s |\n");
  const Shape qkv{"qkv", 5120, 2048}, o{"o", 2048, 4096}, head{"head", 151552, 2048};
  if (has("decode")) {
    DeviceBuffer x(8192), y(8192);
    must(cudaMemset(y.data(), 0, 8192), "zero");
    const test::Times t = test::time_graph(48, kReplays, [&](cudaStream_t stream, int) {
      must(launch_overlapped(between_kernel, 1, 512, 0, stream, y.as<float>(), x.as<uint32_t>()),
           "between");
    });
    std::printf("| - | the kernel between, alone | - | - | %.2f | %.1f | - | - | - |\n", t.median,
                spread_of(t));
    for (const FormatId f : {FormatId::kBf16, FormatId::kMxfp8, FormatId::kNvfp4}) {
      for (const Shape& s : {qkv, o}) {
        bench_linear(f, s, {1, 2, 4, 8, 16, 32, 48, 64}, copy, LinearPath::kFewRows);
        bench_linear(f, s, {1, 8, 16}, copy, LinearPath::kFewRows, true);
      }
      bench_linear(f, head, {1, 8, 16}, copy, LinearPath::kFewRows);
    }
    bench_linear(FormatId::kFp8Block, qkv, {1, 16}, copy, LinearPath::kFewRows);
    bench_linear(FormatId::kBf16, Shape{"down", 4096, 12288}, {1, 16}, copy, LinearPath::kFewRows);
  }
  if (has("prefill")) {
    for (const FormatId f : {FormatId::kBf16, FormatId::kMxfp8, FormatId::kNvfp4}) {
      bench_linear(f, qkv, {16, 32, 64, 128, 256, 512, 2048, 4096}, copy, LinearPath::kManyRows);
      bench_linear(f, o, {32, 64, 128, 256, 512, 2048}, copy, LinearPath::kManyRows);
    }
    bench_linear(FormatId::kFp8Block, qkv, {64, 2048}, copy, LinearPath::kManyRows);
  }
  if (has("router")) {
    for (const FormatId f : {FormatId::kBf16, FormatId::kF32}) {
      bench_router(f, 128, 8, 2048, {1, 2, 8, 16, 32, 64, 256, 2048});
    }
    bench_router(FormatId::kBf16, 256, 8, 7168, {1, 8, 64});
  }
  return 0;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main(int argc, char** argv) { return nibble::kernels::cuda::run(argc, argv); }
