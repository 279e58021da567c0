// NF3: 3-bit codes into eight levels, an E4M3 scale per 32 columns. Source: formats spec, 1.2, 3.5.
#include <cmath>
#include <limits>

#include "formats/element.h"
#include "formats/packing.h"
#include "formats/quantize_common.h"

namespace nibble::formats {
namespace {

constexpr int kGroup = 32;

struct Codebook {
  float top;          // largest level magnitude
  float mids[7];      // a float is above midpoint i exactly when it is above mids[i]
  float bias;         // stored scale byte stands for e4m3 / bias
  uint8_t min_scale;  // byte of the smallest scale of a group that is not empty
};

Codebook make_codebook(const std::array<float, 8>& levels, int bias_log2) {
  Codebook book{};
  for (const float level : levels) book.top = std::max(book.top, std::fabs(level));
  for (size_t i = 0; i < 7; ++i) {
    const double mid = (static_cast<double>(levels[i]) + static_cast<double>(levels[i + 1])) / 2;
    // Exact for the published levels. Others may need more than a float holds: then the float below
    // divides the floats in the same place.
    float below = static_cast<float>(mid);
    if (static_cast<double>(below) > mid) {
      below = std::nextafter(below, -std::numeric_limits<float>::infinity());
    }
    book.mids[i] = below;
  }
  book.bias = std::ldexp(1.0f, bias_log2);
  book.min_scale = bias_log2 == 0 ? 0x01 : 0x08;
  return book;
}

void nf3_group(const float* src, float b, const Codebook& book, std::byte* out, std::byte* scale) {
  const float base = b / book.top;
  uint8_t codes[kGroup];
  if (base == 0.0f) {
    std::fill(codes, codes + kGroup, uint8_t{4});
    *scale = std::byte{0};
  } else {
    const uint8_t byte = std::max(book.min_scale, encode_e4m3(base * book.bias));
    const float t = decode_e4m3(byte) / book.bias;
    for (int i = 0; i < kGroup; ++i) {
      const float x = src[i] / t;
      int32_t code = 0;
      for (const float mid : book.mids) code += x > mid;
      codes[i] = static_cast<uint8_t>(code);
    }
    *scale = static_cast<std::byte>(byte);
  }
  pack_nf3(codes, kGroup, out);
}

}  // namespace

Result<QuantizedMatrix> quantize_nf3(std::span<const float> w, int64_t rows, int64_t cols,
                                     std::string_view name, int bias_log2,
                                     std::optional<std::array<float, 8>> levels, ThreadPool* pool) {
  if (bias_log2 != 0 && bias_log2 != 4) {
    return Error(Code::kInvalidArgument, cat("tensor '", name, "': nf3 scale bias 2^", bias_log2,
                                             ", expected the exponent 0 or 4"));
  }
  MatrixView meta;
  meta.format = FormatId::kNf3;
  meta.scale_kind = ScaleKind::kE4M3;
  meta.rows = rows;
  meta.cols = cols;
  meta.nf3_bias_log2 = bias_log2;
  meta.nf3_levels = levels.value_or(kNf3Levels);
  for (float& level : meta.nf3_levels) level = decode_bf16(encode_bf16(level));
  NIBBLE_TRY(QuantizedMatrix out, internal::make_planes(meta, w.size(), name));
  const Codebook book = make_codebook(meta.nf3_levels, bias_log2);
  NIBBLE_TRY(internal::quantize_groups<kGroup>(
      w, name, pool, &out, [&book](const float* src, float b, std::byte* codes, std::byte* scale) {
        nf3_group(src, b, book, codes, scale);
      }));
  return out;
}

}  // namespace nibble::formats
