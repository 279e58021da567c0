#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/csf_rows.cuh"
#include "kernels/cuda/dequant.cuh"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 192;  // one CTA a row block, three threads a row
constexpr int kSegment = 64;   // chunks that a CTA holds at once

struct IndexRows {
  CsfIndexArgs args;
  int64_t rows;             // of a matrix (a source)
  int blocks, chunk_count;  // of an expert
  int scale_cols, width;
  int pitch;  // bytes from one pair of rows to the next in shared memory
  bool stacked;
};

/// What differs between the codecs. `format`: any that uses the codec.
template <CsfKind kind>
struct TileForm {
  static constexpr FormatId kFormat = kind == CsfKind::kNvfp4 ? FormatId::kNvfp4 : FormatId::kMxfp4;
  static constexpr int kGroups = kTileCols / group_cols(kFormat);  // scale columns of a chunk
  static constexpr uint32_t kCode = (1u << csf_bits(kFormat)) - 1;
  static constexpr int kWords = csf_group_bytes(kFormat) / 4;  // of a group
  static constexpr int kAtOnce = kThreads / kWords;  // groups whose words are stored together
  /// A scale's value as the kernels see it, and its distance from the row's base.
  static __device__ __forceinline__ uint32_t value(uint32_t scale) {
    return kind == CsfKind::kNvfp4 ? scale & 127 : scale;
  }
  static __device__ __forceinline__ uint32_t distance(uint32_t scale, uint32_t base) {
    return kind == CsfKind::kNvfp4 ? (scale - base) & 127 : scale - base;
  }
};

/// The row block's rows, number 16 warp + 8 high + g, and its exceptions in the segment at hand.
/// Bytes of the masks: one for a pair of rows (number 8 warp + g: a low and its high row) in a
/// chunk, bit 2 group + high.
struct BlockRows {
  const uint8_t* codes[kTileRows];  // null: padding
  uint32_t begin[kTileRows], end[kTileRows], first_cell[kTileRows];
  uint8_t base[kTileRows], shift[kTileRows];  // of the tile form; stream's base - it
  uint32_t odd_bases;                         // bit w: a base of warp w is not plain
  uint32_t before;                            // the streams' exceptions before the row block
  uint32_t first[4], count[4];                // the warps' places in the list, and what is in them
  uint32_t tile_begin[kSegment * 4];          // where a chunk's and warp's exceptions go
  alignas(16) uint32_t left[kSegment * 8];    // masks: of the scales that go to the list
};
__device__ __forceinline__ int low_row(int pair) { return pair / 8 * 16 + pair % 8; }

/// Where row number `row` of the row block lies in the streams; index < 0: padding.
struct SourceRow {
  const CsfStreams* streams = nullptr;
  int64_t index = -1;  // over all planes of the stack
  int64_t in_plane = 0;
};
__device__ __forceinline__ SourceRow source_row(const IndexRows& r, int64_t expert, int64_t block,
                                                int row) {
  const int high = row / 8 % 2;
  SourceRow found;
  const int64_t matrix_row = packed_row(r.args.product, block, row / 16, row % 8, high);
  if (matrix_row >= r.rows) return found;
  const CsfSource& source =
      r.args.product == Product::kGateUp && high != 0 ? r.args.second : r.args.first;
  found.streams = &source.streams;
  found.in_plane = source.first_row + matrix_row;
  found.index = expert * source.plane_rows + found.in_plane;
  return found;
}

/// Exceptions before the row block's pair of row blocks (gate and up) or before the row block.
__device__ uint32_t exceptions_before(const IndexRows& r, int64_t expert, int64_t block) {
  const bool down = r.args.product == Product::kDown;
  const int64_t row = (down ? block : block / 2) * kTileRows;
  const CsfSource &one = r.args.first, &two = r.args.second;
  auto up_to = [&](const CsfSource& s, int64_t plane_row) {
    return s.streams.row_begin[expert * s.plane_rows + plane_row];
  };
  uint32_t before = up_to(one, one.first_row + row) - one.streams.row_begin[0];
  if (down) return before;
  before += up_to(two, two.first_row + row);
  return before - (r.stacked ? up_to(one, one.plane_rows / 2) : two.streams.row_begin[0]);
}

