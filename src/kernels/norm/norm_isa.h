// Internal to norm and attention_prepare: the row kernels of rms_norm, one per ISA.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa_list.h"

namespace nibble::kernels {

/// x, out [rows, n] without gaps, may be equal; delta [rows, n] is added to x in place first, or
/// null (x is then only read).
struct RmsNormRows {
  float* x = nullptr;
  const float* delta = nullptr;
  const float* weight = nullptr;
  float* out = nullptr;
  int64_t rows = 0, n = 0;
  float eps = 0.0f;
};
using RmsNormRowsFn = void (*)(const RmsNormRows&);

#define NIBBLE_DECLARE(ns, isa)             \
  namespace ns {                            \
  void rms_norm_rows(const RmsNormRows& r); \
  }
NIBBLE_FOR_EACH_ISA(NIBBLE_DECLARE)
#undef NIBBLE_DECLARE

RmsNormRowsFn rms_norm_rows_kernel(device::Isa isa);

}  // namespace nibble::kernels
