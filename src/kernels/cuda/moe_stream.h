// The two products of the layer in one persistent kernel; one instance per format, in a file of its
// own (moe_stream_<format>.cu).
#pragma once

#include "kernels/cuda/workspace.h"

namespace nibble::kernels::cuda {

struct StreamArgs {
  MoeShape shape;
  MoeWeights weights;
  MoeWorkspace work;
  const float* router_weights;  // [slots]
};

/// A launchable instance: the kernel for one format and geometry.
struct StreamKernel {
  void (*kernel)(StreamArgs);
  int threads;
  int row_blocks;   // row blocks a CTA multiplies at once
  int tile_tokens;  // largest token tile
  int ctas_per_sm;
  size_t smem_bytes;
};

StreamKernel stream_kernel_nvfp4(Geometry geometry);
StreamKernel stream_kernel_mxfp4(Geometry geometry);
StreamKernel stream_kernel_mxfp8(Geometry geometry);
StreamKernel stream_kernel_bf16(Geometry geometry);

}  // namespace nibble::kernels::cuda
