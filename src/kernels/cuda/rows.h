// Row operations between the products on an NVIDIA GPU: token embedding, residual addition with
// RMSNorm, and the same for a chosen few rows. FP32 arithmetic; one fixed order per row, whatever
// the number of rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/result.h"
#include "formats/block_format.h"
#include "kernels/cuda/step_view.h"

namespace nibble::kernels::cuda {

/// A table on the device, [vocab, hidden] rows as in the checkpoint.
struct EmbedTable {
  const void* data = nullptr;                           // 16-byte aligned
  formats::FormatId format = formats::FormatId::kBf16;  // kBf16, kF16 or kF32
  int64_t vocab = 0, hidden = 0;                        // hidden: a multiple of 8
};

/// out[t, :] = table[step.tokens[t], :] as FP32, [rows, hidden]. A token -1 - i stands for
/// drawn[i], what the step before drew. Rows of position -1, and tokens outside [0, vocab), give
/// zeros. Errors of all functions here: kInvalidArgument, kUnsupported (format), kInternal
/// (launch).
Result<void> embed(const EmbedTable& table, const StepView& step, const int32_t* drawn, float* out,
                   cudaStream_t stream);

struct AddRmsNormArgs {
  float* residual = nullptr;      // [rows, hidden]; delta is added to it in place
  const float* delta = nullptr;   // [rows, hidden], or null
  int64_t rows = 0, hidden = 0;   // hidden: a multiple of 4
  const float* weight = nullptr;  // [hidden]
  float eps = 1e-5f;
  void* normed = nullptr;       // BF16 [rows, hidden]
  float* normed_f32 = nullptr;  // the same unrounded, or null
};
/// residual += delta; normed = residual * rsqrt(mean(residual^2) + eps) * weight. All pointers are
/// 16-byte aligned.
Result<void> add_rms_norm(const AddRmsNormArgs& args, cudaStream_t stream);

struct GatherRmsNormArgs {
  const float* residual = nullptr;  // [step rows, hidden]
  const float* delta = nullptr;     // [step rows, hidden], or null
  const int32_t* rows = nullptr;    // [count], on the device: wanted step rows; -1 gives zeros
  int64_t count = 0, hidden = 0;
  const float* weight = nullptr;
  float eps = 1e-5f;
  void* normed = nullptr;       // BF16 [count, hidden]
  float* normed_f32 = nullptr;  // or null
};
/// normed[i] = RMSNorm(residual[rows[i]] + delta[rows[i]]), the bits of add_rms_norm; residual is
/// not changed.
Result<void> gather_rms_norm(const GatherRmsNormArgs& args, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
