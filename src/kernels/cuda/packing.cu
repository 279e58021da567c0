#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/packing.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // one CTA a tile, thread = (warp, lane) of the layout

__host__ __device__ int64_t row_bytes(FormatId f, int64_t cols) {
  return f == FormatId::kBf16 ? cols * 2 : f == FormatId::kMxfp8 ? cols : cols / 2;
}

/// Where the lane's row (high or not) of the tile lies in the checkpoint planes; null: padding.
struct RowPointers {
  uint8_t* codes = nullptr;
  uint8_t* scales = nullptr;
};
__device__ RowPointers row_of(const PackArgs& args, int64_t expert, int64_t block, int warp, int g,
                              int high) {
  const bool down = args.product == Product::kDown;
  const int64_t rows = down ? args.hidden : args.inter, cols = down ? args.inter : args.hidden;
  const int64_t row = packed_row(args.product, block, warp, g, high);
  RowPointers p;
  if (row >= rows) return p;
  const RowPlanes& planes = !down && high != 0 ? args.second : args.first;
  const int64_t index = expert * rows + row;
  p.codes = planes.codes + index * row_bytes(args.format, cols);
  if (planes.scales != nullptr) p.scales = planes.scales + index * (cols / group_cols(args.format));
  return p;
}

/// Four codes of one row at column c (a multiple of 4), one a byte or (BF16) a half-word.
__device__ uint64_t read_codes(FormatId f, const RowPointers& p, int64_t c, int64_t cols) {
  if (p.codes == nullptr || c >= cols) return 0;
  if (f == FormatId::kBf16) return *reinterpret_cast<const uint64_t*>(p.codes + c * 2);
  if (f == FormatId::kMxfp8) return *reinterpret_cast<const uint32_t*>(p.codes + c);
  const uint32_t v = *reinterpret_cast<const uint16_t*>(p.codes + c / 2);
  return (v & 0xF) | (v & 0xF0) << 4 | (v & 0xF00) << 8 | (v & 0xF000) << 12;
}
__device__ void write_codes(FormatId f, const RowPointers& p, int64_t c, int64_t cols, uint64_t v) {
  if (p.codes == nullptr || c >= cols) return;
  if (f == FormatId::kBf16) {
    *reinterpret_cast<uint64_t*>(p.codes + c * 2) = v;
  } else if (f == FormatId::kMxfp8) {
    *reinterpret_cast<uint32_t*>(p.codes + c) = static_cast<uint32_t>(v);
  } else {
    *reinterpret_cast<uint16_t*>(p.codes + c / 2) =
        static_cast<uint16_t>((v & 0xF) | (v >> 4 & 0xF0) | (v >> 8 & 0xF00) | (v >> 12 & 0xF000));
  }
}
__device__ uint32_t read_scale(const PackArgs& args, const RowPointers& p, int64_t c,
                               int64_t cols) {
  if (p.scales == nullptr || c >= cols) return 0;
  return p.scales[c / group_cols(args.format)];
}

