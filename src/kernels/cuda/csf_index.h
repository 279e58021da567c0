// From stored CSF streams on the device to the form that the MoE kernels read beside the packed
// tiles (moe_layer.h, CsfScales): codes in the tiles, bases by row block, exceptions by tile.
//
//   tile codes  of row g + 8 high of warp w and group i of the chunk. NVFP4: nibble high (0: lower)
//               of byte 4 (8 w + g) + i. Else: bit 2 g + i of half-word 2 w + high.
//   tile room   behind the codes csf_room() half-words a warp: (value << 8) + 0x80 + byte of the
//               warp's plain scales, ascending, then zeros. If they do not suffice the first is
//               kCsfOverflow and the exceptions are found by exception_begin alone.
//   bases       half-word 8 w + g of a row block's 32: row g's base, and row g + 8's << 8.
//   exceptions  of a tile together, ascending: (value << 24) + (chunk << 8) + byte of the plain
//               scales (layout.h, packing.cu); exception_begin counts over all tiles.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

constexpr uint16_t kCsfOverflow = 0x40;

/// Rows [first_row, first_row + rows of the matrix) of every plane of a stack: with gate and up
/// stacked in one plane they are two sources of the same streams.
struct CsfSource {
  CsfStreams streams;
  int64_t plane_rows = 0;
  int64_t first_row = 0;
};

struct CsfIndexArgs {
  FormatId format = FormatId::kNvfp4;
  Product product = Product::kGateUp;
  int64_t experts = 0, hidden = 0, inter = 0;
  CsfSource first, second;              // as packing.h: gate and up, or down alone
  uint8_t* packed = nullptr;            // tiles that launch_pack wrote with ScaleForm::kCsf
  uint16_t* bases = nullptr;            // [experts][row blocks][32]
  uint32_t* exception_begin = nullptr;  // [experts * tile_count + 1]
  uint32_t* exceptions = nullptr;       // [at least the sum of the sources' exceptions]
};

/// NVFP4 scales use CsfKind::kNvfp4, MX scales kMxfp4.
constexpr CsfKind csf_kind_of(FormatId f) {
  return f == FormatId::kNvfp4 ? CsfKind::kNvfp4 : CsfKind::kMxfp4;
}

/// Queues the rearrangement. No allocation, no synchronisation.
/// Errors: kUnsupported (format without CSF), kInternal (launch).
Result<void> csf_index(const CsfIndexArgs& args, void* scratch, cudaStream_t stream);
int64_t csf_index_scratch_bytes(const CsfIndexArgs& args);

}  // namespace nibble::kernels::cuda
