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

/// The activation of one row block's eight channels (rows g gate, rows g + 8 up) for eight tokens:
/// lane (g, t) gets channels 2 t and 2 t + 1 of token g.
__device__ __forceinline__ uint32_t activated_channels(const MoeShape& shape, const float* acc,
                                                       float gate_factor, float up_factor,
                                                       float gate_bias, float up_bias) {
  float v[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float gate = __fadd_rn(__fmul_rn(acc[c], gate_factor), gate_bias);
    const float up = __fadd_rn(__fmul_rn(acc[2 + c], up_factor), up_bias);
    v[c] = activate(shape, gate, up);
  }
  return transpose_8x8(pack_bf16(v[0], v[1]));
}
/// An expert's share of two adjacent channels.
__device__ __forceinline__ float2 weighted_pair(float low, float high, float factor,
                                                const float (&bias)[2], float router) {
  low = __fadd_rn(__fmul_rn(low, factor), bias[0]);
  high = __fadd_rn(__fmul_rn(high, factor), bias[1]);
  return make_float2(__fmul_rn(low, router), __fmul_rn(high, router));
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
  // Rows begin at a multiple of 8: all of the lane's are swizzled alike.
  const int unit = 4 * static_cast<int>(block % 2) + warp;
  uint8_t* out =
      args.work.h + chunk_offset(args.work.capacity, block / 2, row_begin + g, unit) + 4 * t;
#pragma unroll
  for (int i = 0; i < kRegisters / 4; ++i) {
    const uint32_t channels =
        activated_channels(args.shape, acc + 4 * i, gate_factor, up_factor, gate_bias, up_bias);
    if (8 * i + g < rows) *reinterpret_cast<uint32_t*>(out + 8 * kRowBytes * i) = channels;
  }
}

/// Where several experts are added, their shares are rounded to BF16 first: they are half of all
/// bytes of a layer of many tokens and few weights.
__device__ __forceinline__ float2 rounded_pair(float2 share) {
  return __bfloat1622float2(__float22bfloat162_rn(share));
}

/// Where a row's share goes, in units of 8 bytes (check() in moe_layer.cu: they suffice), and its
/// router weight.
struct alignas(8) RowTarget {
  uint32_t unit;
  float router;
};
/// To the workspace's shares (BF16) or, if a token has one expert alone, to y.
__device__ __forceinline__ RowTarget row_target(const StreamArgs& args, int slot) {
  const int64_t row_bytes = args.shape.hidden * (args.y == nullptr ? 2 : 4);
  return {static_cast<uint32_t>(slot * row_bytes / 8),
          args.router_weights == nullptr ? 1.0f : args.router_weights[slot]};
}

/// Second product: a lane holds two adjacent channels of each token.
template <int kRegisters>
__device__ __forceinline__ void store_weighted(const StreamArgs& args,
                                               const float (&acc)[kRegisters], int expert,
                                               float factor, int64_t block, int rows, int warp,
                                               int lane, const RowTarget* targets) {
  const int g = lane / 4, t = lane % 4;
  const int64_t channel = packed_row(Product::kDown, block, warp, g, 0);
  if (channel >= args.shape.hidden) return;
  float bias[2] = {0.0f, 0.0f};
  if (args.weights.down_bias != nullptr) {
    bias[0] = args.weights.down_bias[expert * args.shape.hidden + channel];
    bias[1] = args.weights.down_bias[expert * args.shape.hidden + channel + 1];
  }
  auto for_each_row = [&](auto store) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 8 * i + 2 * t + c;
        const RowTarget target = targets[row];  // behind the tile's rows: anything
        const float2 share =
            weighted_pair(acc[4 * i + c], acc[4 * i + 2 + c], factor, bias, target.router);
        if (row < rows) store(int64_t{8} * target.unit, share);
      }
    }
  };
  if (args.y == nullptr) {
    uint8_t* shares = reinterpret_cast<uint8_t*>(args.work.shares + channel);
    for_each_row([&](int64_t at, float2 share) {
      *reinterpret_cast<uint32_t*>(shares + at) = pack_bf16(share.x, share.y);
    });
    return;
  }
  uint8_t* y = reinterpret_cast<uint8_t*>(args.y + channel);
  const uint8_t* add = reinterpret_cast<const uint8_t*>(args.add + channel);
  for_each_row([&](int64_t at, float2 share) {
    if (args.add != nullptr) {
      const float2 more = *reinterpret_cast<const float2*>(add + at);
      share = make_float2(__fadd_rn(share.x, more.x), __fadd_rn(share.y, more.y));
    }
    *reinterpret_cast<float2*>(y + at) = share;
  });
}

}  // namespace nibble::kernels::cuda
