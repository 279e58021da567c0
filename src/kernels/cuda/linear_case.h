// Test and bench material of the dense layer and the router: device memory and small conversions.
// Not part of the library.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cuda/test_device.h"

namespace nibble::kernels::cuda {

using test::bf16_to_float;
using test::DeviceBuffer;
using test::must;

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
}  // namespace nibble::kernels::cuda
