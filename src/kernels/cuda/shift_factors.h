// Powers of two as launch arguments: a kernel that multiplies by them shifts, and the compiler, who
// does not know them, cannot turn that into shifts.
#pragma once

#include <cstdint>

namespace nibble::kernels::cuda {

struct ShiftFactors {
  uint32_t power[9] = {1, 2, 4, 8, 16, 32, 64, 128, 256};  // [n]: 2^n
};

}  // namespace nibble::kernels::cuda
