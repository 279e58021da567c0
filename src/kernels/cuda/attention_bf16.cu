// The attention kernels for BF16 keys and values. A file of its own, to compile in parallel.
#include "kernels/cuda/attention_cluster.cuh"
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/attention_tiles.cuh"

namespace nibble::kernels::cuda {
namespace {

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

}  // namespace

AttentionKernels attention_kernels_bf16(int64_t head_dim) {
  switch (head_dim) {
    case 16: return attention_kernels<16, KvFormat::kBf16>();
    case 32: return attention_kernels<32, KvFormat::kBf16>();
    case 64: return attention_kernels<64, KvFormat::kBf16>();
    case 96: return attention_kernels<96, KvFormat::kBf16>();
    case 128: return attention_kernels<128, KvFormat::kBf16>();
    default: return {};
  }
}

}  // namespace nibble::kernels::cuda
