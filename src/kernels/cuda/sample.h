// Logits to tokens on an NVIDIA GPU, so that a decode step sends back tokens and not logits. The
// steps and their meaning are those of runtime/sampler.h (without penalties): temperature, min-p,
// top-k, top-p, one draw; probabilities are integers (2^42 for the most probable token), so every
// sum that decides is exact and has no order. Given equal logits the token is the CPU's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/result.h"

namespace nibble::kernels::cuda {

/// Parameters of one row, in device memory. They have passed runtime::check_sampling.
struct RowSampling {
  float temperature = 0.0f;  // 0: greedy, lowest id among equals
  float top_p = 1.0f;        // in (0, 1]; 1: off
  float min_p = 0.0f;        // in [0, 1]; 0: off
  int32_t top_k = 0;         // 0: off
  uint64_t seed = 0;
  uint64_t draw = 0;  // number of the draw under this seed
};
static_assert(sizeof(RowSampling) == 32);

struct SampleArgs {
  const float* logits = nullptr;                // [rows, vocab], row_stride floats apart
  int64_t rows = 0, vocab = 0, row_stride = 0;  // vocab in [1, 2^21]
  const RowSampling* params = nullptr;          // [rows]; null: all rows greedy
  bool greedy_only = false;   // host's promise that every temperature is 0: saves two kernels
  int32_t* tokens = nullptr;  // out [rows]; -1 where logits have no distribution
  int32_t* again = nullptr;   // the same once more, or null
  float* logprobs = nullptr;  // out [rows] log softmax of the raw logits; 0 where token is -1
};

/// Device bytes that sample() needs for up to `max_rows` rows.
int64_t sample_scratch_bytes(int64_t max_rows, int64_t vocab);

/// Queues one kernel (all greedy) or three. `scratch`: device memory, 256-byte aligned, all zero
/// before the first call; every call leaves it fit for the next. Logits with a NaN or +inf, or with
/// nothing but -inf, give token -1.
/// Errors: kInvalidArgument, kInternal (launch failed).
Result<void> sample(const SampleArgs& args, void* scratch, int64_t scratch_bytes,
                    cudaStream_t stream);

}  // namespace nibble::kernels::cuda
