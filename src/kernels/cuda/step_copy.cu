#include <algorithm>

#include "base/cat.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/step_copy.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kCopyThreads = 256, kCopyMaxCtas = 32;
struct Runs {
  WordRows of[std::tuple_size_v<StepCopy>];
  int words;  // of all
};

/// One word a thread in turn, wherever it is; found first, so that a small step is read in one
/// trip.
__global__ void __launch_bounds__(kCopyThreads)
    copy_step_kernel(const __grid_constant__ Runs runs) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int all = static_cast<int>(gridDim.x) * kCopyThreads;
  for (int i = static_cast<int>(blockIdx.x) * kCopyThreads + static_cast<int>(threadIdx.x);
       i < runs.words; i += all) {
    int at = i, n = 0;
#pragma unroll 1
    for (int words; at >= (words = runs.of[n].words * runs.of[n].rows); at -= words) ++n;
    const WordRows& r = runs.of[n];
    const int row = r.rows == 1 ? 0 : at / r.words;
    const int64_t place = int64_t{row} * r.stride + (at - row * r.words);
    r.to[place] = *const_cast<const volatile int32_t*>(r.from + place);
  }
}

}  // namespace

Result<void> copy_step(const StepCopy& copy, cudaStream_t stream) {
  Runs runs = {};
  for (size_t i = 0; i < copy.size(); ++i) {
    runs.of[i] = copy[i];
    runs.words += copy[i].words * copy[i].rows;
  }
  const int ctas = std::clamp((runs.words + kCopyThreads - 1) / kCopyThreads, 1, kCopyMaxCtas);
  const cudaError_t e = launch_overlapped(copy_step_kernel, ctas, kCopyThreads, 0, stream, runs);
  if (e != cudaSuccess) return Error(Code::kInternal, cat("step: ", cudaGetErrorString(e)));
  return {};
}

}  // namespace nibble::kernels::cuda
