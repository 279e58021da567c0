// Router on an NVIDIA GPU: FP32 logits and the choice of experts, one kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "formats/block_format.h"
#include "kernels/cuda/rows.h"
#include "kernels/router/router.h"

namespace nibble::kernels::cuda {

/// Router matrix on the device as the checkpoint stores it: [experts, hidden] row-major, BF16 or
/// F32, 16-byte aligned; hidden is a multiple of 4 up to 2^18.
struct RouterWeight {
  formats::FormatId format = formats::FormatId::kF32;
  int64_t experts = 0, hidden = 0;
  const void* rows = nullptr;
  const float* bias = nullptr;  // FP32 [experts] added to the logits, or null (device)
};

/// Device bytes of route()'s scratch for up to max_rows rows. It holds counters: the caller zeroes
/// it once; every call leaves the counters zero. Calls that run one after another may share it.
int64_t router_scratch_bytes(int64_t max_rows, int64_t experts);

/// x [rows, hidden] FP32, row stride x_stride elements (0: hidden; a multiple of 4) -> ids
/// [rows, top_k] ascending within a row and weights [rows, top_k], all on the device. The meaning
/// of `params`, ties, NaN and order are those of kernels::route; params.correction_bias is DEVICE
/// memory. rows is at most 65536. logits: where to put [rows, experts] FP32, or null (scratch is
/// used).
///
/// The matrix, its bias and the correction bias may be read before the stream's previous kernel has
/// ended: synchronise once between writing and using them.
///
/// Queues one kernel; no allocation, no host synchronisation, safe to capture.
///
/// Numerics: a logit is an FP32 dot product. The columns are cut in four quarters of whole steps of
/// 128; in a quarter 32 partial sums (columns 4 l .. 4 l + 3 of every step to partial sum l) of
/// fused multiply-adds in ascending order; then the quarters are added, then the 32 as a fixed
/// tree. A row's bits depend on that row alone. |logit - exact| <= (hidden / 128 + 12) 2^-24 sum |w
/// x|.
///
/// Errors: kInvalidArgument (sizes, null pointer), kUnsupported (format), kInternal (launch).
Result<void> route(const RouterWeight& weight, const RouterParams& params, const float* x,
                   int64_t x_stride, int64_t rows, void* scratch, int32_t* ids, float* weights,
                   cudaStream_t stream, float* logits = nullptr);

/// How norm_route() runs; the result's bits do not depend on it. kAuto is kFused where that can be.
enum class NormRoutePath : uint8_t { kAuto, kTwoKernels, kFused };

/// add_rms_norm(norm) and route() of its FP32 result, same bits. kFused: one kernel for up to 16
/// rows of up to 4096 columns (from Hopper on, where its shared memory fits), otherwise the two.
/// norm.hidden is the matrix's. norm.normed_f32 is needed and holds anything afterwards.
/// norm.weight, like the matrix and its biases, may be read before the stream's previous kernel has
/// ended.
Result<void> norm_route(const AddRmsNormArgs& norm, const RouterWeight& weight,
                        const RouterParams& params, void* scratch, int32_t* ids, float* weights,
                        cudaStream_t stream, NormRoutePath path = NormRoutePath::kAuto);
/// Shared memory of a CTA of the fused kernel without clusters of 16, by the matrix's format.
int64_t norm_route_bytes(formats::FormatId format, int64_t hidden, int64_t experts);

}  // namespace nibble::kernels::cuda
