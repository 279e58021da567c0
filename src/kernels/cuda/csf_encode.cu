#include <cuda_runtime.h>

#include "kernels/cuda/csf_base.cuh"
#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/csf_scan.cuh"
#include "kernels/cuda/ptx.cuh"

namespace nibble::kernels::cuda {
namespace {

constexpr int kMaxStagedBytes = 96 * 1024;  // of a CTA; rows too long for it are read in place

struct EncodeArgs {
  const uint8_t* planes;
  CsfStreams out;
  ScanState* states;  // a CTA each, zero
  int pitch;          // bytes from row to row in shared memory; 0: rows are read in place
};

/// Writes the row's codes (`out` may be the row itself: no byte is written before it was read) and
/// returns its number of exceptions. The first kListed words of them, with positions from `first`
/// on, go to `list` in shared memory, 128 bytes from one to the next.
template <CsfKind kind, int kPiece>
__device__ uint32_t pack_row(const uint8_t* row, int cols, uint32_t base, uint8_t* out,
                             uint32_t first, uint32_t list) {
  constexpr int kBits = kind == CsfKind::kNvfp4 ? 4 : 1, kWords = CsfPiece<kPiece>::kWords;
  uint32_t exceptions = 0, pending = 0;
  int pending_bits = 0;
  CsfPiece<kPiece> next;
  next.load(row);
  for (int c = 0; c < cols; c += kPiece) {
    const CsfPiece<kPiece> piece = next;
    if (c + kPiece < cols) next.load(row + c + kPiece);
    uint32_t packed[kWords], outside = 0;  // outside: bit i for cell i of the piece
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const CsfFour four = csf_four<kind>(piece.words[i], base);
      constexpr uint32_t kMask = kCsfPieceMask<kPiece>;
      outside |= csf_pack_four<CsfKind::kMxfp4>((four.outside & kMask) >> 7) << 4 * i;
      packed[i] = csf_pack_four<kind>(four.codes & kMask);
    }
    for (; outside != 0; outside &= outside - 1) {
      const int at = c + __ffs(static_cast<int>(outside)) - 1;
      if (exceptions < kListed<kind>) {
        smem_word(list + exceptions * 128u) =
            static_cast<uint32_t>(row[at]) << 24 | (first + static_cast<uint32_t>(at));
      }
      ++exceptions;
    }
    if constexpr (kPiece * kBits == 64) {
      *reinterpret_cast<uint2*>(out) =
          make_uint2(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16);
      out += 8;
    } else if constexpr (kPiece * kBits == 32) {
      *reinterpret_cast<uint32_t*>(out) = packed[0] | packed[1] << 16;
      out += 4;
    } else if constexpr (kPiece == 16) {
      *reinterpret_cast<uint16_t*>(out) =
          static_cast<uint16_t>(packed[0] | packed[1] << 4 | packed[2] << 8 | packed[3] << 12);
      out += 2;
    } else if constexpr (kPiece * kBits == 16) {
      *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(packed[0]);
      out += 2;
    } else if constexpr (kPiece == 8) {
      *out++ = static_cast<uint8_t>(packed[0] | packed[1] << 4);
    } else {
      pending |= packed[0] << pending_bits;
      pending_bits += kPiece * kBits;
      if (pending_bits == 8) {
        *out++ = static_cast<uint8_t>(pending);
        pending = 0;
        pending_bits = 0;
      }
    }
  }
  if (pending_bits != 0) *out = static_cast<uint8_t>(pending);
  return exceptions;
}

/// Brings `count` rows from `planes` to shared memory, by a whole warp.
__device__ __forceinline__ void stage_rows(const uint8_t* planes, int count, int cols, int pitch,
                                           uint8_t* rows, int lane) {
  auto copy = [&](int to, int from) { copy_unit_async(smem_address(rows + to), planes + from); };
  if (pitch == cols) {
    for (int i = 16 * lane; i < count * cols; i += 16 * 32) copy(i, i);
  } else {
    const int units = cols / 16;
    for (CsfWalk at(lane, units); at.row < count; at.advance(32, units)) {
      copy(at.row * pitch + 16 * at.unit, at.row * cols + 16 * at.unit);
    }
  }
  commit_copies();
  wait_copies<0>();
  __syncwarp();
}

/// Takes packed rows from shared memory, where they lie `pitch` bytes apart, to their slabs; by a
/// whole warp. `row`: the first, a multiple of 32.
template <typename Unit>
__device__ __forceinline__ void store_rows(const CsfRows& r, uint8_t* fixed, int64_t row, int count,
                                           const uint8_t* rows, int pitch, int lane) {
  constexpr int kBytes = static_cast<int>(sizeof(Unit));
  const int units = r.width / kBytes;
  uint8_t* first = csf_packed_row(r, fixed, row);
  for (CsfWalk at(lane, units); at.row < count; at.advance(32, units)) {
    // Between the two slabs lie the second one's bases.
    *reinterpret_cast<Unit*>(first + at.row * r.width + at.row / 16 * 16 + at.unit * kBytes) =
        *reinterpret_cast<const Unit*>(rows + at.row * pitch + at.unit * kBytes);
  }
}

/// The whole encoding in one pass over the planes. A warp brings 32 rows to shared memory, a lane
/// works through each; codes and exceptions wait there until the CTA knows where they go.
template <CsfKind kind, int kPiece, bool staged>
__global__ void __launch_bounds__(kCsfThreads)
    encode_kernel(const CsfRows r, const EncodeArgs args) {
  __shared__ uint32_t warp_counts[kCsfThreads / 32];
  __shared__ uint32_t before_cta;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t warp_row = static_cast<int64_t>(blockIdx.x) * kCsfThreads + warp * 32;
  const int64_t row = warp_row + lane;
  const int count = static_cast<int>(min(max(r.rows - warp_row, int64_t{0}), int64_t{32}));
  const bool valid = lane < count;
  const auto share = static_cast<uint32_t>(warp * (kBinBytes<kind> + 32 * args.pitch));
  const uint32_t bins = share + 4 * static_cast<uint32_t>(lane);
  uint8_t* rows = reinterpret_cast<uint8_t*>(csf_smem) + share + kBinBytes<kind>;
  const uint8_t* bytes = args.planes + row * r.cols;
#pragma unroll 4
  for (int i = 0; i <= kBins<kind>; ++i) smem_word(bins + static_cast<uint32_t>(i) * 128u) = 0;
  if constexpr (staged) {
    stage_rows(args.planes + warp_row * r.cols, count, r.cols, args.pitch, rows, lane);
  }
  uint8_t* own = rows + lane * args.pitch;
  int base = 0;
  if (valid) {
    if constexpr (staged) {
      base = base_near_mean<kind, kPiece>(own, r.cols, bins);
    } else {
      base = base_near_mean<kind, kPiece>(bytes, r.cols, bins);
    }
  }
  for (unsigned open = __ballot_sync(~0u, base < 0); open != 0; open &= open - 1) {
    const int owner = __ffs(static_cast<int>(open)) - 1;
    const int found = base_of_any_row<kind>(args.planes + (warp_row + owner) * r.cols, r.cols,
                                            &smem_word(share), lane);
    if (lane == owner) base = found;
  }
  __syncwarp();
  uint32_t exceptions = 0;
  const auto first = static_cast<uint32_t>(row) % static_cast<uint32_t>(r.expert_rows) *
                     static_cast<uint32_t>(r.cols);
  if (valid) {
    const auto b = static_cast<uint32_t>(base);
    csf_slab(r, args.out.fixed, row)[row % 16] = static_cast<uint8_t>(base);
    if constexpr (staged) {
      exceptions = pack_row<kind, kPiece>(own, r.cols, b, own, first, bins);
    } else {
      exceptions = pack_row<kind, kPiece>(bytes, r.cols, b, csf_packed_row(r, args.out.fixed, row),
                                          first, bins);
    }
  }
  uint32_t sum = exceptions;
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_counts[warp] = sum;
  __syncthreads();
  uint32_t of_cta = 0, at = sum - exceptions;
#pragma unroll
  for (int w = 0; w < kCsfThreads / 32; ++w) {
    if (w < warp) at += warp_counts[w];
    of_cta += warp_counts[w];
  }
  if (threadIdx.x == 0) scan_publish(args.states, blockIdx.x, of_cta);
  if constexpr (staged) {
    if (r.width % 16 == 0 && r.cols % 16 == 0) {
      store_rows<uint4>(r, args.out.fixed, warp_row, count, rows, args.pitch, lane);
    } else if (r.width % 4 == 0 && r.cols % 4 == 0) {
      store_rows<uint32_t>(r, args.out.fixed, warp_row, count, rows, args.pitch, lane);
    } else {
      store_rows<uint8_t>(r, args.out.fixed, warp_row, count, rows, args.pitch, lane);
    }
  }
  if (warp == 0) {
    const uint32_t before = scan_before(args.states, blockIdx.x, of_cta, lane);
    if (lane == 0) before_cta = before;
  }
  __syncthreads();
  if (!valid) return;
  at += before_cta;
  args.out.row_begin[row] = at;
  if (row == r.rows - 1) args.out.row_begin[r.rows] = at + exceptions;
  const auto capacity = static_cast<uint32_t>(args.out.capacity);
  if (exceptions <= kListed<kind>) {
    for (uint32_t i = 0; i < exceptions && at + i < capacity; ++i) {
      args.out.exceptions[at + i] = smem_word(bins + i * 128u);
    }
    return;
  }
  // More than were kept: the row is read again.
  for (int c = 0; c < r.cols && at < capacity; ++c) {
    const uint32_t value = bytes[c];
    if (value - static_cast<uint32_t>(base) >= static_cast<uint32_t>(kCsfWindow<kind>)) {
      args.out.exceptions[at++] = value << 24 | (first + static_cast<uint32_t>(c));
    }
  }
}

template <CsfKind kind>
__global__ void __launch_bounds__(kCsfThreads)
    decode_kernel(const CsfRows r, uint8_t* fixed, const uint32_t* row_begin,
                  const uint32_t* exceptions, uint8_t* planes) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kCsfThreads / 32) + threadIdx.x / 32;
  if (row >= r.rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t base = csf_slab(r, fixed, row)[row % 16];
  const uint8_t* codes = csf_packed_row(r, fixed, row);
  uint8_t* out = planes + row * r.cols;
  for (int c = lane; c < r.cols; c += 32) {
    const uint32_t code =
        kind == CsfKind::kNvfp4 ? codes[c / 2] >> c % 2 * 4 & 15u : codes[c / 8] >> c % 8 & 1u;
    out[c] = static_cast<uint8_t>(base + code);
  }
  __syncwarp();
  const auto first = static_cast<uint32_t>(row % r.expert_rows * r.cols);
  for (uint32_t i = row_begin[row] + static_cast<uint32_t>(lane); i < row_begin[row + 1]; i += 32) {
    out[(exceptions[i] & 0xFFFFFF) - first] = static_cast<uint8_t>(exceptions[i] >> 24);
  }
}

