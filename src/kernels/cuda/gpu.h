// What a kernel's host side asks of the GPU before it chooses how to launch.
#pragma once

#include <cstdint>

#include "base/result.h"

namespace nibble::kernels::cuda {

struct Gpu {
  int major = 0, processors = 0;  // compute capability; SMs
  int64_t shared_bytes = 0;       // the most shared memory that a CTA may ask for
  int index = 0;                  // as CUDA numbers it

  bool has_bulk_copies() const { return major >= 9; }
  bool has_wgmma() const { return major == 9; }
  /// 227 KiB of shared memory a CTA, and clusters of 16 CTAs with as much.
  bool has_large_shared() const { return major == 9 || major == 10; }
};

/// Of this thread's current device. Errors: kInternal.
Result<Gpu> current_gpu();

}  // namespace nibble::kernels::cuda
