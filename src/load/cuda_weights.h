// A model's weights on one NVIDIA GPU, as its graph wants them. Immutable once loaded.
#pragma once

#include <cstdint>
#include <vector>

#include "device/memory.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/moe_layer.h"
#include "kernels/cuda/router.h"
#include "kernels/cuda/rows.h"

namespace nibble::load {

/// q, k and v, stacked where their formats allow it; `column` is the place in [q | k | v].
struct CudaQkvPart {
  kernels::cuda::LinearWeight weight;
  int64_t column = 0;
};

struct CudaLayer {
  const float* input_norm = nullptr;
  const float* post_norm = nullptr;
  const float* q_norm = nullptr;  // or null
  const float* k_norm = nullptr;
  std::vector<CudaQkvPart> qkv;
  kernels::cuda::LinearWeight o;
  bool routed = false, has_mlp = false;
  kernels::cuda::MoeWeights mlp;  // the dense layer's, or the shared expert; has_mlp
  int64_t mlp_inter = 0;
  kernels::cuda::RouterWeight router;  // of a routed layer
  const float* correction_bias = nullptr;
  std::vector<kernels::cuda::MoeWeights> groups;
  const int32_t* rank = nullptr;  // with several groups
};

/// Device memory in pieces: big planes of their own, floats and tables out of common blocks.
struct CudaWeights {
  int device = 0;
  kernels::cuda::EmbedTable embedding;
  kernels::cuda::LinearWeight head;
  const float* final_norm = nullptr;
  std::vector<CudaLayer> layers;
  std::vector<device::Memory> memory;
  int64_t bytes = 0;
};

}  // namespace nibble::load