template <CsfKind kind>
__global__ void __launch_bounds__(kCsfThreads)
    check_rows_kernel(const CsfRows r, uint8_t* fixed, const uint32_t* exceptions,
                      const uint32_t* expert_begin, uint32_t* row_begin, int* faults) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCsfThreads + threadIdx.x;
  if (row > r.rows) return;
  const int64_t expert = row / r.expert_rows;
  if (row == r.rows) {
    row_begin[row] = expert_begin[expert];
    return;
  }
  int found = 0;
  if (csf_slab(r, fixed, row)[row % 16] > kCsfMaxBase<kind>) found |= kCsfBaseRange;
  if (kind == CsfKind::kMxfp4 && r.cols % 8 != 0 &&
      csf_packed_row(r, fixed, row)[r.width - 1] >> r.cols % 8 != 0) {
    found |= kCsfTailBits;
  }
  if (found != 0) atomicOr(faults, found);
  // First exception at or after the row's first cell.
  const auto first = static_cast<uint32_t>(row % r.expert_rows * r.cols);
  uint32_t begin = expert_begin[expert], end = expert_begin[expert + 1];
  while (begin < end) {
    const uint32_t middle = begin + (end - begin) / 2;
    if ((exceptions[middle] & 0xFFFFFF) < first) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  row_begin[row] = begin;
}

