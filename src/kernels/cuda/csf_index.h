// From stored CSF streams on the device to the form that the MoE kernels read beside the packed
// tiles (moe_layer.h, CsfScales): codes in the tiles, bases by row block, exceptions by tile.
//
//   codes       of 5 (NVFP4) or 3 bits, placed as layout.h says: scale = base + code. They reach
//               further than the streams' 4 and 1 bits, so that most of the streams' exceptions
//               have a code here. NVFP4: a scale's sign is dropped (packing moved it to the
//               weights), so that base + code counts modulo 128.
//   room        of a warp in the tile: half-words (value << 8) + 0x80 + byte of the warp's plain
//               scales, ascending, then zeros, for the scales without a code. If there are more
//               than csf_room, the first is kCsfOverflow and `exceptions` has them. NVFP4: the
//               word behind the codes. Else: bits 0..2 of code word w are bits 6 w .. 6 w + 2 of
//               the half-word, and bits 16..18 the three after them.
//   flags       kCsfFlag in a warp's code words: the room is in use, or a row's base is not plain
//               (csf_base_is_plain).
//   bases       half-word 8 w + g of a row block's 32: row g's base, and row g + 8's << 8.
//   exceptions  of the streams, a tile's together, ascending: (value << 24) + (chunk << 8) + byte
//               of the plain scales (layout.h, packing.cu); exception_begin counts over all tiles.
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

/// Where a row's codes begin, so that they cover the stream's window of the row with room on both
/// sides. NVFP4: modulo 128. There, a base below 8 means subnormal scales and one above 96 sums
/// that wrap around, which kernels do not expect in warps without kCsfFlag.
NIBBLE_HD constexpr uint32_t csf_tile_base(FormatId f, uint32_t stream_base) {
  if (f == FormatId::kNvfp4) {
    if (stream_base > 112 && stream_base < 128) return stream_base - 8;  // the window wraps
    stream_base &= 127;
    if (stream_base < 16) return stream_base < 8 ? stream_base : 8;
    return stream_base < 104 ? stream_base - 8 : 96;
  }
  const uint32_t base = stream_base < 4 ? 0 : stream_base - 4;
  return base < 248 ? base : 248;
}
NIBBLE_HD constexpr bool csf_base_is_plain(FormatId f, uint32_t tile_base) {
  return f != FormatId::kNvfp4 || (tile_base >= 8 && tile_base <= 96);
}

/// Queues the rearrangement. No allocation, no synchronisation.
/// Errors: kUnsupported (format without CSF), kInvalidArgument (sources that do not fill their
/// planes: gate, up and down must be whole stacks, or gate and up the two halves of one stack),
/// kInternal (launch).
Result<void> csf_index(const CsfIndexArgs& args, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
