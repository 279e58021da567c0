// RMSNorm over the hidden size, alone or fused with the residual addition before it.
#pragma once

#include <cstdint>

#include "kernels/exec.h"

namespace nibble::kernels {

/// out[t, :] = x[t, :] * rsqrt(mean(x[t, :]^2) + eps) * weight. x, out [rows, n], may be equal.
/// The mean is summed over 16 interleaved partial sums, combined in a fixed order: same bits on
/// every ISA. Source: RMSNorm as Hugging Face transformers computes it (FP32).
void rms_norm(const Exec& exec, const float* x, int64_t rows, int64_t n, const float* weight,
              float eps, float* out);

/// residual += delta, then out = rms_norm(residual). All [rows, n]; out must not overlap the
/// others.
void add_rms_norm(const Exec& exec, float* residual, const float* delta, int64_t rows, int64_t n,
                  const float* weight, float eps, float* out);

/// residual += delta.
void add(const Exec& exec, float* residual, const float* delta, int64_t count);

}  // namespace nibble::kernels
