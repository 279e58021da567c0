// y = W x + bias for one or several weight matrices that read the same x.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/exec.h"
#include "tensor/tensor_ref.h"

namespace nibble::kernels {

/// Scale columns of the widest matrix whose compressed scales (ScaleEncoding::kCsf) the kernels
/// read: one tile's scales are decoded to the stack, 16 bytes a column, right before the tile is
/// used.
constexpr int64_t kMaxCsfColumns = 4096;

struct MatmulJob {
  tensor::TensorRef w;          // [n, k], Layout::kTile16
  const float* bias = nullptr;  // [n] or null
  float* y = nullptr;           // [rows, n], row stride y_stride; must not overlap x
  int64_t y_stride = 0;
};

/// x [rows, k], row stride x_stride; every job's k is equal.
///
/// Numerics: each y[t, n] is reduced over k in one order that depends on nothing but the format and
/// the ISA class: group by group ascending, a group's products in ascending k (FP32 FMA from zero,
/// sub-block of 16 columns at a time), then y = fma(scale, group sum, y). So the bits do not depend
/// on rows, on the other rows, on tiles or on threads, and scalar, AVX2, AVX-512 and NEON agree bit
/// for bit with F32 activations. avx512_bf16 with kBf16 activations uses BF16 dot products instead:
/// its own order, equally fixed. |y - ref| <= k 2^-23 sum |x w| against formats::decode_rows.
/// kBf16 rounds x to BF16 first, but for F32 and F16 weights, which multiply with x as it is. BF16
/// dot products take a subnormal BF16 weight or x, and a subnormal partial sum, as zero.
void matmul(const Exec& exec, const float* x, int64_t x_stride, int64_t rows,
            std::span<const MatmulJob> jobs);

/// Scratch that matmul takes for these extents, at most.
int64_t matmul_workspace_bytes(int64_t rows, int64_t k, int threads);

}  // namespace nibble::kernels
