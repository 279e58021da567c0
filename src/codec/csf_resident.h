// The form in which GPU kernels keep compressed NVFP4 scales of all experts of a layer, and the
// index that answers in constant time whether a 4-byte scale word contains an exception.
// Both are built from stored streams before serving starts; lookup here is the reference for
// kernels. Source: csf spec, sections 5 and 6.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "codec/csf.h"

namespace nibble::codec {

constexpr int64_t kCsfResidentSlabRows = 128;

/// Byte of the code of (row in slab, column) inside a resident slab; column's low bit picks the
/// nibble. The 128 bases come first, row r at byte (r mod 32) * 4 + r / 32.
constexpr int64_t csf_resident_base_at(int64_t row) { return row % 32 * 4 + row / 32; }
constexpr int64_t csf_resident_code_at(int64_t row, int64_t col) {
  return kCsfResidentSlabRows + col / 4 * 256 + row % 32 * 8 + row / 32 * 2 + col % 4 / 2;
}

struct CsfResident {
  int64_t experts = 0, rows = 0, cols = 0;
  std::vector<uint8_t> fixed;         // [experts, rows/128, 128 * (1 + cols/2)]
  std::vector<uint32_t> exceptions;   // expert after expert, words unchanged
  std::vector<int64_t> task_offsets;  // [experts, rows/128 + 1] first exception of each slab
  bool operator==(const CsfResident&) const = default;
};

/// Errors: kInvalidArgument starting with resident_geometry unless all experts are NVFP4 of one
/// size with rows mod 128 = 0 and cols mod 4 = 0, and there is at least one.
Result<CsfResident> make_csf_resident(std::span<const CsfView> experts);
/// The stored stream of one expert, bit for bit the one it was made from.
CsfPlane resident_to_stored(const CsfResident& resident, int64_t expert);

/// The index of section 6 in one byte array, as kernels take it.
struct CsfWordIndex {
  int64_t experts = 0, rows = 0, cols = 0;
  std::vector<uint8_t> bytes;
  int64_t tiles() const { return experts * rows * cols / 512; }
};

/// Errors: as make_csf_resident; kResourceExhausted if replacement words reach 2^32.
Result<CsfWordIndex> make_csf_word_index(std::span<const CsfView> experts);

/// The four final scale bytes of word n (0..127) of a tile, low byte first: row 32 * (n mod 4) +
/// n / 4 of the slab, columns 4g .. 4g + 3 of group g. Tiles are numbered
/// (expert * (rows/128) + slab) * (cols/4) + g. Constant time.
uint32_t csf_index_word(const CsfWordIndex& index, int64_t tile, int n);

}  // namespace nibble::codec
