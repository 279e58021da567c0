// Host side of attention: checks, and which kernels run with how many CTAs.
//
// Rows of sequences with few rows in the step go to the rows kernel, the others to the tiles
// kernel. The rows kernel splits positions over CTAs: by block when that barely fills the GPU, by
// group of 8 blocks otherwise, not at all when partial results would not fit the scratch.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_kernels.h"
#include "kernels/cuda/gpu.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int64_t kGroup = 8;               // blocks, as in attention_tile.cuh
constexpr int64_t kFewRows = 16;            // of a sequence: more are worth a tile
constexpr int64_t kMaxSplitBlocks = 32;     // blocks of a row that are split one by one
constexpr int64_t kBlocksPerProcessor = 2;  // CTAs when split by block, at most
constexpr int64_t kUnitsPerProcessor = 8;   // CTAs of the rows kernel, at most
constexpr int64_t kMaxPartialBytes = int64_t{1} << 26;
constexpr int64_t kCounterBytes = kMaxSplitCounters * 4;
constexpr int64_t kWideCluster = 16, kNarrowCluster = 8;  // CTAs
constexpr int64_t kMaxClusterTurns = 4;                   // blocks of one CTA of a cluster
constexpr int64_t kMostProcessors = 256;                  // for sizing without a device

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t slot_bytes(int64_t heads, int64_t head_dim) { return heads * (head_dim + 2) * 4; }

AttentionKernels find_kernels(const KvCache& cache) {
  const bool bf16 = cache.format == KvFormat::kBf16;
  const AttentionKernels usual =
      bf16 ? attention_kernels_bf16(cache.head_dim) : attention_kernels_fp8(cache.head_dim);
  if (usual.rows != nullptr) return usual;
  return bf16 ? attention_kernels_bf16_wide(cache.head_dim)
              : attention_kernels_fp8_wide(cache.head_dim);
}

Result<void> check(const AttentionArgs& args, const KvCache& cache, const StepView& step,
                   const AttentionHint& hint, const void* scratch, int64_t scratch_bytes) {
  if (args.q == nullptr || args.out == nullptr || cache.data == nullptr || scratch == nullptr ||
      step.positions == nullptr || step.row_sequence == nullptr || step.page_table == nullptr ||
      step.seq_row_begin == nullptr) {
    return Error(Code::kInvalidArgument, "attention: a required pointer is null");
  }
  if (step.rows < 1 || step.sequences < 1 || hint.max_context < 1 || hint.max_sequence_rows < 1 ||
      args.layer < 0 || args.layer >= cache.layers || !(args.scale > 0.0f)) {
    return Error(Code::kInvalidArgument,
                 cat("attention: rows ", step.rows, ", sequences ", step.sequences, ", context ",
                     hint.max_context, ", rows a sequence ", hint.max_sequence_rows, ", layer ",
                     args.layer, " of ", cache.layers, ", scale ", args.scale));
  }
  if (cache.kv_heads < 1 || args.heads < 1 || args.heads % cache.kv_heads != 0 ||
      args.heads / cache.kv_heads > kTileQueries) {
    return Error(Code::kInvalidArgument,
                 cat("attention: ", args.heads, " heads for ", cache.kv_heads,
                     " KV heads; a multiple of up to ", kTileQueries, " is wanted"));
  }
  if (scratch_bytes < kCounterBytes) {
    return Error(Code::kInvalidArgument, cat("attention scratch of ", scratch_bytes, " bytes"));
  }
  return {};
}

/// How the rows kernel cuts positions. Fills unit_blocks and splits; false: not with this scratch.
bool split_rows(AttentionLaunch& launch, int64_t unit_blocks, int64_t blocks,
                int64_t partial_bytes) {
  const int64_t columns = launch.cache.kv_heads * launch.parts;
  const int64_t splits = ceil_div(blocks, unit_blocks);
  if (launch.row_units * columns > kMaxSplitCounters ||
      launch.row_units * splits * slot_bytes(launch.heads, launch.cache.head_dim) > partial_bytes) {
    return false;
  }
  launch.unit_blocks = static_cast<int>(unit_blocks);
  launch.splits = static_cast<int>(splits);
  return true;
}

