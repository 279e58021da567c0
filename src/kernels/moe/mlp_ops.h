// The per-ISA half of the feed-forward block, beside the products of matmul/tile_ops.h.
#pragma once

#include "kernels/matmul/tile_ops.h"
#include "kernels/moe/moe.h"

namespace nibble::kernels {

struct MlpOps {
  /// h[t, 0..16) = act(gate, up) of one tile of the intermediate, as packed activations: `out` is
  /// row 0's place, rows lie packed_row_bytes(kind) apart. Lanes from `lanes` on become zero.
  /// gate, up [rows][16]; biases null or of this tile.
  void (*activate)(const MlpShape& shape, const float* gate, const float* up, int64_t rows,
                   const float* gate_bias, const float* up_bias, int64_t lanes, PackKind kind,
                   std::byte* out);
  /// y[0..width) = sum over slots of weights[s] * d[positions[s] * d_stride + 0..width), in order.
  void (*combine)(const float* d, int64_t d_stride, const int32_t* positions, const float* weights,
                  int64_t slots, int64_t width, float* y);
};

#define NIBBLE_DECLARE_MLP_OPS(ns, isa) \
  namespace ns {                        \
  const MlpOps& mlp_ops();              \
  }
NIBBLE_FOR_EACH_ISA(NIBBLE_DECLARE_MLP_OPS)
#undef NIBBLE_DECLARE_MLP_OPS

}  // namespace nibble::kernels