/// What a thread loads about one row: the row block's rows by the first 64 threads, what lies
/// before them by the others.
struct RowFacts {
  uint32_t begin = 0, end = 0, first_cell = 0, stream_base = 16, before = 0;
};
__device__ __forceinline__ RowFacts load_rows(const IndexRows& r, BlockRows& b, int64_t expert,
                                              int64_t block, int thread) {
  RowFacts facts;
  const int row = thread % kTileRows;
  if (thread < kTileRows) {
    const SourceRow found = source_row(r, expert, block, row);
    b.codes[row] = nullptr;
    if (found.index >= 0) {
      const uint8_t* slab = found.streams->fixed + found.index / 16 * (16 * (1 + r.width));
      b.codes[row] = slab + 16 + found.index % 16 * r.width;
      facts.begin = found.streams->row_begin[found.index];
      facts.end = found.streams->row_begin[found.index + 1];
      facts.stream_base = slab[found.index % 16];
      facts.first_cell = static_cast<uint32_t>(found.in_plane * r.scale_cols);
    }
  } else if (thread < 2 * kTileRows) {
    if (r.args.product == Product::kGateUp && block % 2 != 0) {
      const SourceRow found = source_row(r, expert, block - 1, row);
      if (found.index >= 0) {
        const uint32_t* begin = found.streams->row_begin + found.index;
        facts.before = begin[1] - begin[0];
      }
    }
  } else if (row == 0) {
    facts.before = exceptions_before(r, expert, block);
  }
  return facts;
}
template <CsfKind kind>
__device__ __forceinline__ void share_rows(BlockRows& b, CsfWarpRows* out, const RowFacts& facts,
                                           int thread) {
  if (thread < kTileRows) {
    // Padding rows get a plain base: what their scales are does not matter.
    const uint32_t base = csf_tile_base(TileForm<kind>::kFormat, facts.stream_base);
    if (!csf_base_is_plain(TileForm<kind>::kFormat, base)) {
      atomicOr(&b.odd_bases, 1u << thread / 16);
    }
    b.begin[thread] = facts.begin;
    b.end[thread] = facts.end;
    b.first_cell[thread] = facts.first_cell;
    b.base[thread] = static_cast<uint8_t>(base);
    b.shift[thread] = static_cast<uint8_t>(TileForm<kind>::distance(facts.stream_base, base));
    reinterpret_cast<uint8_t*>(out[thread / 16].bases)[2 * (thread % 8) + thread / 8 % 2] =
        static_cast<uint8_t>(base);
  } else if (facts.before != 0) {
    atomicAdd(&b.before, facts.before);
  }
}

/// The stream's codes of the segment, a byte each, the low and the high row's of a pair side by
/// side; 0 in rows and columns that are not.
template <CsfKind kind>
__device__ __forceinline__ void expand_codes(const IndexRows& r, const BlockRows& b, uint8_t* cells,
                                             int first_chunk, int chunk_count, int thread) {
  auto four = [](uint32_t codes) {  // the lowest four codes
    if constexpr (kind == CsfKind::kNvfp4) {
      const uint32_t bytes = (codes | codes << 8) & 0x00FF00FFu;
      return (bytes | bytes << 4) & 0x0F0F0F0Fu;
    } else {
      return (codes & 15) * 0x204081u & 0x01010101u;
    }
  };
  auto store = [&](int pair, int column, uint32_t low, uint32_t high) {
    *reinterpret_cast<uint2*>(cells + pair * r.pitch + 2 * column) =
        make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
  };
  auto expand = [&]<int columns>(int units, const auto& load) {
    for (CsfWalk at(thread, units); at.row < kTileRows / 2; at.advance(kThreads, units)) {
      const uint8_t* low_codes = b.codes[low_row(at.row)];
      const uint8_t* high_codes = b.codes[low_row(at.row) + 8];
      const uint32_t low = low_codes == nullptr ? 0 : load(low_codes, at.unit);
      const uint32_t high = high_codes == nullptr ? 0 : load(high_codes, at.unit);
      store(at.row, columns * at.unit, four(low & 0xFFFF), four(high & 0xFFFF));
      if constexpr (columns == 8) {
        constexpr int kFour = kind == CsfKind::kNvfp4 ? 16 : 4;
        store(at.row, 8 * at.unit + 4, four(low >> kFour), four(high >> kFour));
      }
    }
  };
  if constexpr (kind == CsfKind::kNvfp4) {
    if (r.width % 4 == 0) {
      expand.template operator()<8>(chunk_count / 2, [&](const uint8_t* codes, int unit) {
        return reinterpret_cast<const uint32_t*>(codes)[first_chunk / 2 + unit];
      });
    } else {
      expand.template operator()<4>(chunk_count, [&](const uint8_t* codes, int unit) -> uint32_t {
        const int byte = 2 * (first_chunk + unit);
        const uint32_t one = codes[byte];
        return byte + 1 < r.width ? one | static_cast<uint32_t>(codes[byte + 1]) << 8 : one;
      });
    }
  } else {
    expand.template operator()<8>((chunk_count + 3) / 4, [&](const uint8_t* codes, int unit) {
      return static_cast<uint32_t>(codes[first_chunk / 4 + unit]);
    });
  }
}

