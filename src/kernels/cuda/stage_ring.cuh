// A role's position in the ring of stages through which x and weights come to a wide kernel.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {

/// G: kStages, where full and empty barriers begin (kFull, kEmpty), bytes of a stage's x and
/// weights (kXBytes, kWBytes), where weights begin (kW), and smem(), the CTA's shared memory.
template <typename G>
struct StageRing {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == G::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ uint32_t full() const { return smem_address(G::smem()) + G::kFull + 8 * stage; }
  __device__ uint32_t empty() const { return smem_address(G::smem()) + G::kEmpty + 8 * stage; }
  __device__ uint32_t x() const { return smem_address(G::smem()) + stage * G::kXBytes; }
  __device__ uint32_t w() const { return smem_address(G::smem()) + G::kW + stage * G::kWBytes; }
};

}  // namespace nibble::kernels::cuda
