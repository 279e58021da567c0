// Dense linear layers on an NVIDIA GPU: y (+)= W x + bias. Weights lie in the tiles of layout.h
// (Product::kDown order) in their checkpoint format and are expanded in registers; x is BF16, sums
// and y are FP32. Matrices that read the same x and have the same format are stacked by rows into
// one packed matrix, so that q, k and v are one launch.
//
// Left to others: the router's FP32 product (router.h), experts (moe_layer.h), loading.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

/// One packed matrix (possibly a stack of several), on the device, 256-byte aligned.
/// Formats: BF16, NVFP4, MXFP4, MXFP8, block FP8 (E4M3 codes with FP32 scales of 128 x 128 blocks),
/// channel and tensor FP8 (E4M3 codes; `factor` is their scale).
/// cols is a multiple of 8 (BF16), 16 (NVFP4 and all FP8 but MXFP8) or 32 (MXFP4, MXFP8), at most
/// 53248.
struct LinearWeight {
  FormatId format = FormatId::kBf16;
  int64_t out = 0, cols = 0;
  const std::byte* packed = nullptr;  // linear_packed_bytes(format, out, cols)
  /// FP32 [out], one a row, or null for 1: what the row's sum is multiplied with. NVFP4: the global
  /// scale of the row's matrix times register_unit(format); channel and tensor FP8: the scale.
  const float* factor = nullptr;
  const float* bias = nullptr;  // FP32 [out] or null; added after the factor
};

/// x [rows, cols] BF16 and y [rows, out] FP32 on the device; strides in elements. x is 16-byte
/// aligned and x_stride a multiple of 8; y and x do not overlap.
struct LinearArgs {
  const void* x = nullptr;
  int64_t x_stride = 0;  // 0: cols
  int64_t rows = 0;
  float* y = nullptr;
  int64_t y_stride = 0;     // 0: out
  bool accumulate = false;  // y = y + result instead of y = result
};

/// Which kernel runs; kAuto picks by rows. The result's bits do not depend on it. kHeld: few rows,
/// weights all in shared memory at once; where that is not possible, the few-row kernel.
enum class LinearPath : uint8_t { kAuto, kFewRows, kManyRows, kHeld };

/// Device bytes of a packed matrix; 0: the format has no dense kernel.
int64_t linear_packed_bytes(FormatId format, int64_t out, int64_t cols);

/// Device scratch that linear() needs for up to max_rows rows of up to max_cols columns, and for
/// all smaller calls. Calls that run one after another may share it.
int64_t linear_scratch_bytes(int64_t max_rows, int64_t max_cols);

/// Queues the product and returns: no allocation, no host synchronisation, safe to capture.
/// `scratch`: linear_scratch_bytes(>= rows, >= cols), 256-byte aligned; any content.
///
/// Numerics: weights exact in BF16 (block FP8: codes exact, the block's FP32 scale applied to the
/// FP32 sum over its 128 columns). K is cut in segments of kLinearSegmentChunks x 64 columns;
/// each is summed in ascending steps of 16 from zero, then the segments are added in ascending
/// order, then y = (y +) sum * factor + bias, each operation rounded. The order depends on nothing
/// else, so a row's bits depend on that row and the weights alone. With eps = 2^-23 and weights w:
/// |y - exact| <= (cols / 16 + 20) eps (sum |w x| + |bias| + |y before|).
///
/// Errors: kInvalidArgument (sizes, null pointer), kUnsupported (format), kInternal (launch).
Result<void> linear(const LinearWeight& weight, const LinearArgs& args, void* scratch,
                    cudaStream_t stream, LinearPath path = LinearPath::kAuto);

/// Chunks (of kTileCols columns) that are summed from zero before they are added to the whole.
constexpr int kLinearSegmentChunks = 4;

/// Rows [row_begin, row_begin + rows) of a packed matrix as the checkpoint stores them, on the
/// device: codes [rows, code row bytes], scales [rows, cols / group], or for block FP8 FP32
/// [ceil(rows / 128), ceil(cols / 128)]. row_begin is a multiple of 64; so is rows, unless the
/// piece is the last.
struct LinearPiece {
  FormatId format = FormatId::kBf16;
  int64_t out = 0, cols = 0;  // of the whole packed matrix
  int64_t row_begin = 0, rows = 0;
  uint8_t* codes = nullptr;   // 8-byte aligned
  uint8_t* scales = nullptr;  // null where the format has none; FP32: 4-byte aligned
};

/// Queues the repack of one piece into `packed`; pack every piece once. `flags` (device int, zeroed
/// by the caller) collects PackFlags of packing.h; the kernels need it 0. linear() reads weights
/// before the stream's previous kernel has ended: synchronise once between packing and using.
Result<void> pack_linear(const LinearPiece& piece, std::byte* packed, int* flags,
                         cudaStream_t stream);
/// The inverse, bit for bit: fills piece.codes and piece.scales.
Result<void> unpack_linear(const LinearPiece& piece, const std::byte* packed, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
