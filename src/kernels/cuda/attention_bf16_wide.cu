// The attention kernels for BF16 keys and values and wide heads. A file of its own, to compile in
// parallel.
#include "kernels/cuda/attention_table.cuh"

namespace nibble::kernels::cuda {

AttentionKernels attention_kernels_bf16_wide(int64_t head_dim) {
  return attention_kernels_wide<KvFormat::kBf16>(head_dim);
}

}  // namespace nibble::kernels::cuda
