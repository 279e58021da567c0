// Counter-based random bits: a pure function of (seed, counter), so a draw needs no state and does
// not depend on what else was drawn. Source: Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011), Philox4x32 with 10 rounds.
#pragma once

#include <array>
#include <cstdint>

namespace nibble::runtime {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

/// 64 uniform bits of draw number `draw` under `seed`.
inline uint64_t random_bits(uint64_t seed, uint64_t draw) {
  const auto words = philox4x32({static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32)},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return uint64_t{words[1]} << 32 | words[0];
}

}  // namespace nibble::runtime
