// Several element codes in a byte, and back. Source: formats spec, section 1.3.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::formats {

/// codes [n] of 0..15 to out [n / 2]: even element in the low nibble. n must be even.
void pack_nibbles(const uint8_t* codes, int64_t n, std::byte* out);
void unpack_nibbles(const std::byte* packed, int64_t n, uint8_t* codes);

/// codes [n] of 0..7 to out [3 n / 8]: eight codes make the 24-bit word sum code[j] << 3j, stored
/// low byte first. n must be a multiple of 8.
void pack_nf3(const uint8_t* codes, int64_t n, std::byte* out);
void unpack_nf3(const std::byte* packed, int64_t n, uint8_t* codes);

}  // namespace nibble::formats
