// The sampler's exponential: plain arithmetic instead of libm, so that sampled text is the same on
// every host (no FMA contraction is allowed in this build) and loops over it vectorise.
#pragma once

#include <bit>
#include <cstdint>

namespace nibble::runtime {

/// e^x for x in [-inf, 0], relative error below 2^-22; exactly 1 at 0, and 0 below -87.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e400p-1f;  // few bits: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * kLog2E + kRound;
  const float n = shifted - kRound;
  const float f = (clamped - n * kLn2High) - n * kLn2Low;  // |f| <= ln(2) / 2
  float sum = 1.0f / 5040.0f;                              // Taylor: the rest is below f^8 / 40320
  sum = sum * f + 1.0f / 720.0f;
  sum = sum * f + 1.0f / 120.0f;
  sum = sum * f + 1.0f / 24.0f;
  sum = sum * f + 1.0f / 6.0f;
  sum = sum * f + 0.5f;
  sum = sum * f + 1.0f;
  sum = sum * f + 1.0f;
  const int32_t exponent = static_cast<int32_t>(n) + 127;  // in [1, 127]
  const float scale = std::bit_cast<float>(exponent << 23);
  return x < -87.0f ? 0.0f : sum * scale;
}

}  // namespace nibble::runtime
