// The inner loops of the codec, one table per instruction set; internal to this folder. All tables
// give the same bytes; the scalar one is the reference. Sizes and legality are the callers' work.
#pragma once

#include <cstdint>

#include "codec/csf.h"

namespace nibble::codec {

/// Exception words that pack_* may write past the ones it reports.
constexpr int64_t kCsfWordSlack = 16;

struct CsfKernels {
  /// Lowest base whose window covers the most of the row's n >= 1 bytes.
  int (*best_base)(const uint8_t* row, int64_t n, int window);
  /// Writes the packed row and the row's exceptions, whose first cell has `position`. Returns how
  /// many; `words` has room for n + kCsfWordSlack.
  using PackRow = int64_t (*)(const uint8_t* row, int64_t n, int base, uint32_t position,
                              uint8_t* packed, uint32_t* words);
  PackRow pack_nvfp4, pack_mxfp4;
  /// slab: 16 bases, 16 packed rows; out [16, cols]. Exceptions are not applied.
  using UnpackSlab = void (*)(const uint8_t* slab, int64_t cols, uint8_t* out);
  UnpackSlab unpack_nvfp4, unpack_mxfp4;
  /// bases [16], groups [count][16]; out [count * (2 or 8)][16]. Exceptions are not applied.
  using UnpackTile = void (*)(const uint8_t* bases, const uint8_t* groups, int64_t count,
                              uint8_t* out);
  UnpackTile tile_nvfp4, tile_mxfp4;
};

extern const CsfKernels kCsfScalar;
#if defined(__x86_64__)
extern const CsfKernels kCsfAvx2;
extern const CsfKernels kCsfAvx512;
#endif

/// The table of an ISA that csf_isas() lists.
const CsfKernels& csf_kernels(CsfIsa isa);

}  // namespace nibble::codec