/// Row units and their splits. false: a forced path does not fit.
bool plan_rows(AttentionLaunch& launch, const AttentionHint& hint, int64_t partial_bytes,
               int64_t processors) {
  const int64_t blocks = ceil_div(hint.max_context, kKvPageTokens);
  const int64_t columns = launch.cache.kv_heads * launch.parts;
  launch.row_units = launch.step.rows;
  switch (hint.path) {
    case AttentionPath::kRowsByBlock: return split_rows(launch, 1, blocks, partial_bytes);
    case AttentionPath::kRowsByGroup: return split_rows(launch, kGroup, blocks, partial_bytes);
    case AttentionPath::kRowsWhole:
    case AttentionPath::kTiles: return true;
    case AttentionPath::kRowsByCluster: return false;
    case AttentionPath::kAuto: break;
  }
  if (hint.max_sequence_rows > 1) {
    launch.by_sequence = true;
    launch.few_rows = static_cast<int>(std::min(kFewRows, hint.max_sequence_rows));
    if (launch.step.sequences * launch.few_rows * columns > kMaxSplitCounters) launch.few_rows = 1;
    launch.row_units = launch.step.sequences * launch.few_rows;
  }
  if (blocks == 1) return true;
  if (blocks <= kMaxSplitBlocks &&
      launch.row_units * columns * blocks <= kBlocksPerProcessor * processors &&
      split_rows(launch, 1, blocks, partial_bytes)) {
    return true;
  }
  if (blocks > kGroup) split_rows(launch, kGroup, blocks, partial_bytes);
  return true;
}

/// Clusters for a fused decode step. Fills ctas and splits; false: not with clusters.
bool plan_clusters(AttentionLaunch& launch, const AttentionHint& hint, int64_t clusters,
                   int64_t processors) {
  const bool automatic = hint.path == AttentionPath::kAuto;
  if (!automatic && hint.path != AttentionPath::kRowsByCluster) return false;
  const int64_t blocks = ceil_div(hint.max_context, kKvPageTokens);
  for (const int64_t ctas : {kWideCluster, kNarrowCluster}) {
    if (automatic && clusters * ctas > kBlocksPerProcessor * processors) continue;
    if (ctas == kWideCluster && blocks <= kNarrowCluster) continue;
    if (blocks > ctas * kMaxClusterTurns) continue;
    launch.ctas = static_cast<int>(ctas);
    launch.splits = static_cast<int>(blocks);
    launch.processors = static_cast<int>(processors);
    return true;
  }
  return false;
}

