// Checkpoint rows to the CPU kernels' tiles and back. Repacking moves bits, never changes them:
// unpack_tile16(repack_tile16(m)) gives the codes and scales byte for byte (a test says so for
// every format). F16 is the one exception: it is widened to F32 tiles, exactly.
#pragma once

#include <span>

#include "base/result.h"
#include "tensor/tensor_ref.h"

namespace nibble::kernels {

struct TiledBytes {
  int64_t codes = 0, scales = 0;
};
/// Sizes of the tiled planes. `src` pointers are not read. Each plane wants 64-byte alignment.
TiledBytes tile16_bytes(const formats::MatrixView& src);

/// Errors: kUnsupported naming the format if this geometry has no kernel (for example block FP8
/// whose block_cols is no multiple of 16). Codes and scales spans have exactly tile16_bytes; with
/// src.scales null and an empty scales span only the codes are repacked (the owner keeps the scales
/// compressed).
Result<tensor::TensorRef> repack_tile16(const formats::MatrixView& src, std::span<std::byte> codes,
                                        std::span<std::byte> scales);

/// The inverse, for tests and for writing: planes of `src` geometry in checkpoint rows.
void unpack_tile16(const tensor::TensorRef& tiled, std::span<std::byte> codes,
                   std::span<std::byte> scales);

}  // namespace nibble::kernels