/// One CTA an expert.
__global__ void __launch_bounds__(kCsfThreads)
    check_exceptions_kernel(const CsfRows r, const uint32_t* exceptions,
                            const uint32_t* expert_begin, int* faults) {
  const uint32_t begin = expert_begin[blockIdx.x], end = expert_begin[blockIdx.x + 1];
  const auto cells = static_cast<uint32_t>(r.expert_rows) * static_cast<uint32_t>(r.cols);
  int found = 0;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kCsfThreads) {
    const uint32_t position = exceptions[i] & 0xFFFFFF;
    if (position >= cells) found |= kCsfExceptionRange;
    if (i > begin && (exceptions[i - 1] & 0xFFFFFF) >= position) found |= kCsfExceptionOrder;
  }
  if (found != 0) atomicOr(faults, found);
}

CsfRows make_rows(const CsfStack& s) {
  return {s.experts * s.rows, static_cast<int>(s.rows), static_cast<int>(s.cols),
          static_cast<int>(codec::csf_row_bytes(s.kind, s.cols))};
}
int64_t blocks_of(const CsfStack& s) {
  return (s.experts * s.rows + kCsfThreads - 1) / kCsfThreads;
}

Result<void> check_stack(const CsfStack& s) {
  NIBBLE_TRY(codec::check_csf_geometry(s.kind, s.rows, s.cols));
  if (s.experts < 1 || s.experts > (int64_t{1} << 32) / (s.rows * s.cols)) {
    return Error(Code::kInvalidArgument, cat("csf stack of ", s.experts, " planes of ", s.rows,
                                             " x ", s.cols, ": 1 to 2^32 cells in all"));
  }
  return {};
}
Result<void> launched(const char* what) {
  const cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) return {};
  return Error(Code::kInternal, cat(what, ": ", cudaGetErrorString(e)));
}

