// Repacking on the device: checkpoint rows to the tiles of layout.h and back, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

/// Matrices of all experts as the checkpoint stores them, stacked: codes [experts][rows][row bytes]
/// and scales [experts][rows][cols / group] on the device. For kGateUp `first` is gate and `second`
/// up, both [inter, hidden]; for kDown `first` is [hidden, inter] and `second` is unused.
/// Block FP8: scales are FP32 [experts][ceil(rows / block_rows)][ceil(cols / block_cols)].
struct RowPlanes {
  uint8_t* codes = nullptr;
  uint8_t* scales = nullptr;
};
struct PackArgs {
  FormatId format = FormatId::kNvfp4;
  Product product = Product::kGateUp;
  int64_t experts = 0, hidden = 0, inter = 0;
  RowPlanes first, second;
  uint8_t* packed = nullptr;  // [experts][packed_bytes]
  /// kCsf: room for the compressed scales is left, csf_index.h fills it. The plain scales are still
  /// read, for their signs.
  ScaleForm scale_form = ScaleForm::kPlain;
  int64_t block_rows = 128, block_cols = 128;  // block FP8: multiples of 64
};

/// Which scale bytes the fast kernels cannot take. Needed by the loader's choice of kernel.
/// kTooLarge: an E8M0 byte whose scaled register would overflow BF16 (MXFP4 above 128, MXFP8 above
/// 134). kNan: a NaN scale or a NaN E4M3 code.
enum PackFlags : int { kPackNan = 1, kPackTooLarge = 2 };

/// Queues the repack. `flags` (device int, zeroed by the caller) collects PackFlags. Negative NVFP4
/// scales are folded into their codes' signs; the scale byte keeps its sign, so unpacking undoes
/// it. cols must be a multiple of group_cols().
cudaError_t launch_pack(const PackArgs& args, int* flags, cudaStream_t stream);
/// The inverse: fills first and second. Plain scales only.
cudaError_t launch_unpack(const PackArgs& args, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
