// Router logits to the chosen experts and their weights.
#pragma once

#include <cstdint>

#include "kernels/exec.h"

namespace nibble::kernels {

enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kSoftmaxSelected };

struct RouterParams {
  RouterScore score = RouterScore::kSoftmax;
  int64_t experts = 0, top_k = 0;
  int64_t groups = 1, top_groups = 1;  // group score: sum of its two largest biased scores
  bool normalize = true;               // divide the chosen scores by their sum (+ 1e-20)
  float scaling = 1.0f;
  const float* correction_bias = nullptr;  // [experts], added for the choice only, or null
};

/// logits [rows, experts] -> ids [rows, top_k] ascending within a row, weights [rows, top_k] beside
/// them. Ties go to the lower expert id. A NaN logit never wins over a number. FP32 throughout,
/// same bits on every ISA. Source: DeepSeek-V3 and GLM-4.5 routers as in Hugging Face transformers.
void route(const Exec& exec, const float* logits, int64_t rows, const RouterParams& params,
           int32_t* ids, float* weights);

}  // namespace nibble::kernels
