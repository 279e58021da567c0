// One MoE (or dense) feed-forward layer on an NVIDIA GPU: from hidden states and top-k choices to
// the weighted sum of the experts' outputs. Weights stay in their packed form (layout.h), plain or
// with compressed scales, and are expanded in registers; activations are BF16, sums FP32.
//
// Left to others: router logits and top-k, loading, packing (packing.h), compressing
// (csf_encode.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

enum class Activation : uint8_t {
  kSilu,       // silu(gate) * up
  kGptOss,     // gate <= limit, |up| <= limit: (up + 1) * gate * sigmoid(alpha * gate)
  kSiluLimit,  // silu(min(gate, limit)) * clamp(up, -limit, limit)
};

/// What does not change from step to step. A dense MLP or a shared expert is a layer with
/// experts = 1, top_k = 1 and MoeArgs::ids = null.
struct MoeShape {
  int64_t experts = 0, hidden = 0, inter = 0, top_k = 0;
  Activation activation = Activation::kSilu;
  float limit = 0.0f, alpha = 1.0f;
};

/// One projection's packed matrices of all experts of a group: gate and up together (which must
/// have one format) or down.
struct ExpertMatrices {
  FormatId format = FormatId::kNvfp4;
  ScaleForm scale_form = ScaleForm::kPlain;
  const std::byte* tiles = nullptr;  // [experts][packed_bytes]
  /// Compressed scales' exceptions (csf_index.h); with ScaleForm::kCsf.
  const uint32_t* exceptions = nullptr;
  uint16_t levels[8] = {};  // NF3: BF16 bits, ascending
};

/// Packed weights of a group of experts, on the device. The factors are FP32 [experts]: what an
/// accumulator is multiplied with, that is the matrix's global scale times register_unit() (for
/// biased NF3 also 2^-bias). Biases are FP32 [experts, inter], [experts, inter] and [experts,
/// hidden], or null.
struct MoeWeights {
  int64_t experts = 0;  // of this group
  ExpertMatrices gate_up, down;
  const float* gate_factor = nullptr;
  const float* up_factor = nullptr;
  const float* down_factor = nullptr;
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;
};

/// Experts of a layer in up to kMaxGroups groups of different formats. With one group the map is
/// null. Otherwise rank[e] (device, [shape.experts]) numbers the experts group by group: expert
/// e is number rank[e] - (experts of the groups before) of its group.
constexpr int kMaxGroups = 4;
struct MoeGroups {
  std::span<const MoeWeights> groups;
  const int32_t* rank = nullptr;
};

/// All pointers are device memory, 16-byte aligned. y must not overlap x; it may be `add`.
struct MoeArgs {
  const void* x = nullptr;  // [tokens, hidden] BF16
  int64_t tokens = 0;
  const int32_t* ids = nullptr;    // [tokens, top_k], each in [0, experts); null: dense
  const float* weights = nullptr;  // [tokens, top_k]; null if dense (weight 1)
  const float* add = nullptr;      // [tokens, hidden] or null: added last (shared expert, residual)
  float* y = nullptr;              // [tokens, hidden]
};

/// Which kernels run; kAuto picks by the number of tokens and the device. The result's bits do not
/// depend on it.
enum class Geometry : uint8_t {
  kAuto,
  kFew,     // up to 8 tokens and 32 slots of one group, whose matrices are packed alike
  kSlices,  // kFew, a few tokens after the other: all that GPUs without bulk copies (8.x) can do
  kSmall,   // kNarrow within 99 KiB of shared memory a CTA (compute capability 12.x)
  kNarrow,
  kWide,  // wgmma: Hopper
};

constexpr int64_t kMoeZeroedBytes = 256;
/// Device bytes that moe_layer needs for up to `max_tokens` tokens. Host arithmetic.
int64_t moe_workspace_bytes(const MoeShape& shape, int64_t max_tokens);

/// Queues the layer on `stream` and returns: no allocation, no host synchronisation, safe to
/// capture. `workspace` is device memory of moe_workspace_bytes(shape, >= tokens), 256-byte
/// aligned; its first kMoeZeroedBytes must be zero before the first use and are zero after every
/// call. Layers of any shape that run one after another may share it.
///
/// Numerics: weights exact (NF3: level * scale rounded to BF16 once); gate, up and down FP32 sums
/// over K in one fixed order; the activation's result rounded to BF16; y = (FP32 sum over k, in the
/// order of ids, of weight * down, rounded to BF16 if top_k > 1) + add. One row's bits depend on
/// that row alone: not on the batch, the geometry, the form of the scales or the run. No float
/// atomics.
///
/// Errors: kInvalidArgument (shape, null pointer, a geometry that does not take this layer),
/// kUnsupported (format or device; gate and up of different formats have no form here at all),
/// kInternal (the launch failed); with the first two nothing was queued.
Result<void> moe_layer(const MoeShape& shape, const MoeGroups& weights, const MoeArgs& args,
                       void* workspace, cudaStream_t stream, Geometry geometry = Geometry::kAuto);

/// Whether such a GPU has kernels for a layer of this shape whose groups have these formats and
/// forms of scales (other members are not looked at). Errors: kUnsupported with the reason.
Result<void> moe_runs_on(const Gpu& gpu, const MoeShape& shape, std::span<const MoeWeights> groups);

}  // namespace nibble::kernels::cuda
