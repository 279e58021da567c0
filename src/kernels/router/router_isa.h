// Internal to the router: logits to scores, one kernel per ISA.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa_list.h"

namespace nibble::kernels {

/// logits [n] -> scores [n], may be equal. A NaN logit gives a NaN score and is left out of the
/// softmax sum, so that it spoils no other score.
using ScoreFn = void (*)(const float* logits, int64_t n, float* scores);

#define NIBBLE_DECLARE(ns, isa)                                       \
  namespace ns {                                                      \
  void softmax_scores(const float* logits, int64_t n, float* scores); \
  void sigmoid_scores(const float* logits, int64_t n, float* scores); \
  }
NIBBLE_FOR_EACH_ISA(NIBBLE_DECLARE)
#undef NIBBLE_DECLARE

}  // namespace nibble::kernels
