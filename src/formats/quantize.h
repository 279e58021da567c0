// Quantizers: float (widened BF16 or F16) to stored planes, bit for bit as the formats spec,
// section 3, defines them. Parallel over rows where a pool is given; the bytes never depend on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "formats/block_format.h"

namespace nibble::formats {

enum class Nvfp4Profile { kDivide, kReciprocal };
enum class MxRounding { kFloor, kCeil, kEven };

/// Planes that own their bytes; view() reads them as a matrix.
struct QuantizedMatrix {
  MatrixView meta;  // codes and scales are null here: they live in the vectors
  std::vector<std::byte> codes, scales;
  MatrixView view() const;
};

/// Largest magnitude, 0 of nothing. Errors: kCorruptInput with `name` and index at a NaN or
/// infinity.
Result<float> finite_amax(std::span<const float> values, std::string_view name,
                          ThreadPool* pool = nullptr);

/// `w` is [rows, cols]; `name` is used in errors. Errors: kInvalidArgument if cols break the group
/// (text starts with "columns_not_group"), kCorruptInput at a NaN or infinity (text starts with
/// "non_finite_input" and names tensor and index).
/// amax: the largest magnitude over everything that shares the global scale; absent: of `w` itself.
Result<QuantizedMatrix> quantize_nvfp4(std::span<const float> w, int64_t rows, int64_t cols,
                                       std::string_view name, std::optional<float> amax = {},
                                       Nvfp4Profile profile = Nvfp4Profile::kDivide,
                                       ThreadPool* pool = nullptr);
Result<QuantizedMatrix> quantize_mxfp4(std::span<const float> w, int64_t rows, int64_t cols,
                                       std::string_view name, MxRounding mode = MxRounding::kCeil,
                                       ThreadPool* pool = nullptr);
/// kEven is kInvalidArgument here.
Result<QuantizedMatrix> quantize_mxfp8(std::span<const float> w, int64_t rows, int64_t cols,
                                       std::string_view name, MxRounding mode = MxRounding::kCeil,
                                       ThreadPool* pool = nullptr);
/// Edge blocks may be partial. scale_kind: kF32, or kE8M0 for exponents chosen as MX kCeil does.
Result<QuantizedMatrix> quantize_fp8_block(std::span<const float> w, int64_t rows, int64_t cols,
                                           std::string_view name, int64_t block_rows = 128,
                                           int64_t block_cols = 128, ThreadPool* pool = nullptr,
                                           ScaleKind scale_kind = ScaleKind::kF32);
/// bias_log2 4 writes the biased U8 dialect, 0 the plain F8_E4M3 one; others are kInvalidArgument.
/// levels: BF16-rounded here; kInvalidArgument unless they ascend then.
Result<QuantizedMatrix> quantize_nf3(std::span<const float> w, int64_t rows, int64_t cols,
                                     std::string_view name, int bias_log2 = 4,
                                     std::optional<std::array<float, 8>> levels = {},
                                     ThreadPool* pool = nullptr);

/// Shared-exponent byte of an MX group (kMxfp4 or kMxfp8) whose largest magnitude is `amax`, finite
/// and not negative. kEven is for kMxfp4 alone.
uint8_t mx_scale_byte(float amax, FormatId format, MxRounding mode);

}  // namespace nibble::formats
