// Element codes to float and back, exact. Source: formats spec, section 1.
// Encoding: nearest, ties to the even code, saturating, sign of zero kept; NaN per table 1.1.
#pragma once

#include <cstdint>

namespace nibble::formats {

float decode_e2m1(uint8_t code);  // code 0..15
float decode_e4m3(uint8_t code);
float decode_e5m2(uint8_t code);
float decode_e8m0(uint8_t code);  // 2^(code-127); 0 is the subnormal 2^-127, 255 is NaN
float decode_bf16(uint16_t bits);
float decode_f16(uint16_t bits);

uint8_t encode_e2m1(float value);
uint8_t encode_e4m3(float value);
uint8_t encode_e5m2(float value);
uint16_t encode_bf16(float value);
uint16_t encode_f16(float value);

}  // namespace nibble::formats
