// Causal grouped-query attention over paged keys and values on an NVIDIA GPU, for ragged batches
// that mix prefill chunks and decode rows; and what comes before it: head norms, RoPE, KV write.
//
// Nothing here allocates or synchronises; every launch is safe to capture. Contexts and pages are
// read from the StepView on the device at run time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "kernels/cuda/attention_pages.h"
#include "kernels/cuda/step_view.h"

namespace nibble::kernels::cuda {

/// q, k, v of a step: one FP32 row [heads * head_dim | kv_heads * head_dim | kv_heads * head_dim]
/// per step row, `row_stride` floats apart (biases already added).
struct AttentionPrepareArgs {
  const float* qkv = nullptr;
  int64_t row_stride = 0;  // multiple of 4
  int64_t heads = 0;       // query heads; kv heads and head_dim are the cache's
  int64_t layer = 0;
  const float* q_norm = nullptr;  // [head_dim] weights of an RMSNorm per head, or null
  const float* k_norm = nullptr;
  float norm_eps = 1e-5f;
  int64_t rotary_dim = 0;           // even, <= head_dim; 0: no rotation
  const float* inv_freq = nullptr;  // [rotary_dim / 2], on the device
  bool interleaved = false;         // pairs (2i, 2i+1) instead of (i, i + rotary_dim / 2)
  float rope_scale = 1.0f;          // multiplies cos and sin
  void* q = nullptr;                // out: BF16 [rows, heads * head_dim]
};

/// Queues one kernel: optional head norms, RoPE (the angle is the FP32 product position * inv_freq;
/// norm and rotation in FP32), q rounded to BF16, k and v rounded to the cache's format (nearest
/// even; FP8 saturates) and written to their pages. Rows of position -1 give q = 0 and touch no
/// page.
/// Errors: kInvalidArgument, kUnsupported (head_dim not one of 16, 32, 64, 96, 128, 192, 256),
/// kInternal (launch failed).
Result<void> attention_prepare(const AttentionPrepareArgs& args, const KvCache& cache,
                               const StepView& step, cudaStream_t stream);

/// Which kernels run; kAuto picks. The result's bits do not depend on it: the others are for tests.
/// kRowsByCluster is attention_step's alone, and fails where clusters cannot do the step; kAuto
/// does not take it until it has run in a whole model: so far it was checked by itself.
enum class AttentionPath : uint8_t {
  kAuto,
  kRowsByBlock,
  kRowsByGroup,
  kRowsWhole,
  kRowsByCluster,
  kTiles
};

/// What the launch may assume; the result's bits depend on none of it.
struct AttentionHint {
  int64_t max_context = 0;        // no row's position is beyond max_context - 1
  int64_t max_sequence_rows = 1;  // no sequence has more rows in this step; 1: decode only
  AttentionPath path = AttentionPath::kAuto;
};

struct AttentionArgs {
  const void* q = nullptr;  // BF16 [rows, heads * head_dim], from attention_prepare
  void* out = nullptr;      // BF16 [rows, heads * head_dim]
  int64_t heads = 0;        // a multiple of the cache's kv heads
  int64_t layer = 0;
  float scale = 1.0f;  // > 0
};

/// Bytes of scratch that attention() can use for such steps: at most about 64 MiB.
int64_t attention_scratch_bytes(const KvCache& cache, int64_t heads, int64_t max_rows,
                                int64_t max_context);

/// Queues one or two kernels. `scratch`: attention_scratch_bytes() device bytes, 256-byte aligned,
/// all zero before the first call; every call leaves it fit for the next. Calls that run one after
/// another may share it.
///
/// out[row, head] = softmax(scale * q . K) V over positions 0..own. Head h uses KV head
/// h / (heads / kv_heads). Rows of position -1 give zeros. Values must be finite.
///
/// Numerics, per (row, head): positions fall into blocks of 64 at absolute positions. A block's
/// scores are tensor-core sums over dims (BF16 products, FP32 sums); its weights are 2^(score - the
/// block's maximum), rounded to BF16, and its values and its sum of weights tensor-core sums over
/// positions. Blocks of a group (8 blocks, 512 positions) are folded in ascending order, then
/// groups in ascending order; out = values / sum, rounded to BF16. Every path does exactly this, so
/// that a row's bits depend on that row and its K and V alone.
///
/// Errors: kInvalidArgument, kUnsupported (head_dim), kInternal (launch failed).
Result<void> attention(const AttentionArgs& args, const KvCache& cache, const StepView& step,
                       const AttentionHint& hint, void* scratch, int64_t scratch_bytes,
                       cudaStream_t stream);

/// attention_prepare and attention of one step, same bits. With hint.max_sequence_rows 1 (decode)
/// it is one kernel, which copies keys and values of earlier positions while the kernels before it
/// still run, so: the step's facts and the pages of earlier positions must have been complete
/// before the first kernel of the step started (a copy in the stream, or its synchronisation, is
/// between). args.q must be prepare.q; the one kernel leaves it untouched.
Result<void> attention_step(const AttentionPrepareArgs& prepare, const AttentionArgs& args,
                            const KvCache& cache, const StepView& step, const AttentionHint& hint,
                            void* scratch, int64_t scratch_bytes, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
