// Embedding and RMSNorm of rows: one CTA per row. The number of threads and the order of summation
// depend on the hidden size alone.
#include <cuda_fp16.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/norm_row.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kMaxQuads = 8;  // float4 of a row that a thread holds, at most
constexpr int kEmbedThreads = 256;

__global__ void __launch_bounds__(kEmbedThreads)
    embed_kernel(const EmbedTable table, const StepView step, const int32_t* drawn, float* out) {
  const int64_t row = blockIdx.x;
  wait_for_previous_kernel();
  // Not sooner: kernels behind this one read the step's facts before they wait (step_copy.h).
  allow_next_kernel();
  int64_t token = step.tokens[row];
  if (token < 0 && drawn != nullptr) token = drawn[-1 - token];
  const bool good = step.positions[row] >= 0 && token >= 0 && token < table.vocab;
  float4* to = reinterpret_cast<float4*>(out + row * table.hidden);
  for (int64_t i = threadIdx.x; i < table.hidden / 4; i += kEmbedThreads) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const int64_t at = token * (table.hidden / 4) + i;
    if (good && table.format == formats::FormatId::kF32) {
      v = static_cast<const float4*>(table.data)[at];
    } else if (good) {
      const uint2 bits = static_cast<const uint2*>(table.data)[at];
      float2 low, high;
      if (table.format == formats::FormatId::kBf16) {
        low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
        high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
      } else {
        low = __half22float2(*reinterpret_cast<const __half2*>(&bits.x));
        high = __half22float2(*reinterpret_cast<const __half2*>(&bits.y));
      }
      v = make_float4(low.x, low.y, high.x, high.y);
    }
    to[i] = v;
  }
}

struct NormLaunch {
  const float* residual;
  float* residual_out;  // null: the sum is not stored
  const float* delta;
  const int32_t* rows;  // null: row i of the output is row i
  int64_t hidden;
  const float* weight;
  float eps;
  __nv_bfloat16* normed;
  float* normed_f32;
};

template <int kQuads>
__global__ void __launch_bounds__(kMaxNormThreads) norm_kernel(const NormLaunch a) {
  __shared__ float shared[32];
  const int quads = static_cast<int>(a.hidden / 4), threads = static_cast<int>(blockDim.x);
  const int tid = static_cast<int>(threadIdx.x);
  float4 weight[kQuads];  // known before the step: read while the kernel before runs
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int at = tid + i * threads;
    if (at < quads) weight[i] = reinterpret_cast<const float4*>(a.weight)[at];
  }
  allow_next_kernel();  // first: the next product's weights are known, too
  wait_for_previous_kernel();
  const int64_t out_row = blockIdx.x;
  const int64_t row = a.rows == nullptr ? out_row : a.rows[out_row];
  float4 x[kQuads];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int at = tid + i * threads;
    x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at >= quads || row < 0) continue;
    x[i] = reinterpret_cast<const float4*>(a.residual + row * a.hidden)[at];
    if (a.delta != nullptr) {
      x[i] = add4(x[i], reinterpret_cast<const float4*>(a.delta + row * a.hidden)[at]);
      if (a.residual_out != nullptr) {
        reinterpret_cast<float4*>(a.residual_out + row * a.hidden)[at] = x[i];
      }
    }
    sum = add_squares(sum, x[i]);
  }
  const float inverse = inverse_norm(block_sum(sum, threads / 32, shared), a.hidden, a.eps);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int at = tid + i * threads;
    if (at >= quads) continue;
    float4 v = scale4(x[i], inverse, weight[i]);
    if (row < 0) v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    reinterpret_cast<uint2*>(a.normed + out_row * a.hidden)[at] = bf16_quad(v);
    if (a.normed_f32 != nullptr) {
      reinterpret_cast<float4*>(a.normed_f32 + out_row * a.hidden)[at] = v;
    }
  }
}

Result<void> launched(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  return Error(Code::kInternal, cat(what, ": ", cudaGetErrorString(error)));
}

Result<void> launch_norm(const char* what, const NormLaunch& a, int64_t rows, cudaStream_t stream) {
  const int64_t quads = a.hidden / 4;
  if (rows < 1 || a.hidden < 4 || a.hidden % 4 != 0 || quads > kMaxNormThreads * kMaxQuads ||
      a.residual == nullptr || a.weight == nullptr || a.normed == nullptr) {
    return Error(Code::kInvalidArgument,
                 cat(what, ": rows ", rows, ", hidden ", a.hidden, " (a multiple of 4 up to ",
                     4 * kMaxNormThreads * kMaxQuads, "), or a required pointer is null"));
  }
  const int threads = norm_threads(static_cast<int>(quads));
  const int64_t each = (quads + threads - 1) / threads;
  const auto kernel = each == 1   ? norm_kernel<1>
                      : each == 2 ? norm_kernel<2>
                      : each <= 4 ? norm_kernel<4>
                                  : norm_kernel<kMaxQuads>;
  return launched(what, launch_overlapped(kernel, static_cast<int>(rows), threads, 0, stream, a));
}

}  // namespace

Result<void> embed(const EmbedTable& table, const StepView& step, const int32_t* drawn, float* out,
                   cudaStream_t stream) {
  using formats::FormatId;
  if (table.data == nullptr || out == nullptr || step.tokens == nullptr ||
      step.positions == nullptr || step.rows < 1 || table.vocab < 1 || table.hidden < 8 ||
      table.hidden % 8 != 0) {
    return Error(Code::kInvalidArgument,
                 cat("embed: rows ", step.rows, ", vocab ", table.vocab, ", hidden ", table.hidden,
                     " (a multiple of 8), or a required pointer is null"));
  }
  if (table.format != FormatId::kF32 && table.format != FormatId::kF16 &&
      table.format != FormatId::kBf16) {
    return Error(Code::kUnsupported, "embed: the table must be F32, F16 or BF16");
  }
  return launched("embed", launch_overlapped(embed_kernel, step.rows, kEmbedThreads, 0, stream,
                                             table, step, drawn, out));
}

Result<void> add_rms_norm(const AddRmsNormArgs& args, cudaStream_t stream) {
  return launch_norm("add_rms_norm",
                     {.residual = args.residual,
                      .residual_out = args.residual,
                      .delta = args.delta,
                      .rows = nullptr,
                      .hidden = args.hidden,
                      .weight = args.weight,
                      .eps = args.eps,
                      .normed = static_cast<__nv_bfloat16*>(args.normed),
                      .normed_f32 = args.normed_f32},
                     args.rows, stream);
}

Result<void> gather_rms_norm(const GatherRmsNormArgs& args, cudaStream_t stream) {
  if (args.rows == nullptr) {
    return Error(Code::kInvalidArgument, "gather_rms_norm: the list of rows is null");
  }
  return launch_norm("gather_rms_norm",
                     {.residual = args.residual,
                      .residual_out = nullptr,
                      .delta = args.delta,
                      .rows = args.rows,
                      .hidden = args.hidden,
                      .weight = args.weight,
                      .eps = args.eps,
                      .normed = static_cast<__nv_bfloat16*>(args.normed),
                      .normed_f32 = args.normed_f32},
                     args.count, stream);
}

}  // namespace nibble::kernels::cuda
