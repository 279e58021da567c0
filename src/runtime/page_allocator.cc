#include "runtime/page_allocator.h"

#include "base/check.h"

namespace nibble::runtime {

PageAllocator::PageAllocator(int64_t pages) : used_(static_cast<size_t>(pages), false) {
  free_.reserve(used_.size());
  for (int64_t page = pages - 1; page >= 0; --page) free_.push_back(static_cast<int32_t>(page));
}

std::vector<int32_t> PageAllocator::take(int64_t count) {
  NIBBLE_CHECK(count >= 0 && count <= free(), "take ", count, " of ", free(), " free pages");
  std::vector<int32_t> pages;
  pages.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    used_[static_cast<size_t>(page)] = true;
    pages.push_back(page);
  }
  return pages;
}

void PageAllocator::give_back(std::span<const int32_t> pages) {
  for (int32_t page : pages) {
    NIBBLE_CHECK(page >= 0 && page < total() && used_[static_cast<size_t>(page)], "page ", page,
                 " of ", total(), " is not held");
    used_[static_cast<size_t>(page)] = false;
    free_.push_back(page);
  }
}

}  // namespace nibble::runtime
