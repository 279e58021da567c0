// From stored CSF streams on the device to the form that the MoE kernels read: codes and
// bases beside the packed tiles, exceptions by 16 rows of a row block.
//
//   codes       of 6 (NVFP4) or 4 bits, placed as layout.h says: scale = base + code. They reach
//               further than the streams' 4 and 1 bits: of scales that spread as those of trained
//               weights do, hardly any lies outside. So a kernel asks once a row block whether base
//               + code is the whole truth (CsfWarpRows), not in every tile. NVFP4: a scale's sign
//               is dropped (packing moved it to the weights), so that base + code counts modulo
//               128.
//   zeros       NVFP4: a scale of zero that has no code gets any, and its weights' magnitudes
//               become zero: what is multiplied is the same, bit for bit.
//   exceptions  all other scales without a code: (value << 24) + (chunk << 8) + 2 i + high for
//               scale i of the warp, ascending.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/layout.h"

namespace nibble::kernels::cuda {

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
  CsfSource first, second;         // as packing.h: gate and up, or down alone
  uint8_t* packed = nullptr;       // tiles that launch_pack wrote with ScaleForm::kCsf
  uint32_t* exceptions = nullptr;  // [at least the sum of the sources' exceptions]
};

/// NVFP4 scales use CsfKind::kNvfp4, MX scales kMxfp4.
constexpr CsfKind csf_kind_of(FormatId f) {
  return f == FormatId::kNvfp4 ? CsfKind::kNvfp4 : CsfKind::kMxfp4;
}

/// Where a row's codes begin, so that they cover the stream's window of the row with room on both
/// sides. NVFP4: modulo 128. There, a base below 8 means subnormal scales and one above 64 sums
/// that wrap around; kernels expect them only where CsfWarpRows::odd says so.
NIBBLE_HD constexpr uint32_t csf_tile_base(FormatId f, uint32_t stream_base) {
  if (f == FormatId::kNvfp4) {
    if (stream_base > 112 && stream_base < 128) return stream_base - 24;  // the window wraps
    stream_base &= 127;
    if (stream_base < 8) return stream_base;
    return stream_base < 32 ? 8 : stream_base < 88 ? stream_base - 24 : 64;
  }
  const uint32_t base = stream_base < 7 ? 0 : stream_base - 7;
  return base < 240 ? base : 240;
}
NIBBLE_HD constexpr bool csf_base_is_plain(FormatId f, uint32_t tile_base) {
  return f != FormatId::kNvfp4 || (tile_base >= 8 && tile_base <= 64);
}

/// Queues the rearrangement. No allocation, no synchronisation.
/// Errors: kUnsupported (format without CSF), kInvalidArgument (sources that do not fill their
/// planes: gate, up and down must be whole stacks, or gate and up the two halves of one stack),
/// kInternal (launch).
Result<void> csf_index(const CsfIndexArgs& args, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
