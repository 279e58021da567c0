#include <cuda_runtime.h>

#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/csf_rows.cuh"
#include "kernels/cuda/csf_scan.cuh"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // one CTA a row block; warps deal the chunks out

struct IndexRows {
  CsfIndexArgs args;
  int64_t rows;                   // of a matrix (a source)
  int blocks, chunk_count;        // of an expert
  int scale_cols, width, groups;  // groups: scale columns of a chunk
};

/// Where a row of the row block lies in the streams; index < 0: padding.
struct SourceRow {
  const uint8_t* fixed = nullptr;
  const uint32_t* exceptions = nullptr;
  const uint32_t* row_begin = nullptr;
  int64_t index = -1;  // over all planes of the stack
  int64_t in_plane = 0;
};
__device__ SourceRow source_row(const IndexRows& r, int64_t expert, int64_t block, int warp, int g,
                                int high) {
  SourceRow row;
  const int64_t matrix_row = packed_row(r.args.product, block, warp, g, high);
  if (matrix_row >= r.rows) return row;
  const CsfSource& source =
      r.args.product == Product::kGateUp && high != 0 ? r.args.second : r.args.first;
  row.fixed = source.streams.fixed;
  row.exceptions = source.streams.exceptions;
  row.row_begin = source.streams.row_begin;
  row.in_plane = source.first_row + matrix_row;
  row.index = expert * source.plane_rows + row.in_plane;
  return row;
}
__device__ const uint8_t* slab_of(const IndexRows& r, const SourceRow& row) {
  return row.fixed + row.index / 16 * (16 * (1 + r.width));
}

/// Codes of the chunk's groups, group 0 lowest; 0 past the last column.
__device__ uint32_t chunk_codes(const IndexRows& r, const uint8_t* codes, int chunk) {
  if (codes == nullptr) return 0;
  if (r.groups == 4) {
    const int at = 2 * chunk;
    return codes[at] | (at + 1 < r.width ? codes[at + 1] << 8 : 0);
  }
  const int bit = 2 * chunk;
  return codes[bit / 8] >> bit % 8 & 3;
}

/// Codes into tiles, bases, and the number of exceptions of each row block.
__global__ void __launch_bounds__(kThreads)
    place_codes_kernel(const IndexRows r, uint32_t* block_counts) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t block_index = blockIdx.x, expert = block_index / r.blocks;
  const int64_t block = block_index % r.blocks;
  const uint8_t* codes[2] = {nullptr, nullptr};
  uint32_t bases = 0, count = 0;
  for (int high = 0; high < 2; ++high) {
    const SourceRow row = source_row(r, expert, block, lane / 8, lane % 8, high);
    if (row.index < 0) continue;
    const uint8_t* slab = slab_of(r, row);
    codes[high] = slab + 16 + row.index % 16 * r.width;
    bases |= static_cast<uint32_t>(slab[row.index % 16]) << 8 * high;
    count += row.row_begin[row.index + 1] - row.row_begin[row.index];
  }
  if (warp == 0) r.args.bases[block_index * 32 + lane] = static_cast<uint16_t>(bases);
  count = __reduce_add_sync(~0u, warp == 0 ? count : 0);
  if (threadIdx.x == 0) block_counts[block_index] = count;
  const int stride = tile_bytes(r.args.format, ScaleForm::kCsf);
  uint8_t* tile =
      r.args.packed + block_index * r.chunk_count * stride + tile_code_bytes(r.args.format);
  for (int chunk = warp; chunk < r.chunk_count; chunk += kThreads / 32) {
    const uint32_t low = chunk_codes(r, codes[0], chunk), high = chunk_codes(r, codes[1], chunk);
    auto* out = reinterpret_cast<uint32_t*>(tile + static_cast<int64_t>(chunk) * stride);
    if (r.groups == 4) {
      auto bytes = [](uint32_t v) {
        return (v & 0xF) | (v & 0xF0) << 4 | (v & 0xF00) << 8 | (v & 0xF000) << 12;
      };
      out[lane] = bytes(low) | bytes(high) << 4;
    } else {
      uint32_t word = (low | high << 16) << 2 * (lane % 8);
      for (int d = 1; d < 8; d *= 2) word |= __shfl_xor_sync(~0u, word, d);
      if (lane % 8 == 0) out[lane / 8] = word;
    }
  }
}

/// Puts a tile's sorted exceptions [i, end) behind its codes, as far as a warp's share has room.
__device__ void fill_room(const IndexRows& r, int64_t tile, uint32_t i, uint32_t end) {
  const int room = csf_room(r.args.format), warp_bytes = 16 * r.groups;
  auto* out = reinterpret_cast<uint16_t*>(
      r.args.packed + tile * tile_bytes(r.args.format, ScaleForm::kCsf) +
      tile_code_bytes(r.args.format) + csf_code_bytes(r.args.format));
  for (int warp = 0; warp < 4; ++warp) {
    int count = 0;
    for (; i < end; ++i) {
      const uint32_t word = r.args.exceptions[i], byte = word & 0xFF;
      if (static_cast<int>(byte) / warp_bytes != warp) break;
      if (count < room) {
        out[count] = static_cast<uint16_t>(word >> 24 << 8 | 0x80u |
                                           byte % static_cast<uint32_t>(warp_bytes));
      }
      ++count;
    }
    for (int k = count > room ? 0 : count; k < room; ++k) out[k] = 0;
    if (count > room) out[0] = kCsfOverflow;
    out += room;
  }
}

