#include "formats/packing.h"

namespace nibble::formats {

void pack_nibbles(const uint8_t* codes, int64_t n, std::byte* out) {
  for (int64_t i = 0; i < n / 2; ++i) {
    out[i] = static_cast<std::byte>((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
  }
}

void unpack_nibbles(const std::byte* packed, int64_t n, uint8_t* codes) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const uint8_t byte = std::to_integer<uint8_t>(packed[i]);
    codes[2 * i] = byte & 15;
    codes[2 * i + 1] = static_cast<uint8_t>(byte >> 4);
  }
}

void pack_nf3(const uint8_t* codes, int64_t n, std::byte* out) {
  for (int64_t group = 0; group < n / 8; ++group) {
    uint32_t word = 0;
    for (int j = 0; j < 8; ++j) word |= (codes[8 * group + j] & 7u) << (3 * j);
    for (int j = 0; j < 3; ++j) out[3 * group + j] = static_cast<std::byte>(word >> (8 * j) & 255u);
  }
}

void unpack_nf3(const std::byte* packed, int64_t n, uint8_t* codes) {
  for (int64_t group = 0; group < n / 8; ++group) {
    uint32_t word = 0;
    for (int j = 0; j < 3; ++j) {
      word |= std::to_integer<uint32_t>(packed[3 * group + j]) << (8 * j);
    }
    for (int j = 0; j < 8; ++j) codes[8 * group + j] = static_cast<uint8_t>(word >> (3 * j) & 7u);
  }
}

}  // namespace nibble::formats
