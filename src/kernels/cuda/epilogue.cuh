// What happens to a finished 64 x N accumulator: activation and BF16 store of the first product,
// router weight and FP32 store of the second. Every operation is spelled out (__fmul_rn, ...), so
// that no geometry contracts it differently: a row's bits must not depend on the kernel that ran.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/moe_stream.h"
#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {

__device__ __forceinline__ float sigmoid(float v) {
  return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-v)));
}

__device__ __forceinline__ float activate(const MoeShape& shape, float gate, float up) {
  if (shape.activation == Activation::kSilu) {
    return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
  }
  gate = fminf(gate, shape.limit);
  up = fminf(fmaxf(up, -shape.limit), shape.limit);
  if (shape.activation == Activation::kSiluLimit) {
    return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
  }
  return __fmul_rn(__fmul_rn(gate, sigmoid(__fmul_rn(shape.alpha, gate))), __fadd_rn(up, 1.0f));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
/// Transposes an 8 x 8 matrix of 16-bit values held as an MMA fragment.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

/// First product: rows g are gate, rows g + 8 up of the same channel. Writes 16 bytes (eight
/// channels) a warp and token into the second product's activations.
template <int kRegisters>
__device__ __forceinline__ void store_activated(const StreamArgs& args,
                                                const float (&acc)[kRegisters], int expert,
                                                float gate_factor, float up_factor, int64_t block,
                                                int row_begin, int rows, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  float gate_bias = 0.0f, up_bias = 0.0f;
  if (args.weights.gate_bias != nullptr) {
    const int64_t channel = packed_row(Product::kGateUp, block, warp, g, 0);
    if (channel < args.shape.inter) {
      gate_bias = args.weights.gate_bias[expert * args.shape.inter + channel];
      up_bias = args.weights.up_bias[expert * args.shape.inter + channel];
    }
  }
  const int unit = 4 * static_cast<int>(block % 2) + warp;
#pragma unroll
  for (int i = 0; i < kRegisters / 4; ++i) {
    float v[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float gate = __fadd_rn(__fmul_rn(acc[4 * i + c], gate_factor), gate_bias);
      const float up = __fadd_rn(__fmul_rn(acc[4 * i + 2 + c], up_factor), up_bias);
      v[c] = activate(args.shape, gate, up);
    }
    const uint32_t channels = transpose_8x8(pack_bf16(v[0], v[1]));
    if (8 * i + g < rows) {
      uint8_t* out =
          args.work.h + chunk_offset(args.work.capacity, block / 2, row_begin + 8 * i + g, unit);
      *reinterpret_cast<uint32_t*>(out + 4 * t) = channels;
    }
  }
}

/// Second product: a lane holds two adjacent channels of each token. `slots` and `router` are the
/// tile's slot numbers and router weights.
template <int kRegisters>
__device__ __forceinline__ void store_weighted(const StreamArgs& args,
                                               const float (&acc)[kRegisters], int expert,
                                               float factor, int64_t block, int rows, int warp,
                                               int lane, const int* slots, const float* router) {
  const int g = lane / 4, t = lane % 4;
  const int64_t channel = packed_row(Product::kDown, block, warp, g, 0);
  if (channel >= args.shape.hidden) return;
  float bias[2] = {0.0f, 0.0f};
  if (args.weights.down_bias != nullptr) {
    bias[0] = args.weights.down_bias[expert * args.shape.hidden + channel];
    bias[1] = args.weights.down_bias[expert * args.shape.hidden + channel + 1];
  }
#pragma unroll
  for (int i = 0; i < kRegisters / 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 8 * i + 2 * t + c;
      if (row < rows) {
        const float low = __fadd_rn(__fmul_rn(acc[4 * i + c], factor), bias[0]);
        const float high = __fadd_rn(__fmul_rn(acc[4 * i + 2 + c], factor), bias[1]);
        const float w = router[row];
        *reinterpret_cast<float2*>(args.work.partial + slots[row] * args.shape.hidden + channel) =
            make_float2(__fmul_rn(low, w), __fmul_rn(high, w));
      }
    }
  }
}

/// Geometry::kFew: after a warpgroup has written its share of the tile's rows, the last of the
/// top_k shares of each (token, 64 channels) adds them all, in the order of k. `last` is shared
/// memory for one flag a row.
template <int kTileTokens>
__device__ __forceinline__ void finish_tokens(const StreamArgs& args, const TokenTile& tile,
                                              int tile_index, int block, int group, int thread,
                                              const int* slots, int* last) {
  FewCounters& few = *args.work.few;
  const int top_k = static_cast<int>(args.shape.top_k),
            hidden = static_cast<int>(args.shape.hidden);
  named_barrier(1 + group, 128);  // the shares are written
  if (thread < tile.rows) {
    const int token = slots[thread] / top_k;
    __threadfence();
    const unsigned before =
        atomicInc(&few.arrived[token * kFewBlocks + block], static_cast<unsigned>(top_k) - 1);
    __threadfence();
    last[thread] = before == static_cast<unsigned>(top_k) - 1 ? 1 : 0;
  } else if (thread == 127) {
    // The tile's last row block: nobody waits for its rows of h any more.
    const auto blocks = static_cast<unsigned>((hidden + kTileRows - 1) / kTileRows);
    if (atomicInc(&few.down_done[tile_index], blocks - 1) == blocks - 1) {
      few.up_done[tile_index] = 0;
    }
  }
  named_barrier(1 + group, 128);
  if (args.y == args.work.partial) return;  // one share alone, in its place already
  const int channel = block * kTileRows + thread % kTileRows;
  for (int row = thread / kTileRows; row < tile.rows; row += 128 / kTileRows) {
    if (last[row] == 0 || channel >= hidden) continue;
    const int64_t token = slots[row] / top_k;
    const float* share = args.work.partial + token * top_k * hidden + channel;
    float sum = __ldcg(share);
#pragma unroll 8
    for (int k = 1; k < top_k; ++k) sum = __fadd_rn(sum, __ldcg(share + k * hidden));
    if (args.add != nullptr) sum = __fadd_rn(sum, args.add[token * hidden + channel]);
    args.y[token * hidden + channel] = sum;
  }
}

}  // namespace nibble::kernels::cuda