Result<void> launch_attention(const AttentionArgs& args, const AttentionPrepareArgs* fused,
                              const KvCache& cache, const StepView& step, const AttentionHint& hint,
                              void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
  NIBBLE_TRY(check(args, cache, step, hint, scratch, scratch_bytes));
  const AttentionKernels kernels = find_kernels(cache);
  if (kernels.rows == nullptr) {
    return Error(Code::kUnsupported, cat("attention with heads of ", cache.head_dim,
                                         " dims: 16, 32, 64, 96, 128, 192 and 256 have kernels"));
  }
  NIBBLE_TRY(const Gpu gpu, current_gpu());

  AttentionLaunch launch;
  launch.q = static_cast<const uint16_t*>(args.q);
  launch.out = static_cast<uint16_t*>(args.out);
  launch.cache = cache;
  launch.step = step;
  launch.layer = args.layer;
  launch.heads = static_cast<int>(args.heads);
  launch.group = static_cast<int>(args.heads / cache.kv_heads);
  launch.factor = static_cast<float>(static_cast<double>(args.scale) * 1.4426950408889634);
  if (fused != nullptr) launch.prepare = *fused;
  launch.parts = static_cast<int>(ceil_div(launch.group, kRowHeads));
  launch.tile_rows = kTileQueries / launch.group;
  const int64_t clusters = step.rows * cache.kv_heads * launch.parts;
  if (fused != nullptr && kernels.clusters != nullptr && gpu.has_large_shared() &&
      plan_clusters(launch, hint, clusters, gpu.processors)) {
    const cudaError_t error =
        kernels.clusters(launch, static_cast<int>(clusters * launch.ctas), stream);
    if (error != cudaSuccess) {
      return Error(Code::kInternal, cat("attention: ", cudaGetErrorString(error)));
    }
    return {};
  }
  if (!plan_rows(launch, hint, scratch_bytes - kCounterBytes, gpu.processors)) {
    return Error(Code::kInvalidArgument,
                 cat("attention: ", step.rows, " rows of context ", hint.max_context,
                     " cannot be split with ", scratch_bytes, " bytes of scratch"));
  }
  auto* base = static_cast<std::byte*>(scratch);
  launch.counters = reinterpret_cast<int*>(base);
  launch.partial = reinterpret_cast<float*>(base + kCounterBytes);
  launch.partial_sums = reinterpret_cast<float2*>(
      launch.partial + int64_t{launch.row_units} * launch.splits * launch.heads * cache.head_dim);

  const bool automatic = hint.path == AttentionPath::kAuto;
  const bool tiles_only = hint.path == AttentionPath::kTiles ||
                          (automatic && step.sequences == 1 && hint.max_sequence_rows > 1 &&
                           step.rows > launch.few_rows);
  if (!tiles_only) {
    const int64_t units =
        int64_t{std::max(launch.splits, 1)} * launch.row_units * cache.kv_heads * launch.parts;
    const auto rows = fused == nullptr ? kernels.rows : kernels.fused;
    const cudaError_t error = rows(
        launch, static_cast<int>(std::min<int64_t>(units, kUnitsPerProcessor * gpu.processors)),
        stream);
    if (error != cudaSuccess) {
      return Error(Code::kInternal, cat("attention: ", cudaGetErrorString(error)));
    }
  }
  if (tiles_only || (automatic && hint.max_sequence_rows > launch.few_rows)) {
    if (tiles_only) launch.few_rows = 0;
    const int64_t tiles = step.rows / launch.tile_rows + step.sequences;
    const cudaError_t error =
        kernels.tiles(launch, static_cast<int>(tiles * cache.kv_heads), stream);
    if (error != cudaSuccess) {
      return Error(Code::kInternal, cat("attention: ", cudaGetErrorString(error)));
    }
  }
  return {};
}

}  // namespace

int64_t attention_scratch_bytes(const KvCache& cache, int64_t heads, int64_t max_rows,
                                int64_t max_context) {
  const int64_t blocks = ceil_div(max_context, kKvPageTokens);
  const int64_t columns = cache.kv_heads * ceil_div(heads / cache.kv_heads, kRowHeads);
  const int64_t by_block = std::min(max_rows * std::min(blocks, kMaxSplitBlocks),
                                    kBlocksPerProcessor * kMostProcessors / columns);
  const int64_t by_group =
      std::min(max_rows * kFewRows, kMaxSplitCounters / columns) * ceil_div(blocks, kGroup);
  return kCounterBytes + std::min(kMaxPartialBytes, std::max<int64_t>({by_block, by_group, 1}) *
                                                        slot_bytes(heads, cache.head_dim));
}

Result<void> attention(const AttentionArgs& args, const KvCache& cache, const StepView& step,
                       const AttentionHint& hint, void* scratch, int64_t scratch_bytes,
                       cudaStream_t stream) {
  return launch_attention(args, nullptr, cache, step, hint, scratch, scratch_bytes, stream);
}

Result<void> attention_step(const AttentionPrepareArgs& prepare, const AttentionArgs& args,
                            const KvCache& cache, const StepView& step, const AttentionHint& hint,
                            void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
  NIBBLE_TRY(check_prepare(prepare, cache, step));
  if (args.heads != prepare.heads || args.layer != prepare.layer || args.q != prepare.q) {
    return Error(Code::kInvalidArgument, "attention_step: two different heads, layers or q");
  }
  if (hint.max_sequence_rows == 1 && hint.path != AttentionPath::kTiles) {
    return launch_attention(args, &prepare, cache, step, hint, scratch, scratch_bytes, stream);
  }
  NIBBLE_TRY(attention_prepare(prepare, cache, step, stream));
  return launch_attention(args, nullptr, cache, step, hint, scratch, scratch_bytes, stream);
}

}  // namespace nibble::kernels::cuda