/// A thread's share of a row's exceptions, from `i` on, as far as they lie before `end_column`:
/// calls use(word, column). Returns where it stopped.
template <typename F>
__device__ __forceinline__ uint32_t each_exception(const uint32_t* words, uint32_t i, uint32_t end,
                                                   uint32_t first_cell, int end_column,
                                                   const F& use) {
  for (; i < end; i += kThreads / kTileRows) {
    const uint32_t word = words[i];
    const int column = static_cast<int>((word & 0xFFFFFF) - first_cell);
    if (column >= end_column) break;
    use(word, column);
  }
  return i;
}

/// Where the warps' exceptions begin in the list: room for all of their rows in the streams.
__device__ __forceinline__ void place_warps(BlockRows& b, int warp) {
  uint32_t first = b.before;
  for (int row = 0; row < 16 * warp; ++row) first += b.end[row] - b.begin[row];
  b.first[warp] = first;
  b.count[warp] = 0;
}

/// Where the exceptions of the segment's chunks begin, of one warp's rows; by a warp.
__device__ __forceinline__ void place_chunks(BlockRows& b, int warp, int chunk_count, int lane) {
  uint32_t before = b.first[warp] + b.count[warp];
  for (int first = 0; first < chunk_count; first += 32) {
    const int chunk = first + lane;
    uint32_t count = 0;
    if (chunk < chunk_count) {
      const uint2 left = reinterpret_cast<const uint2*>(b.left)[chunk * 4 + warp];
      count = static_cast<uint32_t>(__popc(left.x) + __popc(left.y));
    }
    uint32_t sum = count;
    for (int d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (chunk < chunk_count) b.tile_begin[chunk * 4 + warp] = before + sum - count;
    before += __shfl_sync(~0u, sum, 31);
  }
  __syncwarp();
  if (lane == 0) b.count[warp] = before - b.first[warp];
}

/// Takes the magnitudes of a scale's sixteen weights away. Two scales may share words.
__device__ __forceinline__ void clear_weights(uint8_t* tile, int pair, int t, int high) {
  auto* words = reinterpret_cast<uint32_t*>(tile) + (pair / 8 * 32 + pair % 8 * 4 + t) * 4;
  for (int i = 0; i < 4; ++i) atomicAnd(words + i, ~row_magnitudes(high));
}

/// The segment's words: a thread has one word of every kAtOnce-th group. `block`: the row block.
template <CsfKind kind>
__device__ __forceinline__ void store_words(const IndexRows& r, const BlockRows& b,
                                            const uint8_t* cells, int first_chunk, int chunk_count,
                                            uint8_t* block, int thread) {
  using Form = TileForm<kind>;
  constexpr int kPairsAt = csf_pairs_at(Form::kFormat) / 4;
  const int word = thread % Form::kWords;
  const bool of_pair = word >= kPairsAt;  // for two lanes
  const int warp = of_pair ? (word - kPairsAt) / 16 : word / 32;
  // A lane whose codes the word has: MX lanes share theirs.
  struct Lane {
    const uint8_t* cell;
    uint32_t shift;
  } lanes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int lane = of_pair ? (word - kPairsAt) % 16 * 2 + i : word % 32;
    const int pair = 8 * warp + lane / 4, column = lane % 4 * Form::kGroups / 4;
    lanes[i].cell = cells + pair * r.pitch + 2 * column;
    lanes[i].shift = b.shift[low_row(pair)] | static_cast<uint32_t>(b.shift[low_row(pair) + 8])
                                                  << 16;
  }
  for (int chunk = thread / Form::kWords * kCsfChunks; chunk < chunk_count;
       chunk += Form::kAtOnce * kCsfChunks) {
    // Past the last chunk: any codes of the row.
    auto words_of = [&](const Lane& lane) {
      CsfWords words;
#pragma unroll
      for (int c = 0; c < kCsfChunks; ++c) {
        uint32_t two = 0;
        if (chunk + c < chunk_count) {
          const auto* cell = lane.cell + 2 * (chunk + c) * Form::kGroups;
          two = __byte_perm(*reinterpret_cast<const uint16_t*>(cell), 0, 0x4140);
        }
        const uint32_t codes = (two + lane.shift & Form::kCode * 0x10001u)
                               << csf_shift(Form::kFormat);
        const CsfWords bits = csf_place(Form::kFormat, codes, c);
        words.own |= bits.own;
        words.pair |= bits.pair;
      }
      return words;
    };
    uint32_t value = 0;
    if (kind == CsfKind::kNvfp4 && !of_pair) {
      value = words_of(lanes[0]).own;
    } else {
      value = words_of(lanes[0]).pair;
      if constexpr (kind == CsfKind::kNvfp4) {
        value |= turn_right(words_of(lanes[1]).pair, 32 - csf_turn(Form::kFormat, 1));
      }
    }
    *reinterpret_cast<uint32_t*>(block + csf_group_at(r.args.format, first_chunk + chunk) +
                                 4 * word) = value;
  }
}

