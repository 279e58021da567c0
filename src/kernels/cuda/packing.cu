#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/packing.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // one CTA a tile, thread = (warp, lane) of the layout

__host__ __device__ bool scale_per_32(FormatId f) {
  return f == FormatId::kMxfp4 || f == FormatId::kMxfp8 || f == FormatId::kNf3;
}
__host__ __device__ bool is_e4m3(FormatId f) {
  return f == FormatId::kMxfp8 || f == FormatId::kFp8Block;
}
__host__ __device__ int64_t row_bytes(FormatId f, int64_t cols) {
  return f == FormatId::kBf16  ? cols * 2
         : is_e4m3(f)          ? cols
         : f == FormatId::kNf3 ? cols / 8 * 3
                               : cols / 2;
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
  if (planes.scales != nullptr && tile_scale_bytes(args.format) != 0)
    p.scales = planes.scales + index * (cols / group_cols(args.format));
  return p;
}

/// Four codes of one row at column c (a multiple of 4), one a byte or (BF16) a half-word.
__device__ uint64_t read_codes(FormatId f, const RowPointers& p, int64_t c, int64_t cols) {
  if (p.codes == nullptr || c >= cols) return 0;
  if (f == FormatId::kBf16) return *reinterpret_cast<const uint64_t*>(p.codes + c * 2);
  if (is_e4m3(f)) return *reinterpret_cast<const uint32_t*>(p.codes + c);
  if (f == FormatId::kNf3) {
    const uint8_t* three = p.codes + c / 8 * 3;
    const uint32_t word = three[0] | three[1] << 8 | three[2] << 16;
    const uint32_t v = word >> (c % 8 == 0 ? 0 : 12);
    return (v & 7) | (v & 0x38) << 5 | (v & 0x1C0) << 10 | (v & 0xE00) << 15;
  }
  const uint32_t v = *reinterpret_cast<const uint16_t*>(p.codes + c / 2);
  return (v & 0xF) | (v & 0xF0) << 4 | (v & 0xF00) << 8 | (v & 0xF000) << 12;
}
__device__ void write_codes(FormatId f, const RowPointers& p, int64_t c, int64_t cols, uint64_t v) {
  if (p.codes == nullptr || c >= cols) return;
  if (f == FormatId::kBf16) {
    *reinterpret_cast<uint64_t*>(p.codes + c * 2) = v;
  } else if (is_e4m3(f)) {
    *reinterpret_cast<uint32_t*>(p.codes + c) = static_cast<uint32_t>(v);
  } else {
    *reinterpret_cast<uint16_t*>(p.codes + c / 2) =
        static_cast<uint16_t>((v & 0xF) | (v >> 4 & 0xF0) | (v >> 8 & 0xF00) | (v >> 12 & 0xF000));
  }
}
/// Eight NF3 codes of one row at column c (a multiple of 8), one a byte.
__device__ void write_levels(const RowPointers& p, int64_t c, int64_t cols, uint64_t v) {
  if (p.codes == nullptr || c >= cols) return;
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(v >> 8 * i & 7) << 3 * i;
  for (int i = 0; i < 3; ++i) p.codes[c / 8 * 3 + i] = static_cast<uint8_t>(word >> 8 * i);
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
  place.tile = args.packed + i / columns * row_block_bytes(args.format, args.scale_form, columns) +
               tile_at(args.format, args.scale_form, place.chunk);
  return place;
}

