// Internal to attention: what its kernels are told, and how they are found by head size and format.
#pragma once

#include "kernels/cuda/attention.h"

namespace nibble::kernels::cuda {

constexpr int kRowHeads = 16;      // query heads of one unit of the rows kernel, at most
constexpr int kTileQueries = 128;  // (row, head) pairs of one CTA of the tiles kernel
constexpr int kMaxSplitCounters = 1024;

struct AttentionLaunch {
  const uint16_t* q = nullptr;
  uint16_t* out = nullptr;
  KvCache cache;
  StepView step;
  int64_t layer = 0;
  int heads = 0, group = 0;      // group: query heads of a KV head
  float factor = 0.0f;           // scale * log2(e)
  AttentionPrepareArgs prepare;  // of the fused rows kernel
  int few_rows = 1;              // sequences of at most so many rows are the rows kernel's

  // Rows kernel. A unit is up to 16 heads of one KV head, times `unit_blocks` blocks of one row.
  bool by_sequence = false;  // row units are [sequences][few_rows]; otherwise [rows]
  int row_units = 0;
  int parts = 1;        // units that a KV head's query heads are cut into
  int unit_blocks = 1;  // 1 or 8
  int splits = 0;       // units of a row that partial results have room for; a row with more is one
  int* counters = nullptr;         // [row_units * kv_heads * parts], zero between launches
  float* partial = nullptr;        // [row_units][splits][heads][head_dim]
  float2* partial_sums = nullptr;  // the same without head_dim: maximum, sum
  int processors = 0;              // of the GPU
  int ctas = 0;  // of a cluster, which takes a row's heads of one part (splits: blocks, at most)

  // Tiles kernel.
  int tile_rows = 1;  // step rows of a tile: tile_rows * group <= kTileQueries
};

/// The kernels of one head size and format. blocks: CTAs. fused: the rows kernel that prepares q, k
/// and v itself, for steps of one row a sequence. clusters: the same by clusters of CTAs, or null.
struct AttentionKernels {
  cudaError_t (*rows)(const AttentionLaunch& launch, int blocks, cudaStream_t stream) = nullptr;
  cudaError_t (*fused)(const AttentionLaunch& launch, int blocks, cudaStream_t stream) = nullptr;
  cudaError_t (*tiles)(const AttentionLaunch& launch, int blocks, cudaStream_t stream) = nullptr;
  cudaError_t (*clusters)(const AttentionLaunch& launch, int blocks, cudaStream_t stream) = nullptr;
};
/// The contract of attention_prepare.
Result<void> check_prepare(const AttentionPrepareArgs& args, const KvCache& cache,
                           const StepView& step);

/// Null functions: no such head size.
AttentionKernels attention_kernels_bf16(int64_t head_dim);
AttentionKernels attention_kernels_bf16_wide(int64_t head_dim);
AttentionKernels attention_kernels_fp8(int64_t head_dim);
AttentionKernels attention_kernels_fp8_wide(int64_t head_dim);

}  // namespace nibble::kernels::cuda
