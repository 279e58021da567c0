// Internal to the dense linear layer: what its kernels are given, and one launcher per format, in a
// file of its own (linear_<format>.cu).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/linear.h"

namespace nibble::kernels::cuda {

/// Block FP8 tiles are MXFP8's without the scales; those lie behind the tiles, FP32 [row blocks of
/// 64][ceil(cols / 128)], so that matrices stacked at multiples of 64 rows keep their own.
NIBBLE_HD constexpr int linear_tile_bytes(FormatId f) {
  return f == FormatId::kFp8Block || f == FormatId::kFp8Channel || f == FormatId::kFp8Tensor
             ? tile_code_bytes(FormatId::kMxfp8)
             : tile_bytes(f);
}
NIBBLE_HD constexpr int64_t linear_tiles_bytes(FormatId f, int64_t out, int64_t cols) {
  return chunks(out) * chunks(cols) * linear_tile_bytes(f);
}

struct LinearKernelArgs {
  const uint8_t* packed;
  const float* block_scales;  // block FP8 only
  const float* factor;        // or null
  const float* bias;          // or null
  const uint8_t* x;           // BF16, x_stride elements a row
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  uint8_t* staged_x;  // many rows: [chunks][capacity][128], swizzled, in the columns' slot order
  int64_t capacity;
  int rows, out, cols, chunk_count, segments;
  bool accumulate, vector_y;  // vector_y: two neighbouring floats of y may be written at once
};

/// Queues a product. few: any number of rows, weights read once per 8 or 16 of them. many: Hopper
/// only, needs staged_x. held: from Hopper on, few rows, where is_held says so; or null.
using LinearLauncher = cudaError_t (*)(const LinearKernelArgs& args, int processors,
                                       cudaStream_t stream);
struct LinearLaunchers {
  LinearLauncher few = nullptr, many = nullptr;
  bool (*is_held)(const LinearKernelArgs& args, int processors) = nullptr;
  LinearLauncher held = nullptr;
};
LinearLaunchers linear_launchers_bf16();
LinearLaunchers linear_launchers_nvfp4();
LinearLaunchers linear_launchers_mxfp4();
LinearLaunchers linear_launchers_mxfp8();
LinearLaunchers linear_launchers_fp8_block();
LinearLaunchers linear_launchers_fp8_plain();

}  // namespace nibble::kernels::cuda
