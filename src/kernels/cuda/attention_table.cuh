// The attention kernels of one format by head size: files that instantiate a half of the sizes
// each, so that they compile in parallel.
#pragma once

#include "kernels/cuda/attention_cluster.cuh"
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/attention_tiles.cuh"

namespace nibble::kernels::cuda {

template <int kHeadDim, KvFormat kFormat>
AttentionKernels attention_kernels() {
  AttentionKernels kernels = {launch_rows<kHeadDim, kFormat, false>,
                              launch_rows<kHeadDim, kFormat, true>,
                              launch_tiles<kHeadDim, kFormat>};
  if constexpr (kHeadDim == 64 || kHeadDim == 128) {  // the usual sizes
    kernels.clusters = launch_clusters<kHeadDim, kFormat>;
  }
  return kernels;
}

/// Heads of up to 128 dims.
template <KvFormat kFormat>
AttentionKernels attention_kernels_up_to_128(int64_t head_dim) {
  switch (head_dim) {
    case 16: return attention_kernels<16, kFormat>();
    case 32: return attention_kernels<32, kFormat>();
    case 64: return attention_kernels<64, kFormat>();
    case 96: return attention_kernels<96, kFormat>();
    case 128: return attention_kernels<128, kFormat>();
    default: return {};
  }
}

/// Wider ones.
template <KvFormat kFormat>
AttentionKernels attention_kernels_wide(int64_t head_dim) {
  switch (head_dim) {
    case 192: return attention_kernels<192, kFormat>();
    case 256: return attention_kernels<256, kFormat>();
    default: return {};
  }
}

}  // namespace nibble::kernels::cuda
