#include "formats/element.h"

#include <cstring>

namespace nibble::formats {
namespace {

constexpr float kNan = std::bit_cast<float>(uint32_t{0x7FC00000});

/// 2^exponent for exponents of normal floats.
constexpr float pow2(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

/// Value of every code with Exp exponent and Man significand bits; all are normal floats or zero.
template <int Exp, int Man>
constexpr std::array<float, size_t{2} << (Exp + Man)> minifloat_values(int bias) {
  std::array<float, size_t{2} << (Exp + Man)> values{};
  constexpr int kMagnitudes = 1 << (Exp + Man);
  for (int code = 0; code < kMagnitudes; ++code) {
    const int e = code >> Man;
    const int m = code & ((1 << Man) - 1);
    const float value = e == 0 ? static_cast<float>(m) * pow2(1 - bias - Man)
                               : static_cast<float>((1 << Man) + m) * pow2(e - bias - Man);
    values[static_cast<size_t>(code)] = value;
    values[static_cast<size_t>(code + kMagnitudes)] = -value;
  }
  return values;
}

constexpr std::array<float, 256> e4m3_values() {
  std::array<float, 256> values = minifloat_values<4, 3>(7);
  values[0x7F] = values[0xFF] = kNan;
  return values;
}

constexpr std::array<float, 256> e5m2_values() {
  std::array<float, 256> values = minifloat_values<5, 2>(15);
  const float inf = std::bit_cast<float>(uint32_t{0x7F800000});
  values[0x7C] = inf;
  values[0xFC] = -inf;
  for (size_t code = 0x7D; code <= 0x7F; ++code) values[code] = values[code + 0x80] = kNan;
  return values;
}

}  // namespace

constinit const std::array<float, 16> kE2M1Values = minifloat_values<2, 1>(1);
constinit const std::array<float, 256> kE4M3Values = e4m3_values();
constinit const std::array<float, 256> kE5M2Values = e5m2_values();

void decode_bf16_row(const std::byte* src, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, src + 2 * i, 2);
    out[i] = decode_bf16(bits);
  }
}

void decode_f16_row(const std::byte* src, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t bits;
    std::memcpy(&bits, src + 2 * i, 2);
    out[i] = decode_f16(bits);
  }
}

void encode_bf16_row(const float* src, int64_t n, std::byte* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = encode_bf16(src[i]);
    std::memcpy(out + 2 * i, &bits, 2);
  }
}

}  // namespace nibble::formats