template <CsfKind kind>
__global__ void __launch_bounds__(kThreads, 8) index_kernel(const __grid_constant__ IndexRows r) {
  using Form = TileForm<kind>;
  extern __shared__ uint4 index_smem[];  // the segment's cells: [32 pairs][pitch]
  __shared__ BlockRows b;
  uint8_t* cells = reinterpret_cast<uint8_t*>(index_smem);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t block_index = blockIdx.x;
  uint8_t* packed_block =
      r.args.packed + block_index * row_block_bytes(r.args.format, ScaleForm::kCsf, r.chunk_count);
  const auto blocks = static_cast<unsigned>(r.blocks);
  const int64_t expert = blockIdx.x / blocks, block = blockIdx.x % blocks;
  if (thread == 0) b.odd_bases = b.before = 0;
  const RowFacts facts = load_rows(r, b, expert, block, thread);
  __syncthreads();
  // What was loaded about the rows arrives while the codes are fetched.
  expand_codes<kind>(r, b, cells, 0, min(kSegment, r.chunk_count), thread);
  auto* rows = reinterpret_cast<CsfWarpRows*>(packed_block + kCsfRowsAt);
  share_rows<kind>(b, rows, facts, thread);
  __syncthreads();
  if (thread < 4) place_warps(b, thread);  // read behind the next barrier but one
  const int row = thread / (kThreads / kTileRows);
  const int pair = row / 16 * 8 + row % 8, high = row / 8 % 2;
  const bool second = r.args.product == Product::kGateUp && high != 0;
  const uint32_t* words = (second ? r.args.second : r.args.first).streams.exceptions;
  const uint32_t end = b.end[row], first_cell = b.first_cell[row];
  uint32_t next = b.begin[row] + static_cast<uint32_t>(thread % (kThreads / kTileRows));
  for (int first = 0; first < r.chunk_count; first += kSegment) {
    const int chunk_count = min(kSegment, r.chunk_count - first);
    const int first_column = first * Form::kGroups;
    const int end_column = first_column + kSegment * Form::kGroups;
    if (first > 0) expand_codes<kind>(r, b, cells, first, chunk_count, thread);
    for (int i = thread; i < kSegment * 2; i += kThreads) {
      reinterpret_cast<uint4*>(b.left)[i] = {};
    }
    __syncthreads();
    auto mask_bit = [&](int in_row) {
      return 8 * (pair % 4) + 2 * (in_row % Form::kGroups) + high;
    };
    each_exception(words, next, end, first_cell, end_column, [&](uint32_t word, int column) {
      const int in_row = column - first_column, chunk = in_row / Form::kGroups;
      const uint32_t distance = Form::distance(word >> 24, b.base[row]);
      const bool coded = distance <= Form::kCode;
      cells[pair * r.pitch + 2 * in_row + high] =
          static_cast<uint8_t>((coded ? distance : 0) - b.shift[row]);
      if (coded) return;
      if (kind == CsfKind::kNvfp4 && Form::value(word >> 24) == 0) {
        clear_weights(packed_block + tile_at(r.args.format, ScaleForm::kCsf, first + chunk), pair,
                      in_row % Form::kGroups, high);
      } else {
        atomicOr(&b.left[chunk * 8 + pair / 4], 1u << mask_bit(in_row));
      }
    });
    __syncthreads();
    if (thread < 128) place_chunks(b, thread / 32, chunk_count, thread % 32);
    store_words<kind>(r, b, cells, first, chunk_count, packed_block, thread);
    __syncthreads();
    next = each_exception(words, next, end, first_cell, end_column, [&](uint32_t word, int column) {
      const int in_row = column - first_column, chunk = in_row / Form::kGroups;
      const uint32_t* left = b.left + chunk * 8 + pair / 8 * 2;
      const uint32_t bit = 1u << mask_bit(in_row);
      if ((left[pair / 4 % 2] & bit) == 0) return;
      // The list is in the order of the masks' bits.
      int rank = __popc(left[pair / 4 % 2] & (bit - 1));
      if (pair / 4 % 2 != 0) rank += __popc(left[0]);
      const auto scale = static_cast<uint32_t>(pair % 8 * Form::kGroups + in_row % Form::kGroups);
      r.args.exceptions[b.tile_begin[chunk * 4 + pair / 8] + static_cast<uint32_t>(rank)] =
          Form::value(word >> 24) << 24 | static_cast<uint32_t>(first + chunk) << 8 |
          (2 * scale + static_cast<uint32_t>(high));
    });
    __syncthreads();
  }
  if (thread < 4) {
    rows[thread].first = b.first[thread];
    rows[thread].count = b.count[thread];
    rows[thread].odd = b.odd_bases >> thread & 1;
    rows[thread].unused = 0;
  }
}

}  // namespace

