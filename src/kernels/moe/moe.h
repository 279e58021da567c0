// The feed-forward block: routed experts, an optional shared expert, or (with neither router nor
// top-k) one dense MLP. Gate, up and down of every expert may each have another format.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/exec.h"
#include "tensor/tensor_ref.h"

namespace nibble::kernels {

enum class MlpActivation : uint8_t {
  kSilu,       // silu(gate) * up
  kGptOss,     // gate and up clamped at limit, (up + 1) * gate * sigmoid(alpha * gate)
  kSiluLimit,  // silu(min(gate, limit)) * clamp(up, -limit, limit)
};
struct MlpShape {
  MlpActivation activation = MlpActivation::kSilu;
  float limit = 0.0f, alpha = 1.0f;
};

/// One SwiGLU network: gate and up [intermediate, hidden], down [hidden, intermediate].
struct ExpertRef {
  tensor::TensorRef gate, up, down;
  const float* gate_bias = nullptr;  // [intermediate] or null, and so on
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;
};

struct MoeArgs {
  const float* x = nullptr;  // [tokens, hidden]
  int64_t tokens = 0, hidden = 0;
  std::span<const ExpertRef> experts;
  int64_t top_k = 0;
  const int32_t* ids = nullptr;  // [tokens, top_k], each in [0, experts.size()), distinct in a row
  const float* weights = nullptr;  // [tokens, top_k]
  const ExpertRef* shared =
      nullptr;  // added with weight 1 (or shared_weights), after the routed ones
  const float* shared_weights = nullptr;  // [tokens] or null
  MlpShape mlp;
  float* y = nullptr;  // [tokens, hidden], overwritten; must not overlap x
};

/// Numerics: both products as kernels::matmul, which rounds the intermediate to BF16 with kBf16
/// activations (but for F32 and F16 down weights); y[t] = sum over the row's experts in the order
/// of ids, then the shared expert, FP32. A row's result does not depend on the other rows or on
/// threads.
void moe(const Exec& exec, const MoeArgs& args);
/// For up to `tokens` tokens. max_intermediate: the largest intermediate size of any expert, the
/// shared one included.
int64_t moe_workspace_bytes(int64_t tokens, int64_t hidden, int64_t max_intermediate, int64_t top_k,
                            int64_t experts, int threads);

/// y = down(act(gate x) * up x) for one dense network: moe() with a single expert.
void mlp(const Exec& exec, const float* x, int64_t tokens, int64_t hidden, const ExpertRef& net,
         const MlpShape& shape, float* y);

}  // namespace nibble::kernels
