// What happens to q, k and v between their product and attention: head norm, RoPE, conversion, KV
// write. One warp per head of a row; the head lies in shared memory between the steps.
#include "kernels/cuda/attention_head.cuh"
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxHeadDim = 256;

__global__ void __launch_bounds__(kWarps * 32)
    prepare_kernel(const AttentionPrepareArgs args, const KvCache cache, const StepView step) {
  __shared__ float heads_of_warps[kWarps][kMaxHeadDim];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int heads = static_cast<int>(args.heads), kv_heads = static_cast<int>(cache.kv_heads);
  const int n = static_cast<int>(cache.head_dim);
  const int columns = (heads + 2 * kv_heads + kWarps - 1) / kWarps;
  const int row = static_cast<int>(blockIdx.x) / columns;
  const int head = static_cast<int>(blockIdx.x) % columns * kWarps + warp;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (head >= heads + 2 * kv_heads) return;
  const int position = step.positions[row];
  const bool query = head < heads, key = !query && head < heads + kv_heads;
  if (position < 0 && !query) return;

  float* x = heads_of_warps[warp];
  const float* from = args.qkv + row * args.row_stride + int64_t{head} * n;
  for (int d = 4 * lane; d < n; d += 128) {
    *reinterpret_cast<float4*>(x + d) = *reinterpret_cast<const float4*>(from + d);
  }
  __syncwarp();
  if (query || key) {
    const float* weight = query ? args.q_norm : args.k_norm;
    if (weight != nullptr) norm_head(x, weight, n, args.norm_eps, lane);
    for (int i = lane; i < args.rotary_dim / 2; i += 32) {
      rotate_pair(args, x, i, rope_angle(args, position, args.inv_freq[i]));
    }
    __syncwarp();
  }
  if (query) {
    auto* q = static_cast<__nv_bfloat16*>(args.q) + (int64_t{row} * heads + head) * n;
    for (int d = 2 * lane; d < n; d += 64) {
      *reinterpret_cast<__nv_bfloat162*>(q + d) =
          position < 0 ? __nv_bfloat162{} : __floats2bfloat162_rn(x[d], x[d + 1]);
    }
    return;
  }
  const int32_t page = step.page_table[int64_t{step.row_sequence[row]} * step.table_stride +
                                       position / kKvPageTokens];
  const int kv_head = (head - heads) % kv_heads;
  std::byte* plane = cache.data + cache.head_offset(args.layer, page, kv_head) +
                     (key ? 0 : cache.head_plane_bytes());
  for (int d = 2 * lane; d < n; d += 64) {
    write_page_pair(cache, plane, position % kKvPageTokens, d, x[d], x[d + 1]);
  }
}

}  // namespace

Result<void> check_prepare(const AttentionPrepareArgs& args, const KvCache& cache,
                           const StepView& step) {
  const int64_t n = cache.head_dim;
  if (args.qkv == nullptr || args.q == nullptr || cache.data == nullptr ||
      step.positions == nullptr || step.row_sequence == nullptr || step.page_table == nullptr ||
      (args.rotary_dim > 0 && args.inv_freq == nullptr)) {
    return Error(Code::kInvalidArgument, "attention_prepare: a required pointer is null");
  }
  if (n < 16 || n > kMaxHeadDim || n % 16 != 0) {
    return Error(Code::kUnsupported, cat("attention_prepare: heads of ", n, " dims"));
  }
  if (step.rows < 1 || args.heads < 1 || cache.kv_heads < 1 || args.layer < 0 ||
      args.layer >= cache.layers || args.row_stride % 4 != 0 ||
      args.row_stride < (args.heads + 2 * cache.kv_heads) * n || args.rotary_dim < 0 ||
      args.rotary_dim > n || args.rotary_dim % 2 != 0) {
    return Error(Code::kInvalidArgument,
                 cat("attention_prepare: rows ", step.rows, ", heads ", args.heads, " and ",
                     cache.kv_heads, " of ", n, " dims, row stride ", args.row_stride, ", rotary ",
                     args.rotary_dim, ", layer ", args.layer, " of ", cache.layers));
  }
  return {};
}

Result<void> attention_prepare(const AttentionPrepareArgs& args, const KvCache& cache,
                               const StepView& step, cudaStream_t stream) {
  NIBBLE_TRY(check_prepare(args, cache, step));
  const int64_t columns = (args.heads + 2 * cache.kv_heads + kWarps - 1) / kWarps;
  const cudaError_t error = launch_overlapped(prepare_kernel, static_cast<int>(step.rows * columns),
                                              kWarps * 32, 0, stream, args, cache, step);
  if (error != cudaSuccess) {
    return Error(Code::kInternal, cat("attention_prepare: ", cudaGetErrorString(error)));
  }
  return {};
}

}  // namespace nibble::kernels::cuda
