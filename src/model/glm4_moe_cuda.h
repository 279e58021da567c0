// glm4_moe on one NVIDIA GPU: the graph of glm4_moe.cc with BF16 activations, in kernels that fuse
// what a GPU wants fused. Decode steps are captured once per size and replayed.
#pragma once

#include <memory>

#include "load/cuda_weights.h"
#include "model/model.h"

namespace nibble::model {

/// Keys and values are kept as `kv`: kBf16 or kFp8.
Result<std::unique_ptr<Model>> make_glm4_moe_cuda(const recipe::ModelConfig& config,
                                                  std::shared_ptr<const load::CudaWeights> weights,
                                                  kernels::KvType kv);

}  // namespace nibble::model