struct TilePlace {
  int64_t expert, block, chunk;
  uint8_t* tile;
};
__device__ TilePlace tile_place(const PackArgs& args) {
  const bool down = args.product == Product::kDown;
  const int64_t columns = chunks(down ? args.inter : args.hidden);
  const int64_t blocks = row_blocks(args.product, args.hidden, args.inter);
  const int64_t i = blockIdx.x;
  TilePlace place;
  place.chunk = i % columns;
  place.block = i / columns % blocks;
  place.expert = i / columns / blocks;
  place.tile = args.packed + i * tile_bytes(args.format);
  return place;
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const PackArgs args, int* flags) {
  const TilePlace place = tile_place(args);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const FormatId f = args.format;
  const int64_t cols = args.product == Product::kDown ? args.inter : args.hidden;
  const RowPointers low = row_of(args, place.expert, place.block, warp, g, 0);
  const RowPointers high = row_of(args, place.expert, place.block, warp, g, 1);
  const int64_t first = place.chunk * kTileCols + 16 * t;
  const uint32_t low_scale = read_scale(args, low, first, cols);
  const uint32_t high_scale = read_scale(args, high, first, cols);
  int found = 0;
  if (f == FormatId::kNvfp4) {
    if ((low_scale & 0x7F) == 0x7F || (high_scale & 0x7F) == 0x7F) found |= kPackNan;
  } else if (f != FormatId::kBf16) {
    const uint32_t top = max(low_scale, high_scale);
    if (top == 0xFF) found |= kPackNan;
    if (top > (f == FormatId::kMxfp4 ? 128u : 134u)) found |= kPackTooLarge;
  }
  // A negative scale flips the signs of its codes; the kernels ignore the scale's sign.
  const uint32_t low_flip = f == FormatId::kNvfp4 && low_scale >> 7 != 0 ? 8 : 0;
  const uint32_t high_flip = f == FormatId::kNvfp4 && high_scale >> 7 != 0 ? 8 : 0;
  for (int j = 0; j < 4; ++j) {
    const uint64_t a = read_codes(f, low, first + 4 * j, cols);
    const uint64_t b = read_codes(f, high, first + 4 * j, cols);
    if (f == FormatId::kBf16) {
      reinterpret_cast<uint4*>(place.tile)[(warp * 4 + j) * 32 + lane] =
          make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(b),
                     static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b >> 32));
    } else if (f == FormatId::kMxfp8) {
      // Word i holds registers 2i (low row, upper bytes) and 2i + 1 (high row, lower bytes).
      for (int i = 0; i < 2; ++i) {
        const auto pa = static_cast<uint32_t>(a >> 16 * i), pb = static_cast<uint32_t>(b >> 16 * i);
        for (int n = 0; n < 2; ++n) {
          if ((pa >> 8 * n & 0x7F) == 0x7F || (pb >> 8 * n & 0x7F) == 0x7F) found |= kPackNan;
        }
        const uint32_t word =
            (pb & 0xFF) | (pa & 0xFF) << 8 | (pb & 0xFF00) << 8 | (pa & 0xFF00) << 16;
        reinterpret_cast<uint32_t*>(
            place.tile)[((warp * 2 + j / 2) * 32 + lane) * 4 + j % 2 * 2 + i] = word;
      }
    } else {
      uint32_t word = 0;
      for (int n = 0; n < 2; ++n) {  // n = 1: the upper half, odd columns
        const uint32_t half =
            spread_codes((static_cast<uint32_t>(a >> 8 * n) & 15) ^ low_flip,
                         (static_cast<uint32_t>(b >> 8 * n) & 15) ^ high_flip,
                         (static_cast<uint32_t>(a >> (16 + 8 * n)) & 15) ^ low_flip,
                         (static_cast<uint32_t>(b >> (16 + 8 * n)) & 15) ^ high_flip);
        word |= half << 16 * n;
      }
      reinterpret_cast<uint32_t*>(place.tile)[(warp * 32 + lane) * 4 + j] = word;
    }
  }
  auto* scales = reinterpret_cast<uint16_t*>(place.tile + tile_code_bytes(f));
  const auto both = static_cast<uint16_t>(low_scale | high_scale << 8);
  if (f == FormatId::kNvfp4) scales[warp * 32 + lane] = both;
  if ((f == FormatId::kMxfp4 || f == FormatId::kMxfp8) && t % 2 == 0) {
    scales[warp * 16 + lane / 2] = both;
  }
  if (found != 0) atomicOr(flags, found);
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(const PackArgs args) {
  const TilePlace place = tile_place(args);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const FormatId f = args.format;
  const int64_t cols = args.product == Product::kDown ? args.inter : args.hidden;
  const RowPointers low = row_of(args, place.expert, place.block, warp, g, 0);
  const RowPointers high = row_of(args, place.expert, place.block, warp, g, 1);
  const int64_t first = place.chunk * kTileCols + 16 * t;
  const auto* scales = reinterpret_cast<const uint16_t*>(place.tile + tile_code_bytes(f));
  uint32_t both = 0;
  if (f == FormatId::kNvfp4) both = scales[warp * 32 + lane];
  if (f == FormatId::kMxfp4 || f == FormatId::kMxfp8) both = scales[warp * 16 + lane / 2];
  if (f != FormatId::kBf16 && first < cols) {
    if (low.scales != nullptr) low.scales[first / group_cols(f)] = static_cast<uint8_t>(both);
    if (high.scales != nullptr)
      high.scales[first / group_cols(f)] = static_cast<uint8_t>(both >> 8);
  }
  const uint32_t low_flip = f == FormatId::kNvfp4 && (both & 0x80) != 0 ? 8 : 0;
  const uint32_t high_flip = f == FormatId::kNvfp4 && (both & 0x8000) != 0 ? 8 : 0;
  for (int j = 0; j < 4; ++j) {
    uint64_t a = 0, b = 0;
    if (f == FormatId::kBf16) {
      const uint4 w = reinterpret_cast<const uint4*>(place.tile)[(warp * 4 + j) * 32 + lane];
      a = w.x | static_cast<uint64_t>(w.z) << 32;
      b = w.y | static_cast<uint64_t>(w.w) << 32;
    } else if (f == FormatId::kMxfp8) {
      for (int i = 0; i < 2; ++i) {
        const uint64_t w = reinterpret_cast<const uint32_t*>(
            place.tile)[((warp * 2 + j / 2) * 32 + lane) * 4 + j % 2 * 2 + i];
        a |= ((w >> 8 & 0xFF) | (w >> 16 & 0xFF00)) << 16 * i;
        b |= ((w & 0xFF) | (w >> 8 & 0xFF00)) << 16 * i;
      }
    } else {
      const uint32_t word =
          reinterpret_cast<const uint32_t*>(place.tile)[(warp * 32 + lane) * 4 + j];
      for (int n = 0; n < 2; ++n) {
        const uint32_t half = word >> 16 * n & 0xFFFF;
        a |= static_cast<uint64_t>(gather_code(half, 0) ^ low_flip) << 8 * n;
        b |= static_cast<uint64_t>(gather_code(half, 1) ^ high_flip) << 8 * n;
        a |= static_cast<uint64_t>(gather_code(half, 2) ^ low_flip) << (16 + 8 * n);
        b |= static_cast<uint64_t>(gather_code(half, 3) ^ high_flip) << (16 + 8 * n);
      }
    }
    write_codes(f, low, first + 4 * j, cols, a);
    write_codes(f, high, first + 4 * j, cols, b);
  }
}

int64_t tile_count(const PackArgs& args) {
  const int64_t cols = args.product == Product::kDown ? args.inter : args.hidden;
  return args.experts * row_blocks(args.product, args.hidden, args.inter) * chunks(cols);
}

}  // namespace

cudaError_t launch_pack(const PackArgs& args, int* flags, cudaStream_t stream) {
  pack_kernel<<<static_cast<unsigned>(tile_count(args)), kThreads, 0, stream>>>(args, flags);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const PackArgs& args, cudaStream_t stream) {
  unpack_kernel<<<static_cast<unsigned>(tile_count(args)), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nibble::kernels::cuda