template <CsfKind kind, int kPiece, bool staged>
void launch_encode(const CsfStack& stack, EncodeArgs args, cudaStream_t stream) {
  const CsfRows r = make_rows(stack);
  const int smem = kCsfThreads / 32 * (kBinBytes<kind> + 32 * args.pitch);
  const auto kernel = encode_kernel<kind, kPiece, staged>;
  if (smem > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  }
  kernel<<<static_cast<unsigned>(blocks_of(stack)), kCsfThreads, static_cast<size_t>(smem),
           stream>>>(r, args);
}

template <CsfKind kind>
void launch_encode(const CsfStack& stack, EncodeArgs args, cudaStream_t stream) {
  // Pieces of an odd number a row spread over all banks; longest pieces may need a gap.
  const int64_t pitch = stack.cols % 32 == 0 ? stack.cols + 16 : stack.cols;
  const bool staged = kCsfThreads / 32 * (kBinBytes<kind> + 32 * pitch) <= kMaxStagedBytes;
  args.pitch = staged ? static_cast<int>(pitch) : 0;
  if (!staged) {
    if (stack.cols % 16 == 0) {
      launch_encode<kind, 16, false>(stack, args, stream);
    } else {
      launch_encode<kind, kind == CsfKind::kNvfp4 ? 2 : 1, false>(stack, args, stream);
    }
  } else if (stack.cols % 16 == 0) {
    launch_encode<kind, 16, true>(stack, args, stream);
  } else if (stack.cols % 8 == 0) {
    launch_encode<kind, 8, true>(stack, args, stream);
  } else if (stack.cols % 4 == 0) {
    launch_encode<kind, 4, true>(stack, args, stream);
  } else if (stack.cols % 2 == 0) {
    launch_encode<kind, 2, true>(stack, args, stream);
  } else if constexpr (kind == CsfKind::kMxfp4) {
    launch_encode<kind, 1, true>(stack, args, stream);
  }
}

}  // namespace

int64_t csf_encode_scratch_bytes(const CsfStack& stack) {
  return static_cast<int64_t>(sizeof(ScanState)) * blocks_of(stack);
}

Result<void> csf_encode(const CsfStack& stack, const uint8_t* planes, const CsfStreams& out,
                        void* scratch, cudaStream_t stream) {
  NIBBLE_TRY(check_stack(stack));
  cudaMemsetAsync(scratch, 0, static_cast<size_t>(csf_encode_scratch_bytes(stack)), stream);
  const EncodeArgs args{planes, out, static_cast<ScanState*>(scratch), 0};
  if (stack.kind == CsfKind::kNvfp4) {
    launch_encode<CsfKind::kNvfp4>(stack, args, stream);
  } else {
    launch_encode<CsfKind::kMxfp4>(stack, args, stream);
  }
  return launched("csf encode kernel");
}

Result<void> csf_decode(const CsfStack& stack, const CsfStreams& in, uint8_t* planes,
                        cudaStream_t stream) {
  NIBBLE_TRY(check_stack(stack));
  constexpr int kRows = kCsfThreads / 32;
  const auto grid = static_cast<unsigned>((stack.experts * stack.rows + kRows - 1) / kRows);
  const auto kernel = stack.kind == CsfKind::kNvfp4 ? decode_kernel<CsfKind::kNvfp4>
                                                    : decode_kernel<CsfKind::kMxfp4>;
  kernel<<<grid, kCsfThreads, 0, stream>>>(make_rows(stack), in.fixed, in.row_begin, in.exceptions,
                                           planes);
  return launched("csf decode kernel");
}

Result<void> csf_check(const CsfStack& stack, const CsfStreams& streams,
                       const uint32_t* expert_begin, int* faults, cudaStream_t stream) {
  NIBBLE_TRY(check_stack(stack));
  const CsfRows r = make_rows(stack);
  const auto grid = static_cast<unsigned>((r.rows + kCsfThreads) / kCsfThreads);
  const auto kernel = stack.kind == CsfKind::kNvfp4 ? check_rows_kernel<CsfKind::kNvfp4>
                                                    : check_rows_kernel<CsfKind::kMxfp4>;
  kernel<<<grid, kCsfThreads, 0, stream>>>(r, streams.fixed, streams.exceptions, expert_begin,
                                           streams.row_begin, faults);
  check_exceptions_kernel<<<static_cast<unsigned>(stack.experts), kCsfThreads, 0, stream>>>(
      r, streams.exceptions, expert_begin, faults);
  return launched("csf check kernels");
}

}  // namespace nibble::kernels::cuda
