// Activations in the column order of the products (layout.h, column_slot), as lanes read them from
// a matrix in its own order.
#pragma once

#include <cstdint>

#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

/// The pairs of columns of 16-byte unit u of a chunk are every eighth of the chunk's, from u on.
constexpr bool units_take_every_eighth_pair() {
  for (int u = 0; u < 8; ++u) {
    for (int i = 0; i < 8; ++i) {
      if (slot_column(8 * u + i) != 2 * (8 * (i / 2) + u) + i % 2) return false;
    }
  }
  return true;
}
static_assert(units_take_every_eighth_pair());

/// 16 bytes of a BF16 row in the products' column order, zeros behind its columns: unit `at` of it.
__device__ __forceinline__ uint4 dealt_unit(const uint8_t* row, int cols, uint32_t at) {
  const int column = static_cast<int>(at / 8 * kTileCols + at % 8 * 2);
  const auto* from = reinterpret_cast<const uint32_t*>(row + 2 * column);
  uint32_t pair[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) pair[t] = column + 16 * t < cols ? from[8 * t] : 0;
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

}  // namespace nibble::kernels::cuda
