// Words of scale bytes as CSF sees them: one thread works through one row, in pieces of kPiece
// bytes that suit the row's alignment, and how threads deal the units of many rows out, so that
// their accesses to memory are neighbours. Shared by the encoder, the decoder and the index.
#pragma once

#include <cstdint>

#include "codec/csf.h"

namespace nibble::kernels::cuda {

using codec::CsfKind;

template <CsfKind kind>
constexpr int kCsfWindow = codec::csf_window(kind);
template <CsfKind kind>
constexpr int kCsfMaxBase = codec::csf_max_base(kind);

constexpr int kCsfThreads = 128;  // rows of a CTA

/// A stack as kernels see it.
struct CsfRows {
  int64_t rows;                  // of all experts together
  int expert_rows, cols, width;  // width: bytes of a packed row
};

/// Four bytes of a row: their codes under a base, and which lie outside its window.
struct CsfFour {
  uint32_t codes;    // one a byte; 0 outside the window
  uint32_t outside;  // bit 8 i + 7 of byte i
};
template <CsfKind kind>
__device__ __forceinline__ CsfFour csf_four(uint32_t bytes, uint32_t base) {
  constexpr uint32_t kCode = kind == CsfKind::kNvfp4 ? 0x0F0F0F0Fu : 0x01010101u;
  // Byte-wise difference modulo 256: bits 0..6 without borrows between bytes, then bit 7.
  const uint32_t bases = base * 0x01010101u;
  const uint32_t low = (bytes | 0x80808080u) - (bases & 0x7F7F7F7Fu);
  const uint32_t difference = low ^ ((bytes ^ ~bases) & 0x80808080u);
  const uint32_t above = difference & ~kCode;
  // Bit 7 of every byte that has any bit of `above`.
  const uint32_t outside = (((above & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | above) & 0x80808080u;
  return {difference & kCode & ~((outside >> 7) * 0xFFu), outside};
}
/// The codes of four cells, packed: 16 bits (NVFP4) or 4 bits.
template <CsfKind kind>
__device__ __forceinline__ uint32_t csf_pack_four(uint32_t codes) {
  if constexpr (kind == CsfKind::kNvfp4) {
    const uint32_t pairs = codes | codes >> 4;
    return __byte_perm(pairs, 0, 0x4420) & 0xFFFFu;
  } else {
    return codes * 0x10204080u >> 28;
  }
}

/// kPiece bytes (1, 2, 4, 8 or 16) of a row as words; bytes past a short piece are zero.
template <int kPiece>
struct CsfPiece {
  static constexpr int kWords = kPiece <= 4 ? 1 : kPiece / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const uint8_t* p) {
    if constexpr (kPiece == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(p);
      words[0] = v.x;
      words[1] = v.y;
      words[2] = v.z;
      words[3] = v.w;
    } else if constexpr (kPiece == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(p);
      words[0] = v.x;
      words[1] = v.y;
    } else if constexpr (kPiece == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(p);
    } else if constexpr (kPiece == 2) {
      words[0] = *reinterpret_cast<const uint16_t*>(p);
    } else {
      words[0] = *p;
    }
  }
};
template <int kPiece>
constexpr uint32_t kCsfPieceMask = kPiece == 1   ? 0xFFu
                                   : kPiece == 2 ? 0xFFFFu
                                                 : 0xFFFFFFFFu;

/// A thread's units of a block of rows, `units` in each, dealt out row by row to `threads` threads:
/// no division after the first.
struct CsfWalk {
  int row, unit;

  __device__ __forceinline__ CsfWalk(int thread, int units)
      : row(thread / units), unit(thread % units) {}
  __device__ __forceinline__ void advance(int threads, int units) {
    row += threads / units;
    unit += threads % units;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
};

/// Where row `row` of all experts keeps its base and its packed codes.
__device__ __forceinline__ uint8_t* csf_slab(const CsfRows& r, uint8_t* fixed, int64_t row) {
  return fixed + row / 16 * (16 * (1 + r.width));
}
__device__ __forceinline__ uint8_t* csf_packed_row(const CsfRows& r, uint8_t* fixed, int64_t row) {
  return csf_slab(r, fixed, row) + 16 + row % 16 * r.width;
}

}  // namespace nibble::kernels::cuda
