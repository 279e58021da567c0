// The attention kernels for BF16 keys and values and wide heads. A file of its own, to compile in
// parallel.
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/attention_tiles.cuh"

namespace nibble::kernels::cuda {
namespace {

template <int kHeadDim, KvFormat kFormat>
AttentionKernels attention_kernels() {
  return {launch_rows<kHeadDim, kFormat, false>, launch_rows<kHeadDim, kFormat, true>,
          launch_tiles<kHeadDim, kFormat>};
}

}  // namespace

AttentionKernels attention_kernels_bf16_wide(int64_t head_dim) {
  switch (head_dim) {
    case 192: return attention_kernels<192, KvFormat::kBf16>();
    case 256: return attention_kernels<256, KvFormat::kBf16>();
    default: return {};
  }
}

}  // namespace nibble::kernels::cuda
