// Running sums over the CTAs of a grid in one launch: every CTA publishes its own sum, then adds up
// those before it until it meets one that knows all before it (decoupled look-back, Merrill and
// Garland 2016). The result does not depend on timing: only the way to it does.
#pragma once

#include <cstdint>

namespace nibble::kernels::cuda {

/// A CTA's sum with what is known of it, in one word that is read and written whole. Zero: nothing.
using ScanState = unsigned long long;
constexpr ScanState kScanOwn = ScanState{1} << 32;  // the CTA's sum alone
constexpr ScanState kScanAll = ScanState{2} << 32;  // and of all before it

__device__ __forceinline__ void scan_publish(ScanState* states, unsigned cta, uint32_t sum) {
  *const_cast<volatile ScanState*>(states + cta) = (cta == 0 ? kScanAll : kScanOwn) | sum;
}
/// The sum of all CTAs before `cta`, whose own sum is published; by one whole warp. CTAs start in
/// the order of their numbers, so those waited for are running or done.
__device__ __forceinline__ uint32_t scan_before(ScanState* states, unsigned cta, uint32_t sum,
                                                int lane) {
  if (cta == 0) return 0;
  uint32_t before = 0;
  for (int64_t last = static_cast<int64_t>(cta) - 1;; last -= 32) {
    const int64_t mine = last - lane;
    ScanState state = kScanAll;
    if (mine >= 0) {
      do {
        state = *const_cast<volatile ScanState*>(states + mine);
      } while (state == 0);
    }
    // Lanes up to the nearest one that knows all before it count.
    const unsigned all = __ballot_sync(~0u, state >= kScanAll);
    const int nearest = __ffs(static_cast<int>(all)) - 1;
    const bool counts = all == 0 || lane <= nearest;
    before += __reduce_add_sync(~0u, counts ? static_cast<uint32_t>(state) : 0u);
    if (all != 0) break;
  }
  if (lane == 0) {
    *const_cast<volatile ScanState*>(states + cta) = kScanAll | (before + sum);
  }
  return before;
}

}  // namespace nibble::kernels::cuda
