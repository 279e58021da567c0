// NVFP4: E2M1 codes, an E4M3 scale per 16 columns, one FP32 global. Source: formats spec, 3.1, 3.2.
#include <cmath>

#include "formats/element.h"
#include "formats/quantize_common.h"

namespace nibble::formats {
namespace {

constexpr int kGroup = 16;
constexpr float kSmallestAmax = 1e-8f;
constexpr float kLargest = 2688.0f;  // largest code times largest scale: 6 * 448

void pack_group(const uint8_t* codes, std::byte* out) {
  for (int i = 0; i < kGroup / 2; ++i) {
    out[i] = static_cast<std::byte>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

/// Exact ties are common (the source is BF16), so every quotient is a true division.
void divide_group(const float* src, float b, float ws2, std::byte* out, std::byte* scale) {
  const float t = b / (6.0f * ws2);
  const uint8_t byte = t == 0.0f ? uint8_t{0x38} : std::max(uint8_t{0x01}, encode_e4m3(t));
  const float d = decode_e4m3(byte) * ws2;
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; ++i) codes[i] = encode_e2m1(src[i] / d);
  pack_group(codes, out);
  *scale = static_cast<std::byte>(byte);
}

void reciprocal_group(const float* src, float b, float g, float ws2, std::byte* out,
                      std::byte* scale) {
  const uint8_t byte = encode_e4m3(g * (b * (1.0f / 6.0f)));
  const float inv = byte == 0 ? 0.0f : 1.0f / (decode_e4m3(byte) * ws2);
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; ++i) codes[i] = encode_e2m1(src[i] * inv);
  pack_group(codes, out);
  *scale = static_cast<std::byte>(byte);
}

}  // namespace

Result<QuantizedMatrix> quantize_nvfp4(std::span<const float> w, int64_t rows, int64_t cols,
                                       std::string_view name, std::optional<float> amax,
                                       Nvfp4Profile profile, ThreadPool* pool) {
  MatrixView meta;
  meta.format = FormatId::kNvfp4;
  meta.scale_kind = ScaleKind::kE4M3;
  meta.rows = rows;
  meta.cols = cols;
  NIBBLE_TRY(QuantizedMatrix out, internal::make_planes(meta, w.size(), name));
  if (!amax) {
    NIBBLE_TRY(amax, finite_amax(w, name, pool));
  } else if (!(std::isfinite(*amax) && *amax >= 0.0f)) {
    return Error(Code::kInvalidArgument, cat("tensor '", name, "': shared largest magnitude is ",
                                             *amax, ", expected a finite number from 0"));
  }
  const float top = std::max(*amax, kSmallestAmax);
  if (profile == Nvfp4Profile::kDivide) {
    const float ws2 = top / kLargest;
    out.meta.global = ws2;
    NIBBLE_TRY(internal::quantize_groups<kGroup>(
        w, name, pool, &out, [ws2](const float* src, float b, std::byte* codes, std::byte* scale) {
          divide_group(src, b, ws2, codes, scale);
        }));
  } else {
    const float g = kLargest / top;
    const float ws2 = 1.0f / g;
    out.meta.global = ws2;
    NIBBLE_TRY(internal::quantize_groups<kGroup>(
        w, name, pool, &out,
        [g, ws2](const float* src, float b, std::byte* codes, std::byte* scale) {
          reciprocal_group(src, b, g, ws2, codes, scale);
        }));
  }
  return out;
}

}  // namespace nibble::formats
