// Pieces of the router's FP32 product that all its kernels share: weights as they are stored, four
// columns a lane, and the order of multiply-adds.
#pragma once

#include <cstdint>

namespace nibble::kernels::cuda {

constexpr int kQuarters = 4;       // the columns are cut into quarters, a warp each
constexpr int kStepColumns = 128;  // a warp takes this many columns at a time, four a lane

/// Four weights as they are stored.
template <bool bf16>
struct RawWeights {
  uint32_t v[bf16 ? 2 : 4];
  __device__ __forceinline__ void load(const uint8_t* row, int column) {
    if constexpr (bf16) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(row + column * 2));
      v[0] = two.x, v[1] = two.y;
    } else {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(row + column * 4));
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
  }
  /// Four weights copied to shared memory: the `at`-th four.
  __device__ __forceinline__ void read(const void* shared, int at) {
    if constexpr (bf16) {
      const uint2 two = static_cast<const uint2*>(shared)[at];
      v[0] = two.x, v[1] = two.y;
    } else {
      const uint4 four = static_cast<const uint4*>(shared)[at];
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
  }
  __device__ __forceinline__ float4 value() const {
    if constexpr (bf16) {
      return make_float4(__uint_as_float(v[0] << 16), __uint_as_float(v[0] & 0xFFFF0000u),
                         __uint_as_float(v[1] << 16), __uint_as_float(v[1] & 0xFFFF0000u));
    } else {
      return make_float4(__uint_as_float(v[0]), __uint_as_float(v[1]), __uint_as_float(v[2]),
                         __uint_as_float(v[3]));
    }
  }
};

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float acc) {
  acc = __fmaf_rn(a.x, b.x, acc);
  acc = __fmaf_rn(a.y, b.y, acc);
  acc = __fmaf_rn(a.z, b.z, acc);
  return __fmaf_rn(a.w, b.w, acc);
}

/// Columns of one quarter: whole steps.
__device__ __forceinline__ int quarter_columns(int hidden) {
  const int steps = (hidden + kStepColumns - 1) / kStepColumns;
  return (steps + kQuarters - 1) / kQuarters * kStepColumns;
}

}  // namespace nibble::kernels::cuda
