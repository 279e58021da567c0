// A step's facts on their way to the GPU, by a kernel that reads page-locked host memory itself: of
// a few hundred bytes the copy engine's start is the larger part, and the next kernel would wait
// for its end instead of starting beside it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "base/result.h"

namespace nibble::kernels::cuda {

/// `rows` rows of `words` 32-bit words, `stride` words apart on both sides.
struct WordRows {
  const int32_t* from = nullptr;  // page-locked host memory
  int32_t* to = nullptr;          // device memory
  int32_t words = 0, rows = 1, stride = 0;
};
using StepCopy = std::array<WordRows, 7>;

/// Queues the copy. The kernel behind it must wait for it before it lets the next one start: from
/// then on kernels may read a step's facts before they wait, as attention does.
/// Errors: kInternal (launch).
Result<void> copy_step(const StepCopy& copy, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
