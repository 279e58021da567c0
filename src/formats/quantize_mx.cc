// MXFP4 and MXFP8: E2M1 or E4M3 codes, an E8M0 scale per 32 columns. Source: formats spec, 3.3.
#include "base/check.h"
#include "formats/element.h"
#include "formats/quantize_common.h"

namespace nibble::formats {
namespace {

constexpr int kGroup = 32;

MatrixView mx_meta(FormatId format, int64_t rows, int64_t cols) {
  MatrixView meta;
  meta.format = format;
  meta.scale_kind = ScaleKind::kE8M0;
  meta.rows = rows;
  meta.cols = cols;
  return meta;
}

/// 2^-e of the scale byte e + 127. A product with it is exact where the code is not zero: it leaves
/// the FP32 normals only far below the smallest code.
float inverse_scale(uint8_t byte) { return decode_e8m0(static_cast<uint8_t>(254 - byte)); }

void mxfp4_group(const float* src, float b, MxRounding mode, std::byte* out, std::byte* scale) {
  const uint8_t byte = mx_scale_byte(b, FormatId::kMxfp4, mode);
  const float inverse = inverse_scale(byte);
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; ++i) codes[i] = encode_e2m1(src[i] * inverse);
  for (int i = 0; i < kGroup / 2; ++i) {
    out[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  *scale = static_cast<std::byte>(byte);
}

void mxfp8_group(const float* src, float b, MxRounding mode, std::byte* out, std::byte* scale) {
  const uint8_t byte = mx_scale_byte(b, FormatId::kMxfp8, mode);
  const float inverse = inverse_scale(byte);
  for (int i = 0; i < kGroup; ++i) out[i] = static_cast<std::byte>(encode_e4m3(src[i] * inverse));
  *scale = static_cast<std::byte>(byte);
}

}  // namespace

uint8_t mx_scale_byte(float amax, FormatId format, MxRounding mode) {
  const bool e2m1 = format == FormatId::kMxfp4;
  NIBBLE_CHECK(e2m1 || (format == FormatId::kMxfp8 && mode != MxRounding::kEven), "format ",
               static_cast<int>(format), " mode ", static_cast<int>(mode));
  uint32_t bits = std::bit_cast<uint32_t>(amax) & 0x7FFFFFFFu;
  if (bits == 0) return 127;
  int32_t exponent = static_cast<int32_t>(bits >> 23) - 127;
  if (exponent == -127) {  // subnormal: shift the leading one to where a normal float hides it
    const int shift = std::countl_zero(bits) - 8;
    bits <<= shift;
    exponent = -126 - shift;
  }
  const uint32_t fraction = bits & 0x7FFFFFu;  // amax = (1 + fraction / 2^23) * 2^exponent
  int32_t e = exponent - (e2m1 ? 2 : 8);
  switch (mode) {
    case MxRounding::kFloor: break;
    case MxRounding::kCeil: e += fraction > (e2m1 ? 0x400000u : 0x600000u); break;
    case MxRounding::kEven: e += fraction >= 0x600000u; break;
  }
  return static_cast<uint8_t>(std::clamp(e, -127, 127) + 127);
}

Result<QuantizedMatrix> quantize_mxfp4(std::span<const float> w, int64_t rows, int64_t cols,
                                       std::string_view name, MxRounding mode, ThreadPool* pool) {
  NIBBLE_TRY(QuantizedMatrix out,
             internal::make_planes(mx_meta(FormatId::kMxfp4, rows, cols), w.size(), name));
  NIBBLE_TRY(internal::quantize_groups<kGroup>(
      w, name, pool, &out, [mode](const float* src, float b, std::byte* codes, std::byte* scale) {
        mxfp4_group(src, b, mode, codes, scale);
      }));
  return out;
}

Result<QuantizedMatrix> quantize_mxfp8(std::span<const float> w, int64_t rows, int64_t cols,
                                       std::string_view name, MxRounding mode, ThreadPool* pool) {
  if (mode == MxRounding::kEven) {
    return Error(Code::kInvalidArgument,
                 cat("tensor '", name, "': mxfp8 has no rounding mode 'even', use ceil or floor"));
  }
  NIBBLE_TRY(QuantizedMatrix out,
             internal::make_planes(mx_meta(FormatId::kMxfp8, rows, cols), w.size(), name));
  NIBBLE_TRY(internal::quantize_groups<kGroup>(
      w, name, pool, &out, [mode](const float* src, float b, std::byte* codes, std::byte* scale) {
        mxfp8_group(src, b, mode, codes, scale);
      }));
  return out;
}

}  // namespace nibble::formats