Result<void> csf_index(const CsfIndexArgs& args, cudaStream_t stream) {
  if (!has_csf(args.format)) {
    return Error(Code::kUnsupported,
                 cat("compressed scales of format ", formats::block_format(args.format).name));
  }
  const bool down = args.product == Product::kDown;
  const int64_t cols = down ? args.inter : args.hidden;
  const CsfKind kind = csf_kind_of(args.format);
  IndexRows r = {};
  r.args = args;
  r.rows = down ? args.hidden : args.inter;
  r.blocks = static_cast<int>(row_blocks(args.product, args.hidden, args.inter));
  r.chunk_count = static_cast<int>(chunks(cols));
  r.scale_cols = static_cast<int>(cols / group_cols(args.format));
  r.width = static_cast<int>(codec::csf_row_bytes(kind, r.scale_cols));
  r.stacked = !down && args.first.streams.row_begin == args.second.streams.row_begin;
  auto fills = [&](const CsfSource& s, int64_t first_row) {
    return s.first_row == first_row && s.plane_rows == (r.stacked ? 2 : 1) * r.rows;
  };
  const int64_t second_row = r.stacked ? r.rows - args.first.first_row : 0;
  if (!fills(args.first, r.stacked && args.first.first_row != 0 ? r.rows : 0) ||
      (!down && !fills(args.second, second_row))) {
    return Error(Code::kInvalidArgument, "csf index: a source does not fill its planes");
  }
  const int held = std::min(r.chunk_count, kSegment) * (kTileCols / group_cols(args.format));
  r.pitch = (held + 7) / 8 * 16 + 8;  // so that pairs of rows spread over the banks
  const auto kernel =
      kind == CsfKind::kNvfp4 ? index_kernel<CsfKind::kNvfp4> : index_kernel<CsfKind::kMxfp4>;
  kernel<<<static_cast<unsigned>(args.experts * r.blocks), kThreads,
           static_cast<size_t>(kTileRows / 2 * r.pitch), stream>>>(r);
  const cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) {
    return Error(Code::kInternal, cat("csf index kernel: ", cudaGetErrorString(e)));
  }
  return {};
}

}  // namespace nibble::kernels::cuda
