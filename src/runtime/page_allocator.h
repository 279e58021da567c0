// Which KV pages are free. Hands out page ids of a fixed pool; the memory behind them is the
// engine's. Not thread-safe: one owner.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace nibble::runtime {

class PageAllocator {
 public:
  explicit PageAllocator(int64_t pages);

  int64_t total() const { return static_cast<int64_t>(used_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  /// `count` different pages that nobody holds; the caller has checked free() >= count.
  std::vector<int32_t> take(int64_t count);
  /// Gives pages back; each must be held.
  void give_back(std::span<const int32_t> pages);

 private:
  std::vector<int32_t> free_;  // a stack: the page used last is the warmest
  std::vector<bool> used_;
};

}  // namespace nibble::runtime
