// Router logits to the chosen experts and their weights.
#pragma once

#include <cstdint>

#include "kernels/exec.h"

namespace nibble::kernels {

/// kSoftmax: softmax over all experts. kSigmoid: each expert alone. kSoftmaxSelected: the logits
/// choose, and the weights are a softmax over the chosen ones (gpt-oss; normalize has no effect).
enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kSoftmaxSelected };

constexpr int64_t kMaxRouterExperts = 1024, kMaxRouterTopK = 64, kMaxRouterGroups = 64;

struct RouterParams {
  RouterScore score = RouterScore::kSoftmax;
  int64_t experts = 0, top_k = 0;
  int64_t groups = 1, top_groups = 1;  // group score: sum of its two largest biased scores
  bool normalize = true;               // divide the chosen scores by their sum (+ 1e-20)
  float scaling = 1.0f;
  const float* correction_bias = nullptr;  // [experts], added for the choice only, or null
};

/// logits [rows, experts] -> ids [rows, top_k] ascending within a row, weights [rows, top_k] beside
/// them. FP32 throughout, same bits on every ISA.
///
/// The choice, best first: experts of the kept groups by biased score, then (only if those are
/// fewer than top_k) the other groups' experts, then experts whose logit or biased score is NaN.
/// Ties go to the lower id, between groups to the lower group. A NaN logit is left out of the
/// softmax sum; its own weight, should it be chosen, is NaN (with normalize the whole row's).
///
/// experts is a multiple of groups. Source: DeepSeek-V3, GLM-4.5, Qwen3 and gpt-oss routers as in
/// Hugging Face transformers, which masks the experts of dropped groups with -inf in some versions
/// and with score 0 in others; the two differ only where a kept biased score is negative, and this
/// is the former.
void route(const Exec& exec, const float* logits, int64_t rows, const RouterParams& params,
           int32_t* ids, float* weights);

}  // namespace nibble::kernels
