// Small help for checks and benches of the GPU kernels: device memory that frees itself, uploads, a
// counter of checks, timing by graph replay. A CUDA error throws CheckAborted; run_checks() turns
// it into a failed check. Not part of the library.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/result.h"
#include "kernels/cuda/checks.h"

namespace nibble::kernels::cuda::test {

/// A call failed that nothing can go on without.
struct CheckAborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw CheckAborted(cat(what, ": ", cudaGetErrorString(error)));
}
inline void must(const Result<void>& result, const char* what) {
  if (result.has_value()) return;
  throw CheckAborted(cat(what, ": ", result.error().message()));
}

template <typename T>
class Device {
 public:
  explicit Device(int64_t count = 0) : count_(count) {
    if (count > 0) must(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  }
  explicit Device(const std::vector<T>& host) : Device(static_cast<int64_t>(host.size())) {
    upload(host);
  }
  Device(Device&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
  }
  Device& operator=(Device&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Device() { cudaFree(data_); }

  T* get() const { return data_; }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }
  void fill(int byte) { must(cudaMemset(data_, byte, static_cast<size_t>(bytes())), "memset"); }
  void upload(const std::vector<T>& host) {
    if (host.empty()) return;
    must(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  std::vector<T> download() const {
    std::vector<T> host(static_cast<size_t>(count_));
    if (host.empty()) return host;
    must(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
         "download");
    return host;
  }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

template <typename T>
T must(Result<T> result, const char* what) {
  if (!result.has_value()) throw CheckAborted(cat(what, ": ", result.error().message()));
  return *std::move(result);
}

/// Untyped device memory that frees itself.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t bytes = 0) : bytes_(bytes) {
    must(cudaMalloc(&data_, static_cast<size_t>(bytes > 0 ? bytes : 1)), "cudaMalloc");
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// Counts checks and keeps the largest error; failures and lines of cases go to a stream.
class Checks {
 public:
  Checks(const CheckOptions& options, std::ostream& out) : options_(options), out_(out) {}
  bool expect(bool ok, const std::string& what) {
    ++summary_.checks;
    if (!ok && ++summary_.failed <= 40) {
      out_ << "FAILED " << options_.format << ": " << what << std::endl;
    }
    return ok;
  }
  /// error <= bound; NaN is not.
  bool within(double error, double bound, const std::string& what) {
    const double share = error / bound;
    summary_.worst = std::max(summary_.worst, share == share ? share : INFINITY);
    return expect(error <= bound, cat(what, ": ", error, ", allowed is ", bound));
  }
  void line(const std::string& text) {
    if (options_.print_cases) out_ << text << std::endl;
  }
  CheckSize size() const { return options_.size; }
  bool quick() const { return options_.size == CheckSize::kQuick; }
  bool full() const { return options_.size == CheckSize::kFull; }
  const CheckSummary& summary() const { return summary_; }

 private:
  CheckOptions options_;
  std::ostream& out_;
  CheckSummary summary_;
};

/// What a check function returns: run(checks), with exceptions as one more failure.
template <typename Run>
CheckSummary run_checks(const CheckOptions& options, std::ostream& out, const Run& run) {
  Checks checks(options, out);
  try {
    run(checks);
  } catch (const std::exception& e) {
    checks.expect(false, cat("ended early: ", e.what()));
  }
  return checks.summary();
}

/// Repeatable random numbers (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  /// About normal, variance 1.
  float normal() {
    float sum = -6.0f;
    for (int i = 0; i < 3; ++i) {
      const uint64_t b = bits();
      for (int j = 0; j < 4; ++j) {
        sum += static_cast<float>(b >> 16 * j & 0xFFFF) * (1.0f / 65536.0f);
      }
    }
    return sum;
  }
  std::vector<float> normals(int64_t count, float scale = 1.0f) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& x : v) x = scale * normal();
    return v;
  }

 private:
  uint64_t state_;
};

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

struct Times {
  double median = 0, low = 0, high = 0;  // microseconds of one call
};
/// Captures `calls` calls of queue(stream, i) into a graph and replays it.
template <typename Queue>
Times time_graph(int calls, int replays, const Queue& queue) {
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < calls; ++i) queue(stream, i);
  must(cudaStreamEndCapture(stream, &graph), "end of capture");
  must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<double> us;
  for (int i = 0; i < replays + 2; ++i) {
    must(cudaEventRecord(begin, stream), "record");
    must(cudaGraphLaunch(exec, stream), "launch");
    must(cudaEventRecord(end, stream), "record");
    must(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 2) us.push_back(1e3 * ms / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.front(), us.back()};
}

}  // namespace nibble::kernels::cuda::test
