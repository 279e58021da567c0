// Division by a number known at launch: a multiplication. Integer division is a chain of some
// twenty instructions, and a kernel that runs once a layer meets its code cold.
#pragma once

#include <cstdint>

#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

struct Divisor {
  uint32_t value = 1, magic = 0;  // 2^32 / value, rounded up; 0: value is one

  Divisor() = default;
  explicit Divisor(int64_t d)
      : value(static_cast<uint32_t>(d)),
        magic(d == 1 ? 0 : static_cast<uint32_t>(((int64_t{1} << 32) + d - 1) / d)) {}
  /// Whether of() is right up to n: rounding the magic number up adds less than n / 2^32, which
  /// must not reach the next multiple, 1 / d away.
  static constexpr bool divides(int64_t n, int64_t d) { return n * d < int64_t{1} << 32; }

  /// n / value, for n >= 0.
  NIBBLE_HD int of(int n) const {
#if defined(__CUDA_ARCH__)
    return magic == 0 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), magic));
#else
    return magic == 0
               ? n
               : static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * magic >> 32);
#endif
  }
};

}  // namespace nibble::kernels::cuda
