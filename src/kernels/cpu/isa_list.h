// The ISAs this build contains. NIBBLE_FOR_EACH_ISA(X) expands X(namespace, device::Isa value) for
// each: use it to declare a function once per ISA and to pick one by `isa`.
#pragma once

#include "device/cpu.h"

#if defined(__x86_64__)
#define NIBBLE_FOR_EACH_ISA(X)              \
  X(scalar, ::nibble::device::Isa::kScalar) \
  X(avx2, ::nibble::device::Isa::kAvx2)     \
  X(avx512, ::nibble::device::Isa::kAvx512) \
  X(avx512_bf16, ::nibble::device::Isa::kAvx512Bf16)
#elif defined(__aarch64__)
#define NIBBLE_FOR_EACH_ISA(X)              \
  X(scalar, ::nibble::device::Isa::kScalar) \
  X(neon, ::nibble::device::Isa::kNeon)
#else
#define NIBBLE_FOR_EACH_ISA(X) X(scalar, ::nibble::device::Isa::kScalar)
#endif