/// Block FP8: where the FP32 scale of the tile's low or high rows lies; null: none.
__device__ float* block_scale(const PackArgs& args, const TilePlace& place, int high) {
  const bool down = args.product == Product::kDown;
  const int64_t rows = down ? args.hidden : args.inter, cols = down ? args.inter : args.hidden;
  const int64_t row = packed_row(args.product, place.block, 0, 0, high);
  const RowPlanes& planes = !down && high != 0 ? args.second : args.first;
  if (row >= rows || planes.scales == nullptr) return nullptr;
  const int64_t down_blocks = (rows + args.block_rows - 1) / args.block_rows;
  const int64_t across = (cols + args.block_cols - 1) / args.block_cols;
  return reinterpret_cast<float*>(planes.scales) +
         (place.expert * down_blocks + row / args.block_rows) * across +
         place.chunk * kTileCols / args.block_cols;
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
  if (f == FormatId::kFp8Block) {
    if (threadIdx.x < 4) {
      const float* source =
          threadIdx.x < 2 ? block_scale(args, place, static_cast<int>(threadIdx.x)) : nullptr;
      const float scale = source == nullptr ? 0.0f : *source;
      reinterpret_cast<float*>(place.tile + 4096)[threadIdx.x] = scale;
      if (scale != scale) found |= kPackNan;
    }
  } else if (f == FormatId::kNvfp4 || f == FormatId::kNf3) {
    if ((low_scale & 0x7F) == 0x7F || (high_scale & 0x7F) == 0x7F) found |= kPackNan;
  } else if (f != FormatId::kBf16) {
    const uint32_t top = max(low_scale, high_scale);
    if (top == 0xFF) found |= kPackNan;
    if (top > (f == FormatId::kMxfp4 ? 128u : 134u)) found |= kPackTooLarge;
  }
  // A negative scale flips the signs of its codes; the kernels ignore the scale's sign.
  const uint32_t low_flip = f == FormatId::kNvfp4 && low_scale >> 7 != 0 ? 8 : 0;
  const uint32_t high_flip = f == FormatId::kNvfp4 && high_scale >> 7 != 0 ? 8 : 0;
  uint32_t last_step = 0;  // NF3: step 3's codes, whose bits go to the other words
  for (int j = 3; j >= 0; --j) {
    const uint64_t a = read_codes(f, low, first + 4 * j, cols);
    const uint64_t b = read_codes(f, high, first + 4 * j, cols);
    if (f == FormatId::kBf16) {
      reinterpret_cast<uint4*>(place.tile)[(warp * 4 + j) * 32 + lane] =
          make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(b),
                     static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b >> 32));
    } else if (f == FormatId::kNf3) {
      uint32_t word = 0;
      for (int n = 0; n < 2; ++n) {  // nibbles 0, 1, 4, 5: the low row's; 2, 3, 6, 7: the high's
        word |= static_cast<uint32_t>(a >> 16 * n & 7) << 16 * n;
        word |= static_cast<uint32_t>(a >> (16 * n + 8) & 7) << (16 * n + 4);
        word |= static_cast<uint32_t>(b >> 16 * n & 7) << (16 * n + 8);
        word |= static_cast<uint32_t>(b >> (16 * n + 8) & 7) << (16 * n + 12);
      }
      if (j == 3) {
        last_step = word;
      } else {
        word |= (last_step >> j & 0x11111111u) << 3;
        auto* words = reinterpret_cast<uint32_t*>(place.tile);
        words[j < 2 ? (warp * 32 + lane) * 2 + j : 256 + warp * 32 + lane] = word;
      }
    } else if (is_e4m3(f)) {
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
  if (args.scale_form == ScaleForm::kPlain) {
    if (f == FormatId::kNvfp4) scales[warp * 32 + lane] = both;
    if (scale_per_32(f) && t % 2 == 0) scales[warp * 16 + lane / 2] = both;
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
  if (scale_per_32(f)) both = scales[warp * 16 + lane / 2];
  if (f == FormatId::kFp8Block && threadIdx.x < 2) {
    float* target = block_scale(args, place, static_cast<int>(threadIdx.x));
    if (target != nullptr) *target = reinterpret_cast<float*>(place.tile + 4096)[threadIdx.x];
  }
  if (f != FormatId::kBf16 && first < cols) {
    if (low.scales != nullptr) low.scales[first / group_cols(f)] = static_cast<uint8_t>(both);
    if (high.scales != nullptr)
      high.scales[first / group_cols(f)] = static_cast<uint8_t>(both >> 8);
  }
  const uint32_t low_flip = f == FormatId::kNvfp4 && (both & 0x80) != 0 ? 8 : 0;
  const uint32_t high_flip = f == FormatId::kNvfp4 && (both & 0x8000) != 0 ? 8 : 0;
  uint64_t low_levels = 0, high_levels = 0;  // NF3: of the step before
  for (int j = 0; j < 4; ++j) {
    uint64_t a = 0, b = 0;
    if (f == FormatId::kBf16) {
      const uint4 w = reinterpret_cast<const uint4*>(place.tile)[(warp * 4 + j) * 32 + lane];
      a = w.x | static_cast<uint64_t>(w.z) << 32;
      b = w.y | static_cast<uint64_t>(w.w) << 32;
    } else if (f == FormatId::kNf3) {
      const auto* words = reinterpret_cast<const uint32_t*>(place.tile);
      const uint32_t w0 = words[(warp * 32 + lane) * 2], w1 = words[(warp * 32 + lane) * 2 + 1],
                     w2 = words[256 + warp * 32 + lane];
      const uint32_t w =
          j == 0   ? w0
          : j == 1 ? w1
          : j == 2 ? w2
                   : (w0 >> 3 & 0x11111111u) | (w1 >> 2 & 0x22222222u) | (w2 >> 1 & 0x44444444u);
      for (int n = 0; n < 2; ++n) {
        a |= static_cast<uint64_t>(w >> 16 * n & 7) << 16 * n |
             static_cast<uint64_t>(w >> (16 * n + 4) & 7) << (16 * n + 8);
        b |= static_cast<uint64_t>(w >> (16 * n + 8) & 7) << 16 * n |
             static_cast<uint64_t>(w >> (16 * n + 12) & 7) << (16 * n + 8);
      }
      if (j % 2 == 0) {
        low_levels = a;
        high_levels = b;
      } else {
        write_levels(low, first + 4 * (j - 1), cols, low_levels | a << 32);
        write_levels(high, first + 4 * (j - 1), cols, high_levels | b << 32);
      }
      continue;
    } else if (is_e4m3(f)) {
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

int64_t all_tiles(const PackArgs& args) {
  return args.experts * tile_count(args.product, args.hidden, args.inter);
}

}  // namespace

cudaError_t launch_pack(const PackArgs& args, int* flags, cudaStream_t stream) {
  pack_kernel<<<static_cast<unsigned>(all_tiles(args)), kThreads, 0, stream>>>(args, flags);
  return cudaGetLastError();
}

cudaError_t launch_unpack(const PackArgs& args, cudaStream_t stream) {
  unpack_kernel<<<static_cast<unsigned>(all_tiles(args)), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nibble::kernels::cuda
