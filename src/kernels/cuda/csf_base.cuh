// The base of a row of scale codes on the GPU: the window that covers most of its values, the
// lowest of equals, as the CPU codec chooses it.
#pragma once

#include "kernels/cuda/csf_rows.cuh"

namespace nibble::kernels::cuda {

// Values around a row's mean that are counted one by one.
template <CsfKind kind>
constexpr int kBins = kind == CsfKind::kNvfp4 ? 32 : 16;
/// Counters of a warp's 32 rows, a lane each: word 32 bin + lane, so that lanes never share a bank.
/// Bin kBins counts the values outside. Later the rows' exceptions take their place.
template <CsfKind kind>
constexpr int kBinBytes = (kBins<kind> + 1) * 128;
template <CsfKind kind>
constexpr uint32_t kListed = kBins<kind> + 1;  // exceptions of a row that the place suffices for

extern __shared__ uint4 csf_smem[];
__device__ __forceinline__ uint32_t& smem_word(uint32_t byte) {
  return *reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(csf_smem) + byte);
}

/// The base of one row by all lanes of a warp: a whole histogram. For rows that the counters around
/// the mean cannot decide. `bins`: 256 words.
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

/// The base of the lane's row, or -1 if the counters do not prove it. `bins`: where the lane's
/// counters, all zero, begin in shared memory.
template <CsfKind kind, int kPiece>
__device__ int base_near_mean(const uint8_t* row, int cols, uint32_t bins) {
  constexpr int kWindow = kCsfWindow<kind>, kCount = kBins<kind>;
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
  const int low = min(max(mean - kCount / 2, 0), 256 - kCount);
  // A value below `low` wraps around, so that it lies above the last counter too.
  const uint32_t below = static_cast<uint32_t>(low) * 128u, last = bins + kCount * 128u;
  auto place = [&](uint32_t word, int byte) {
    return bins + min(__byte_perm(word, 0, 0x4440 + byte) * 128u - below, last - bins);
  };
#pragma unroll 2
  for (int c = 0; c < cols; c += kPiece) {
    CsfPiece<kPiece> piece;
    piece.load(row + c);
#pragma unroll
    for (int i = 0; i < CsfPiece<kPiece>::kWords; ++i) {
      if constexpr (kPiece == 1) {
        ++smem_word(place(piece.words[i], 0));
      } else {
        // Two at a time: half the chain of loads and stores that must keep their order.
#pragma unroll
        for (int b = 0; b < (kPiece < 4 ? kPiece : 4); b += 2) {
          const uint32_t one = place(piece.words[i], b), two = place(piece.words[i], b + 1);
          const uint32_t of_one = smem_word(one), of_two = smem_word(two);
          smem_word(one) = of_one + 1;
          smem_word(two) = of_two + (one == two ? 2 : 1);
        }
      }
    }
  }
  uint32_t window[kWindow];
  uint32_t covered = 0, best = 0, low_edge = 0, high_edge = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t here = smem_word(bins + static_cast<uint32_t>(i) * 128u);
    if (i < kWindow - 1) low_edge += here;
    if (i > kCount - kWindow) high_edge += here;
    covered += here;
    if (i >= kWindow) covered -= window[i % kWindow];
    window[i % kWindow] = here;
    if (i >= kWindow - 1) {
      best = max(best, covered << 8 | static_cast<uint32_t>(kCount - 1 - (i - kWindow + 1)));
    }
  }
  // A window that leaves the counted range covers at most its edge and everything outside.
  const uint32_t outside = smem_word(last);
  const uint32_t others =
      outside + max(low > 0 ? low_edge : 0u, low < 256 - kCount ? high_edge : 0u);
  if ((best >> 8) <= others) return -1;
  return low + kCount - 1 - static_cast<int>(best & 0xFF);
}

}  // namespace nibble::kernels::cuda
