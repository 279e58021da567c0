// The attention kernels for FP8 keys and values and wide heads. A file of its own, to compile in
// parallel.
#include "kernels/cuda/attention_table.cuh"

namespace nibble::kernels::cuda {

AttentionKernels attention_kernels_fp8_wide(int64_t head_dim) {
  return attention_kernels_wide<KvFormat::kFp8E4m3>(head_dim);
}

}  // namespace nibble::kernels::cuda
