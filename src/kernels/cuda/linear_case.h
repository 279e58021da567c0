// Test and bench material of the dense layer and the router: device memory and small conversions.
// Not part of the library.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/result.h"

namespace nibble::kernels::cuda {

/// Ends the program with a message if a call failed.
inline void must(bool ok, const char* what, const std::string& message) {
  if (ok) return;
  std::printf("%s: %s\n", what, message.c_str());
  std::exit(2);
}
inline void must(cudaError_t error, const char* what) {
  must(error == cudaSuccess, what, cudaGetErrorString(error));
}
inline void must(const Result<void>& result, const char* what) {
  must(result.has_value(), what, result.has_value() ? "" : result.error().message());
}

/// Device memory that frees itself.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t bytes) : bytes_(bytes) {
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

template <typename T>
void upload(const DeviceBuffer& to, const std::vector<T>& from) {
  must(cudaMemcpy(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
       "upload");
}
template <typename T>
std::vector<T> download(const DeviceBuffer& from, int64_t count) {
  std::vector<T> v(static_cast<size_t>(count));
  must(cudaMemcpy(v.data(), from.data(), v.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return v;
}

/// Nearest BF16, ties to even; not for NaN.
inline uint16_t bf16_bits(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float bf16_value(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

}  // namespace nibble::kernels::cuda
