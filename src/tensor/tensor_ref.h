// How bytes in memory are read as a weight matrix. Format says what the bits mean, layout where
// they sit; repacking changes the layout only (and `kernels/repack` has the bit-for-bit inverse).
#pragma once

#include <cstdint>

#include "formats/block_format.h"

namespace nibble::tensor {

enum class Layout : uint8_t {
  kRows,    // as the checkpoint stores it
  kTile16,  // CPU kernels: tiles of 16 rows, one vector lane a row (kernels/cpu/tile16.h)
};

/// How the scale plane of an NVFP4, MXFP4 or MXFP8 matrix is held.
enum class ScaleEncoding : uint8_t { kPlain, kCsf };

/// Non-owning, trivially copyable. For kTile16, `view.codes` and `view.scales` point to the tiled
/// planes (kernels/cpu/tile16.h says their order and sizes); rows and cols are the true extents.
struct TensorRef {
  formats::MatrixView view;
  Layout layout = Layout::kRows;
  ScaleEncoding scale_encoding = ScaleEncoding::kPlain;
  // kCsf: view.scales is the fixed stream, tile by tile; exceptions of tile t are
  // exceptions[exception_begin[t] .. exception_begin[t + 1]).
  const uint32_t* exceptions = nullptr;
  const uint32_t* exception_begin = nullptr;

  int64_t rows() const { return view.rows; }
  int64_t cols() const { return view.cols; }
  bool empty() const { return view.codes == nullptr; }
};

}  // namespace nibble::tensor