/// Exceptions of one row block, tile by tile.
__global__ void __launch_bounds__(kThreads)
    place_exceptions_kernel(const IndexRows r, const uint32_t* block_begin) {
  extern __shared__ uint32_t cursor[];  // [chunks + 1]
  __shared__ uint32_t warp_sums[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, warp = thread / 32;
  const int64_t block_index = blockIdx.x, expert = block_index / r.blocks;
  const int row_in_block = thread / 2;  // two threads a row
  const int row_warp = row_in_block / 16, g = row_in_block % 8, high = row_in_block / 8 % 2;
  const SourceRow row = source_row(r, expert, block_index % r.blocks, row_warp, g, high);
  const uint32_t begin = row.index < 0 ? 0 : row.row_begin[row.index];
  const uint32_t end = row.index < 0 ? 0 : row.row_begin[row.index + 1];
  const auto first = static_cast<uint32_t>(row.in_plane * r.scale_cols);
  for (int c = thread; c < r.chunk_count; c += kThreads) cursor[c] = 0;
  __syncthreads();
  for (uint32_t i = begin + thread % 2; i < end; i += 2) {
    const uint32_t column = (row.exceptions[i] & 0xFFFFFF) - first;
    atomicAdd(&cursor[column / r.groups], 1u);
  }
  __syncthreads();
  // Exclusive sums over the chunks.
  uint32_t carry = block_begin[block_index];
  uint32_t* tile_begin = r.args.exception_begin + block_index * r.chunk_count;
  for (int c0 = 0; c0 < r.chunk_count; c0 += kThreads) {
    const int c = c0 + thread;
    const uint32_t mine = c < r.chunk_count ? cursor[c] : 0;
    uint32_t sum = mine;
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    uint32_t before = carry + sum - mine;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += warp_sums[w];
      carry += warp_sums[w];
    }
    if (c < r.chunk_count) {
      tile_begin[c] = before;
      cursor[c] = before;
    }
    __syncthreads();
  }
  if (block_index + 1 == gridDim.x && thread == 0) tile_begin[r.chunk_count] = carry;
  for (uint32_t i = begin + thread % 2; i < end; i += 2) {
    const uint32_t word = row.exceptions[i];
    const uint32_t column = (word & 0xFFFFFF) - first;
    const uint32_t chunk = column / r.groups, group = column % r.groups;
    const uint32_t byte = ((row_warp * 8u + g) * r.groups + group) * 2 + high;
    r.args.exceptions[atomicAdd(&cursor[chunk], 1u)] = (word & 0xFF000000u) | chunk << 8 | byte;
  }
  __syncthreads();
  // The order of the atomics must not show: a tile's few words are sorted.
  for (int c = thread; c < r.chunk_count; c += kThreads) {
    const uint32_t tile_end = cursor[c];
    for (uint32_t i = tile_begin[c] + 1; i < tile_end; ++i) {
      const uint32_t word = r.args.exceptions[i];
      uint32_t j = i;
      for (; j > tile_begin[c]; --j) {
        const uint32_t other = r.args.exceptions[j - 1];
        if ((other & 0xFFFFFF) < (word & 0xFFFFFF)) break;
        r.args.exceptions[j] = other;
      }
      r.args.exceptions[j] = word;
    }
    fill_room(r, block_index * r.chunk_count + c, tile_begin[c], tile_end);
  }
}

int64_t all_blocks(const CsfIndexArgs& args) {
  return args.experts * row_blocks(args.product, args.hidden, args.inter);
}

}  // namespace

int64_t csf_index_scratch_bytes(const CsfIndexArgs& args) { return 4 * (all_blocks(args) + 1); }

Result<void> csf_index(const CsfIndexArgs& args, void* scratch, cudaStream_t stream) {
  if (!has_csf(args.format)) {
    return Error(Code::kUnsupported,
                 cat("compressed scales of format ", formats::block_format(args.format).name));
  }
  const bool down = args.product == Product::kDown;
  const int64_t cols = down ? args.inter : args.hidden;
  IndexRows r = {};
  r.args = args;
  r.rows = down ? args.hidden : args.inter;
  r.blocks = static_cast<int>(row_blocks(args.product, args.hidden, args.inter));
  r.chunk_count = static_cast<int>(chunks(cols));
  r.scale_cols = static_cast<int>(cols / group_cols(args.format));
  r.width = static_cast<int>(codec::csf_row_bytes(csf_kind_of(args.format), r.scale_cols));
  r.groups = kTileCols / group_cols(args.format);
  auto* counts = static_cast<uint32_t*>(scratch);
  const auto grid = static_cast<unsigned>(all_blocks(args));
  place_codes_kernel<<<grid, kThreads, 0, stream>>>(r, counts);
  csf_scan_kernel<<<1, kScanThreads, 0, stream>>>(counts, all_blocks(args));
  place_exceptions_kernel<<<grid, kThreads, static_cast<size_t>(4 * (r.chunk_count + 1)), stream>>>(
      r, counts);
  const cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) {
    return Error(Code::kInternal, cat("csf index kernels: ", cudaGetErrorString(e)));
  }
  return {};
}

}  // namespace nibble::kernels::cuda
