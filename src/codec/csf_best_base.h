// The vector tables' search for a row's base; internal to this folder. One count of the row at a
// guessed base (the window around the row's mean) bounds every other base so well that a few more
// counts decide exactly. Rows that the guess covers badly are left to the scalar table's histogram.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/csf_kernels.h"

namespace nibble::codec {

struct CsfCount {
  int64_t covered;  // bytes in [base, base + window)
  int64_t below;    // bytes < base
};

/// count(base) -> CsfCount, row_max() -> int and row_sum() -> int64_t, all over the row of n bytes.
/// Inlined into each table's own function, which has that table's instructions.
///
/// Exact: a base above b covers none of the bytes below b, a base under b none of those above its
/// window. So the walk up ends when n - below <= most (a tie keeps the lower base) and the walk
/// down when n - above < most. As the guess covers half the row, neither takes more than `window`
/// steps. The side with more uncovered bytes goes first: it usually holds the answer, which then
/// ends the other walk at once.
template <typename Count, typename RowMax, typename RowSum>
[[gnu::always_inline]] inline int csf_best_base(const uint8_t* row, int64_t n, int window,
                                                Count count, RowMax row_max, RowSum row_sum) {
  const int mean = static_cast<int>(row_sum() / n);
  const int guess = std::clamp(mean - (window / 2 - 1), 0, 256 - window);
  const CsfCount start = count(guess);
  if (start.covered == n) {
    return std::max(0, row_max() - window + 1);  // the lowest that still reaches the largest byte
  }
  if (2 * start.covered < n) return kCsfScalar.best_base(row, n, window);
  int best = guess;
  int64_t most = start.covered;
  const int64_t start_above = n - start.covered - start.below;
  const bool down_first = start.below > start_above;
  for (int pass = 0; pass < 2; ++pass) {
    if ((pass == 0) == down_first) {
      int64_t above = start_above;
      for (int base = guess - 1; base >= 0 && n - above >= most; --base) {
        const CsfCount at = count(base);
        above = n - at.covered - at.below;
        if (at.covered >= most) {
          most = at.covered;
          best = base;
        }
      }
    } else {
      int64_t below = start.below;
      for (int base = guess + 1; base + window <= 256 && n - below > most; ++base) {
        const CsfCount at = count(base);
        below = at.below;
        if (at.covered > most) {
          most = at.covered;
          best = base;
        }
      }
    }
  }
  return best;
}

}  // namespace nibble::codec
