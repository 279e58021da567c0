// Pieces of the router's FP32 product that all its kernels share: weights as they are stored, four
// columns a lane, and the order of multiply-adds.
#pragma once

#include <cstdint>
#include <type_traits>

namespace nibble::kernels::cuda {

constexpr int kQuarters = 4;       // the columns are cut into quarters, a warp each
constexpr int kStepColumns = 128;  // a warp takes this many columns at a time, four a lane

/// Four weights as they are stored.
template <bool bf16>
struct RawWeights {
  using Quad = std::conditional_t<bf16, uint2, uint4>;
  Quad v;
  __device__ __forceinline__ void load(const uint8_t* row, int column) {
    v = __ldg(reinterpret_cast<const Quad*>(row + column * static_cast<int>(sizeof(Quad) / 4)));
  }
  /// Copied to shared memory: the `at`-th four.
  __device__ __forceinline__ void read(const void* shared, int at) {
    v = static_cast<const Quad*>(shared)[at];
  }
  __device__ __forceinline__ float4 value() const {
    if constexpr (bf16) {
      return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u),
                         __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xFFFF0000u));
    } else {
      return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                         __uint_as_float(v.w));
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
