// Element codes to float and back, exact. Source: formats spec, section 1.
// Encoding: nearest, ties to the even code, saturating, sign of zero kept; NaN per table 1.1.
// Inline and free of data-dependent branches, so that a loop over a row becomes vector code. They
// rely on the default rounding mode and on subnormals being kept, as all of nibble does.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace nibble::formats {

extern const std::array<float, 16> kE2M1Values;   // by code
extern const std::array<float, 256> kE4M3Values;  // by code; NaN is 0x7FC00000
extern const std::array<float, 256> kE5M2Values;

inline float decode_e2m1(uint8_t code) { return kE2M1Values[code & 15]; }  // code 0..15
inline float decode_e4m3(uint8_t code) { return kE4M3Values[code]; }
inline float decode_e5m2(uint8_t code) { return kE5M2Values[code]; }
/// 2^(code-127); 0 is the subnormal 2^-127, 255 is NaN.
inline float decode_e8m0(uint8_t code) {
  if (code == 0) return 0x1p-127f;
  if (code == 255) return std::bit_cast<float>(uint32_t{0x7FC00000});
  return std::bit_cast<float>(static_cast<uint32_t>(code) << 23);
}
inline float decode_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
inline float decode_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  if (magnitude >= 0x7C00) normal |= 0x7F800000u;  // infinity and NaN, payload kept
  // A subnormal half is m * 2^-24, and 2^-24 is one unit in the last place of 0.5.
  const float subnormal = std::bit_cast<float>(0x3F000000u + magnitude) - 0.5f;
  const uint32_t value = magnitude < 0x400 ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(sign | value);
}

inline uint8_t encode_e2m1(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int32_t a = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  // Number of midpoints passed: > where a tie goes down, >= where it goes up, to the even code.
  const int32_t code = (a > 0x3E800000) +   // 0.25
                       (a >= 0x3F400000) +  // 0.75
                       (a > 0x3FA00000) +   // 1.25
                       (a >= 0x3FE00000) +  // 1.75
                       (a > 0x40200000) +   // 2.5
                       (a >= 0x40600000) +  // 3.5
                       (a > 0x40A00000);    // 5
  const int32_t sign = a > 0x7F800000 ? 0 : static_cast<int32_t>(bits >> 28 & 8u);
  return static_cast<uint8_t>(code | sign);
}

namespace internal {

/// Magnitude code of a float given by its bits without sign: Exp and Man bits of the code, largest
/// code `top` (finite values saturate there, and so does infinity). Not for NaN.
template <int Man, int Bias>
inline int32_t encode_magnitude(int32_t a, int32_t top) {
  constexpr int kShift = 23 - Man;
  constexpr int32_t kSmallestNormal = (127 + 1 - Bias) << 23;
  // Below the smallest normal the codes count steps of 2^(1-Bias-Man). That step is one unit in the
  // last place of kMagic, so the addition rounds once, to nearest even, and the low bits are the
  // code.
  constexpr int32_t kMagic = (127 + 1 - Bias - Man + 23) << 23;
  const float sum =
      std::bit_cast<float>(static_cast<uint32_t>(a)) + std::bit_cast<float>(uint32_t{kMagic});
  const int32_t subnormal = static_cast<int32_t>(std::bit_cast<uint32_t>(sum)) - kMagic;
  const int32_t half = (1 << (kShift - 1)) - 1 + (a >> kShift & 1);
  // a is at most that of infinity here or the result is not used, so a + half stays positive.
  const int32_t normal = ((a + half) >> kShift) - ((127 - Bias) << Man);
  const int32_t code = a < kSmallestNormal ? subnormal : normal;
  return code < top ? code : top;
}

}  // namespace internal

inline uint8_t encode_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int32_t a = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t nan = a > 0x7F800000;
  const int32_t code = internal::encode_magnitude<3, 7>(a & (nan - 1), 0x7E);
  return static_cast<uint8_t>(nan ? 0x7F : code | static_cast<int32_t>(bits >> 24 & 0x80u));
}
inline uint8_t encode_e5m2(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int32_t a = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t nan = a > 0x7F800000;
  const int32_t code = internal::encode_magnitude<2, 15>(a & (nan - 1), 0x7B);
  return static_cast<uint8_t>(nan ? 0x7F : code | static_cast<int32_t>(bits >> 24 & 0x80u));
}
/// Overflow gives infinity, NaN gives 0x7FC0.
inline uint16_t encode_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}
/// Overflow gives infinity, NaN gives 0x7E00.
inline uint16_t encode_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const int32_t a = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const int32_t nan = a > 0x7F800000;
  const int32_t code = internal::encode_magnitude<10, 15>(a & (nan - 1), 0x7C00);
  return static_cast<uint16_t>(nan ? 0x7E00 : code | static_cast<int32_t>(bits >> 16 & 0x8000u));
}

/// Rows of n elements; the 16-bit side may lie at any address.
void decode_bf16_row(const std::byte* src, int64_t n, float* out);
void decode_f16_row(const std::byte* src, int64_t n, float* out);
void encode_bf16_row(const float* src, int64_t n, std::byte* out);

}  // namespace nibble::formats
