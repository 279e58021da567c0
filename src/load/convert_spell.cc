#include "load/convert_spell.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace nibble::load {
namespace {

using formats::DType;
using formats::FormatId;

std::vector<std::byte> f32_bytes(float value) {
  std::vector<std::byte> bytes(sizeof(value));
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

DType plain_dtype(FormatId format) {
  if (format == FormatId::kF32) return DType::kF32;
  return format == FormatId::kF16 ? DType::kF16 : DType::kBf16;
}

}  // namespace

std::optional<float> divisor_of(float global) {
  const float middle = 1.0f / global;
  const float below = std::nextafter(middle, 0.0f);
  const float above = std::nextafter(middle, std::numeric_limits<float>::infinity());
  for (const float divisor : {middle, below, above}) {
    if (std::isfinite(divisor) && divisor > 0 && 1.0f / divisor == global) return divisor;
  }
  return std::nullopt;
}

float amax_with_divisor(float amax) {
  float candidate = std::max(amax, 1e-8f);
  while (candidate < std::numeric_limits<float>::max() && !divisor_of(candidate / 2688.0f)) {
    candidate = std::nextafter(candidate, std::numeric_limits<float>::infinity());
  }
  return candidate;
}

std::vector<SpelledTensor> spell(ConvertDialect dialect, const std::string& module,
                                 formats::QuantizedMatrix matrix, std::optional<float> divisor) {
  const formats::MatrixView& meta = matrix.meta;
  const bool compressed_tensors = dialect == ConvertDialect::kCompressedTensors;
  const int64_t rows = meta.rows, cols = meta.cols;
  std::vector<SpelledTensor> out;
  const auto codes = [&](const char* suffix, DType dtype) {
    const int64_t width = formats::code_row_bytes(meta.format, cols);
    const bool packed = dtype == DType::kU8;
    out.push_back({module + suffix, dtype, {rows, packed ? width : cols}, std::move(matrix.codes)});
  };
  const auto scales = [&](const char* suffix, DType dtype, std::vector<int64_t> shape) {
    out.push_back({module + suffix, dtype, std::move(shape), std::move(matrix.scales)});
  };
  switch (meta.format) {
    case FormatId::kF32:
    case FormatId::kF16:
    case FormatId::kBf16: codes(".weight", plain_dtype(meta.format)); break;
    case FormatId::kNvfp4: {
      codes(compressed_tensors ? ".weight_packed" : ".weight", DType::kU8);
      scales(".weight_scale", DType::kF8E4M3, {rows, cols / 16});
      if (!compressed_tensors) {
        out.push_back({module + ".weight_scale_2", DType::kF32, {}, f32_bytes(meta.global)});
        break;
      }
      if (!divisor) divisor = divisor_of(meta.global);
      NIBBLE_CHECK(divisor.has_value(), module, " ", meta.global);
      out.push_back({module + ".weight_global_scale", DType::kF32, {1}, f32_bytes(*divisor)});
      break;
    }
    case FormatId::kMxfp4:
      codes(".weight_packed", DType::kU8);
      scales(".weight_scale", DType::kU8, {rows, cols / 32});
      break;
    case FormatId::kMxfp8:
      codes(".weight", DType::kF8E4M3);
      scales(".weight_scale", DType::kU8, {rows, cols / 32});
      break;
    case FormatId::kNf3:
      // Plain scales are told from biased ones by their type.
      codes(".nf3_packed", DType::kU8);
      scales(".nf3_scale", meta.nf3_bias_log2 == 0 ? DType::kF8E4M3 : DType::kU8,
             {rows, cols / 32});
      break;
    case FormatId::kFp8Block:
      codes(".weight", DType::kF8E4M3);
      scales(".weight_scale_inv", DType::kF32,
             {(rows + meta.block_rows - 1) / meta.block_rows,
              (cols + meta.block_cols - 1) / meta.block_cols});
      break;
    case FormatId::kFp8Channel:
      codes(".weight", DType::kF8E4M3);
      scales(".weight_scale", DType::kF32, {rows});
      break;
    case FormatId::kFp8Tensor:
      codes(".weight", DType::kF8E4M3);
      scales(".weight_scale", DType::kF32, {});
      break;
  }
  return out;
}

}  // namespace nibble::load
