// Repacking of dense matrices: packing.h's kernels for the formats they know, the same tile order
// without scales for FP8 codes.
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_kernels.h"
#include "kernels/cuda/packing.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // one CTA a tile, thread = (warp, lane) of the layout

/// Codes of one 64 x 64 tile: word i of step j holds registers 2 i (low row, upper bytes) and 2 i +
/// 1 (high row, lower bytes), as packing.cu's MXFP8.
template <bool pack>
__global__ void __launch_bounds__(kThreads)
    fp8_tile_kernel(uint8_t* codes, uint8_t* tiles, int64_t rows, int64_t cols, int* flags) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int64_t columns = chunks(cols), block = blockIdx.x / columns, chunk = blockIdx.x % columns;
  auto* words = reinterpret_cast<uint32_t*>(tiles + blockIdx.x * int64_t{kTileRows * kTileCols});
  const int64_t low = packed_row(Product::kDown, block, warp, g, 0), high = low + 1;
  const int64_t first = chunk * kTileCols + 16 * t;
  int found = 0;
  for (int j = 0; j < 4; ++j) {
    const int64_t column = first + 4 * j;
    auto* a = reinterpret_cast<uint32_t*>(codes + low * cols + column);
    auto* b = reinterpret_cast<uint32_t*>(codes + high * cols + column);
    const bool has_a = low < rows && column < cols, has_b = high < rows && column < cols;
    uint32_t* at = words + ((warp * 2 + j / 2) * 32 + lane) * 4 + j % 2 * 2;
    if constexpr (pack) {
      const uint32_t va = has_a ? *a : 0, vb = has_b ? *b : 0;
      for (int n = 0; n < 4; ++n) {
        if ((va >> 8 * n & 0x7F) == 0x7F || (vb >> 8 * n & 0x7F) == 0x7F) found |= kPackNan;
      }
      at[0] = __byte_perm(va, vb, 0x1504);
      at[1] = __byte_perm(va, vb, 0x3726);
    } else {
      if (has_a) *a = __byte_perm(at[0], at[1], 0x7531);
      if (has_b) *b = __byte_perm(at[0], at[1], 0x6420);
    }
  }
  if (pack && found != 0) atomicOr(flags, found);
}

/// Scales of 128 x 128 blocks, once per 64 rows in packed form.
template <bool pack>
__global__ void fp8_scale_kernel(float* scales, float* packed, int64_t blocks, int64_t columns,
                                 int* flags) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= blocks * columns) return;
  const int64_t block = i / columns;
  float* source = scales + block / 2 * columns + i % columns;
  if constexpr (pack) {
    const float v = *source;
    if (v != v) atomicOr(flags, kPackNan);
    packed[i] = v;
  } else if (block % 2 == 0) {
    *source = packed[i];
  }
}

bool is_fp8(FormatId f) {
  return f == FormatId::kFp8Block || f == FormatId::kFp8Channel || f == FormatId::kFp8Tensor;
}

Result<void> run(const LinearPiece& piece, std::byte* packed, int* flags, bool pack,
                 cudaStream_t stream) {
  const bool scaled = piece.format == FormatId::kFp8Block || tile_scale_bytes(piece.format) != 0;
  if (linear_packed_bytes(piece.format, piece.out, piece.cols) == 0) {
    return Error(Code::kUnsupported, cat("CUDA linear layer in format ",
                                         formats::block_format(piece.format).name, ": no kernel"));
  }
  const bool last = piece.row_begin + piece.rows == piece.out;
  if (piece.rows < 1 || piece.row_begin < 0 || piece.row_begin % kTileRows != 0 ||
      piece.row_begin + piece.rows > piece.out || (piece.rows % kTileRows != 0 && !last) ||
      piece.cols % 8 != 0 || piece.codes == nullptr || packed == nullptr ||
      (scaled && piece.scales == nullptr) || (pack && flags == nullptr)) {
    return Error(Code::kInvalidArgument,
                 cat("piece of a packed matrix: rows ", piece.row_begin, " to ",
                     piece.row_begin + piece.rows, " of ", piece.out, " x ", piece.cols));
  }
  const int64_t first = piece.row_begin / kTileRows, blocks = chunks(piece.rows);
  auto* tiles = reinterpret_cast<uint8_t*>(packed) +
                first * chunks(piece.cols) * linear_tile_bytes(piece.format);
  cudaError_t e = cudaSuccess;
  if (is_fp8(piece.format)) {
    const auto grid = static_cast<unsigned>(blocks * chunks(piece.cols));
    (pack ? fp8_tile_kernel<true> : fp8_tile_kernel<false>)<<<grid, kThreads, 0, stream>>>(
        piece.codes, tiles, piece.rows, piece.cols, flags);
    e = cudaGetLastError();
    if (e == cudaSuccess && piece.format == FormatId::kFp8Block) {
      const int64_t columns = (chunks(piece.cols) + 1) / 2;
      auto* scales =
          reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(packed) +
                                   linear_tiles_bytes(piece.format, piece.out, piece.cols)) +
          first * columns;
      const auto scale_grid = static_cast<unsigned>((blocks * columns + kThreads - 1) / kThreads);
      (pack ? fp8_scale_kernel<true>
            : fp8_scale_kernel<false>)<<<scale_grid, kThreads, 0, stream>>>(
          reinterpret_cast<float*>(piece.scales), scales, blocks, columns, flags);
      e = cudaGetLastError();
    }
  } else {
    PackArgs args;
    args.format = piece.format;
    args.product = Product::kDown;
    args.experts = 1;
    args.hidden = piece.rows;
    args.inter = piece.cols;
    args.first = {piece.codes, piece.scales};
    args.packed = tiles;
    e = pack ? launch_pack(args, flags, stream) : launch_unpack(args, stream);
  }
  if (e != cudaSuccess) {
    return Error(Code::kInternal, cat("repacking kernel: ", cudaGetErrorString(e)));
  }
  return {};
}

}  // namespace

Result<void> pack_linear(const LinearPiece& piece, std::byte* packed, int* flags,
                         cudaStream_t stream) {
  return run(piece, packed, flags, true, stream);
}

Result<void> unpack_linear(const LinearPiece& piece, const std::byte* packed, cudaStream_t stream) {
  return run(piece, const_cast<std::byte*>(packed), nullptr, false, stream);
}

}  // namespace nibble::kernels::cuda
