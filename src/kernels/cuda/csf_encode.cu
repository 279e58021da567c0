#include <cuda_runtime.h>

#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/csf_rows.cuh"
#include "kernels/cuda/csf_scan.cuh"

namespace nibble::kernels::cuda {
namespace {

constexpr int kBins = 64;               // values around the row's mean that are counted one by one
constexpr int kMaxCountedCols = 65535;  // counters have 16 bits

/// Counters of a warp: bin b of lane l is the half-word 32 b + l, so that lanes meet in a bank only
/// in pairs. Bin kBins counts the values outside. The slow path uses the space as 256 words.
struct WarpBins {
  __align__(16) uint16_t count[(kBins + 1) * 32];
};

/// The base of one row by all lanes of a warp: a whole histogram. For rows that the 64 counters
/// around the mean cannot decide.
template <CsfKind kind>
__device__ int base_of_any_row(const uint8_t* row, int cols, uint32_t* bins, int lane) {
  constexpr int kWindow = kCsfWindow<kind>, kMax = kCsfMaxBase<kind>;
  __syncwarp();
  for (int i = lane; i < 256; i += 32) bins[i] = 0;
  __syncwarp();
  for (int c = lane; c < cols; c += 32) atomicAdd(&bins[row[c]], 1u);
  __syncwarp();
  // Largest count, lowest base: as one key.
  unsigned long long best = 0;
  for (int base = lane; base <= kMax; base += 32) {
    uint32_t covered = 0;
    for (int i = 0; i < kWindow; ++i) covered += bins[base + i];
    const unsigned long long key = static_cast<unsigned long long>(covered) << 8 | (255 - base);
    best = key > best ? key : best;
  }
  for (int d = 16; d > 0; d /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, best, d);
    best = other > best ? other : best;
  }
  __syncwarp();
  return 255 - static_cast<int>(best & 0xFF);
}

/// The base of the lane's row, or -1 if the counters do not prove it.
template <CsfKind kind, int kPiece>
__device__ int base_near_mean(const uint8_t* row, int cols, uint16_t* bins) {
  constexpr int kWindow = kCsfWindow<kind>;
  uint32_t sum = 0;
#pragma unroll 4
  for (int c = 0; c < cols; c += kPiece) {
    CsfPiece<kPiece> piece;
    piece.load(row + c);
#pragma unroll
    for (int i = 0; i < CsfPiece<kPiece>::kWords; ++i) {
      sum = __dp4a(piece.words[i], 0x01010101u, sum);
    }
  }
  const int mean = static_cast<int>(sum / static_cast<uint32_t>(cols));
  const int low = min(max(mean - kBins / 2, 0), 256 - kBins);
#pragma unroll 2
  for (int c = 0; c < cols; c += kPiece) {
    CsfPiece<kPiece> piece;
    piece.load(row + c);
#pragma unroll
    for (int i = 0; i < CsfPiece<kPiece>::kWords; ++i) {
#pragma unroll
      for (int b = 0; b < (kPiece < 4 ? kPiece : 4); ++b) {
        const uint32_t value = __byte_perm(piece.words[i], 0, 0x4440 + b);
        const uint32_t bin = min(value - static_cast<uint32_t>(low), static_cast<uint32_t>(kBins));
        bins[bin * 32] = static_cast<uint16_t>(bins[bin * 32] + 1);
      }
    }
  }
  uint32_t window[kWindow];
  uint32_t covered = 0, best = 0, low_edge = 0, high_edge = 0;
#pragma unroll
  for (int i = 0; i < kBins; ++i) {
    const uint32_t here = bins[i * 32];
    if (i < kWindow - 1) low_edge += here;
    if (i > kBins - kWindow) high_edge += here;
    covered += here;
    if (i >= kWindow) covered -= window[i % kWindow];
    window[i % kWindow] = here;
    if (i >= kWindow - 1) {
      best = max(best, covered << 8 | static_cast<uint32_t>(kBins - 1 - (i - kWindow + 1)));
    }
  }
  // A window that leaves the counted range covers at most its edge and everything outside.
  const uint32_t outside = bins[kBins * 32];
  const uint32_t others =
      outside + max(low > 0 ? low_edge : 0u, low < 256 - kBins ? high_edge : 0u);
  if ((best >> 8) <= others) return -1;
  return low + kBins - 1 - static_cast<int>(best & 0xFF);
}

/// Writes the row's codes and returns its number of exceptions.
template <CsfKind kind, int kPiece>
__device__ uint32_t pack_row(const uint8_t* row, int cols, uint32_t base, uint8_t* out) {
  constexpr int kBits = kind == CsfKind::kNvfp4 ? 4 : 1;
  uint32_t exceptions = 0, pending = 0;
  int pending_bits = 0;
#pragma unroll 2
  for (int c = 0; c < cols; c += kPiece) {
    CsfPiece<kPiece> piece;
    piece.load(row + c);
    uint32_t packed[CsfPiece<kPiece>::kWords];
#pragma unroll
    for (int i = 0; i < CsfPiece<kPiece>::kWords; ++i) {
      const CsfFour four = csf_four<kind>(piece.words[i], base);
      constexpr uint32_t kMask = kCsfPieceMask<kPiece>;
      exceptions += __popc(four.outside & kMask);
      packed[i] = csf_pack_four<kind>(four.codes & kMask);
    }
    if constexpr (kPiece * kBits == 64) {
      *reinterpret_cast<uint2*>(out) =
          make_uint2(packed[0] | packed[1] << 16, packed[2] | packed[3] << 16);
      out += 8;
    } else if constexpr (kPiece == 16) {
      *reinterpret_cast<uint16_t*>(out) =
          static_cast<uint16_t>(packed[0] | packed[1] << 4 | packed[2] << 8 | packed[3] << 12);
      out += 2;
    } else if constexpr (kPiece * kBits == 16) {
      *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(packed[0]);
      out += 2;
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

/// Chooses bases and writes the fixed tensor; counts[row] and block_counts get exception counts.
template <CsfKind kind, int kPiece>
__global__ void __launch_bounds__(kCsfThreads)
    choose_kernel(const CsfRows r, const uint8_t* planes, uint8_t* fixed, uint32_t* counts,
                  uint32_t* block_counts) {
  __shared__ WarpBins all_bins[kCsfThreads / 32];
  __shared__ uint32_t warp_counts[kCsfThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  WarpBins& bins = all_bins[warp];
  auto* words = reinterpret_cast<uint4*>(bins.count);
  for (int i = lane; i < static_cast<int>(sizeof(WarpBins) / 16); i += 32) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCsfThreads + threadIdx.x;
  const bool valid = row < r.rows;
  const uint8_t* bytes = planes + row * r.cols;
  int base = 0;
  if (valid) {
    base = r.cols <= kMaxCountedCols
               ? base_near_mean<kind, kPiece>(bytes, r.cols, bins.count + lane)
               : -1;
  }
  for (unsigned open = __ballot_sync(~0u, base < 0); open != 0; open &= open - 1) {
    const int owner = __ffs(static_cast<int>(open)) - 1;
    const int found = base_of_any_row<kind>(planes + (row - lane + owner) * r.cols, r.cols,
                                            reinterpret_cast<uint32_t*>(bins.count), lane);
    if (lane == owner) base = found;
  }
  uint32_t exceptions = 0;
  if (valid) {
    csf_slab(r, fixed, row)[row % 16] = static_cast<uint8_t>(base);
    exceptions = pack_row<kind, kPiece>(bytes, r.cols, static_cast<uint32_t>(base),
                                        csf_packed_row(r, fixed, row));
    counts[row] = exceptions;
  }
  const uint32_t total = __reduce_add_sync(~0u, exceptions);
  if (lane == 0) warp_counts[warp] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t sum = 0;
    for (const uint32_t v : warp_counts) sum += v;
    block_counts[blockIdx.x] = sum;
  }
}

/// Writes exceptions; `row_begin` turns from counts into begins.
template <CsfKind kind, int kPiece>
__global__ void __launch_bounds__(kCsfThreads)
    list_kernel(const CsfRows r, const uint8_t* planes, uint8_t* fixed, const uint32_t* block_begin,
                uint32_t* row_begin, uint32_t* exceptions, uint32_t capacity) {
  __shared__ uint32_t warp_counts[kCsfThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCsfThreads + threadIdx.x;
  const uint32_t mine = row < r.rows ? row_begin[row] : 0;
  uint32_t sum = mine;
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_counts[warp] = sum;
  __syncthreads();
  if (row >= r.rows) return;
  uint32_t at = block_begin[blockIdx.x] + sum - mine;
  for (int w = 0; w < warp; ++w) at += warp_counts[w];
  row_begin[row] = at;
  if (row == r.rows - 1) row_begin[r.rows] = at + mine;
  if (mine == 0) return;
  const uint8_t* bytes = planes + row * r.cols;
  const uint32_t base = csf_slab(r, fixed, row)[row % 16];
  const auto first = static_cast<uint32_t>(row % r.expert_rows * r.cols);
#pragma unroll 2
  for (int c = 0; c < r.cols; c += kPiece) {
    CsfPiece<kPiece> piece;
    piece.load(bytes + c);
#pragma unroll
    for (int i = 0; i < CsfPiece<kPiece>::kWords; ++i) {
      uint32_t outside = csf_four<kind>(piece.words[i], base).outside & kCsfPieceMask<kPiece>;
      for (; outside != 0; outside &= outside - 1) {
        const int byte = __ffs(static_cast<int>(outside)) / 8 - 1;
        if (at < capacity) {
          exceptions[at] = (piece.words[i] >> 8 * byte & 0xFF) << 24 |
                           (first + static_cast<uint32_t>(c + 4 * i + byte));
        }
        ++at;
      }
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

template <CsfKind kind, int kPiece>
void launch_encode(const CsfStack& stack, const uint8_t* planes, const CsfStreams& out,
                   uint32_t* block_counts, cudaStream_t stream) {
  const CsfRows r = make_rows(stack);
  const int64_t blocks = blocks_of(stack);
  const auto grid = static_cast<unsigned>(blocks);
  choose_kernel<kind, kPiece>
      <<<grid, kCsfThreads, 0, stream>>>(r, planes, out.fixed, out.row_begin, block_counts);
  csf_scan_kernel<<<1, kScanThreads, 0, stream>>>(block_counts, blocks);
  list_kernel<kind, kPiece><<<grid, kCsfThreads, 0, stream>>>(r, planes, out.fixed, block_counts,
                                                              out.row_begin, out.exceptions,
                                                              static_cast<uint32_t>(out.capacity));
}

template <CsfKind kind>
void launch_encode(const CsfStack& stack, const uint8_t* planes, const CsfStreams& out,
                   uint32_t* block_counts, cudaStream_t stream) {
  if (stack.cols % 16 == 0) {
    launch_encode<kind, 16>(stack, planes, out, block_counts, stream);
  } else if (stack.cols % 4 == 0) {
    launch_encode<kind, 4>(stack, planes, out, block_counts, stream);
  } else if (stack.cols % 2 == 0) {
    launch_encode<kind, 2>(stack, planes, out, block_counts, stream);
  } else if constexpr (kind == CsfKind::kMxfp4) {
    launch_encode<kind, 1>(stack, planes, out, block_counts, stream);
  }
}

}  // namespace

int64_t csf_encode_scratch_bytes(const CsfStack& stack) { return 4 * (blocks_of(stack) + 1); }

Result<void> csf_encode(const CsfStack& stack, const uint8_t* planes, const CsfStreams& out,
                        void* scratch, cudaStream_t stream) {
  NIBBLE_TRY(check_stack(stack));
  auto* counts = static_cast<uint32_t*>(scratch);
  if (stack.kind == CsfKind::kNvfp4) {
    launch_encode<CsfKind::kNvfp4>(stack, planes, out, counts, stream);
  } else {
    launch_encode<CsfKind::kMxfp4>(stack, planes, out, counts, stream);
  }
  return launched("csf encode kernels");
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
