// One MoE feed-forward layer on an NVIDIA GPU: from hidden states and top-k choices to the weighted
// sum of the experts' outputs. Weights stay in their 4-bit (or 8-bit, or BF16) packed form
// (layout.h) and are expanded in registers; activations are BF16, sums FP32.
//
// Left to others: router logits and top-k, shared experts, loading.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

enum class Activation : uint8_t {
  kSilu,       // silu(gate) * up
  kGptOss,     // gate <= limit, |up| <= limit: (up + 1) * gate * sigmoid(alpha * gate)
  kSiluLimit,  // silu(min(gate, limit)) * clamp(up, -limit, limit)
};

/// What does not change from step to step.
struct MoeShape {
  FormatId format = FormatId::kNvfp4;  // of gate, up and down of every expert
  int64_t experts = 0, hidden = 0, inter = 0, top_k = 0;
  Activation activation = Activation::kSilu;
  float limit = 0.0f, alpha = 1.0f;
};

/// Packed weights of all experts, on the device (packing.h). The factors are FP32 [experts]: what
/// an accumulator is multiplied with, that is the matrix's global scale times register_unit().
/// Biases are FP32 [experts, inter], [experts, inter] and [experts, hidden], or null.
struct MoeWeights {
  const std::byte* gate_up = nullptr;  // [experts][packed_bytes(kGateUp)]
  const std::byte* down = nullptr;     // [experts][packed_bytes(kDown)]
  const float* gate_factor = nullptr;
  const float* up_factor = nullptr;
  const float* down_factor = nullptr;
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;
};

/// All pointers are device memory, 16-byte aligned. y must not overlap x.
struct MoeArgs {
  const void* x = nullptr;  // [tokens, hidden] BF16
  int64_t tokens = 0;
  const int32_t* ids = nullptr;    // [tokens, top_k], each in [0, experts)
  const float* weights = nullptr;  // [tokens, top_k]
  void* y = nullptr;               // [tokens, hidden] BF16
};

/// Which kernel geometry runs; kAuto picks by the mean number of rows an expert gets. The result's
/// bits do not depend on it.
enum class Geometry : uint8_t { kAuto, kNarrow, kWide };

/// Device bytes that moe_layer needs for up to `max_tokens` tokens. Host arithmetic.
int64_t moe_workspace_bytes(const MoeShape& shape, int64_t max_tokens);

/// Queues the layer on `stream` and returns: no allocation, no host synchronisation, safe to
/// capture. `workspace` is device memory of moe_workspace_bytes(shape, >= tokens), 256-byte
/// aligned; layers that run one after another may share it.
///
/// Numerics: weights exact; gate, up and down FP32 sums over K in one fixed order; the activation's
/// result rounded to BF16; y = BF16(sum over k, in the order of ids, of FP32(weight * down)). One
/// row's bits depend on that row alone: not on the batch, the geometry or the run. No float
/// atomics.
///
/// Errors: kInvalidArgument (shape, null pointer), kUnsupported (format or device), kInternal (the
/// launch failed); with the first two nothing was queued.
Result<void> moe_layer(const MoeShape& shape, const MoeWeights& weights, const MoeArgs& args,
                       void* workspace, cudaStream_t stream, Geometry geometry = Geometry::kAuto);

}  // namespace nibble::kernels::cuda
