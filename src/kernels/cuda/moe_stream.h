// The two products of the layer in one persistent kernel; one instance per format, form of scales
// and geometry, in a file per format (moe_stream_<format>.cu).
#pragma once

#include "kernels/cuda/shift_factors.h"
#include "kernels/cuda/workspace.h"

namespace nibble::kernels::cuda {

constexpr int kRunGateUp = 1, kRunDown = 2;  // StreamArgs::products

struct StreamArgs {
  MoeShape shape;
  MoeWeights weights;  // of the launch's group
  MoeWorkspace work;
  const float* router_weights;  // [slots]; null: 1
  const float* add;             // of MoeArgs, with y
  float* y;                     // with one expert a token: [tokens, hidden]; else null
  int group;                    // its tiles are those from counters[kGroupTiles + group]
  int next_item;                // index of the launch's ticket counter
  int products;
  // The wide kernel expands by multiplication: with shifts as the compiler chose them in one
  // version it was 2 to 6 % slower.
  ShiftFactors shift_factors;
};

/// A launchable instance; kernel == nullptr: there is none.
struct StreamKernel {
  void (*kernel)(StreamArgs) = nullptr;
  int threads = 0;
  int row_blocks = 0;   // row blocks a CTA multiplies at once
  int tile_tokens = 0;  // largest token tile
  int ctas_per_sm = 0;
  size_t smem_bytes = 0;
};

/// `form`: kCsf where the format has it.
StreamKernel stream_kernel_nvfp4(ScaleForm form, Geometry geometry);
StreamKernel stream_kernel_mxfp4(ScaleForm form, Geometry geometry);
StreamKernel stream_kernel_mxfp8(ScaleForm form, Geometry geometry);
StreamKernel stream_kernel_bf16(ScaleForm form, Geometry geometry);
StreamKernel stream_kernel_fp8_block(ScaleForm form, Geometry geometry);
StreamKernel stream_kernel_nf3(ScaleForm form, Geometry geometry);

}  // namespace nibble::kernels::cuda
