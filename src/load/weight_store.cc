#include "load/weight_store.h"

#include <sys/mman.h>

#include <cstdlib>

namespace nibble::load {

void AlignedFree::operator()(std::byte* p) const { std::free(p); }

AlignedBytes allocate_aligned(int64_t bytes) {
  // Big blocks ask for huge pages: streaming weights through 4 KiB pages costs the TLB.
  constexpr int64_t kHuge = 2 << 20;
  const int64_t alignment = bytes >= 4 * kHuge ? kHuge : 64;
  const int64_t size = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(static_cast<size_t>(alignment),
                               static_cast<size_t>(size > 0 ? size : alignment));
  if (p != nullptr && alignment == kHuge) {
    ::madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);
  }
  return AlignedBytes(static_cast<std::byte*>(p));
}

const tensor::TensorRef& WeightStore::matrix(const recipe::WeightKey& key) const {
  const auto it = matrices_.find(key);
  NIBBLE_CHECK(it != matrices_.end(), "no loaded matrix for ", recipe::key_text(key));
  return it->second;
}

const float* WeightStore::vector(const recipe::WeightKey& key) const {
  const auto it = vectors_.find(key);
  return it == vectors_.end() ? nullptr : it->second.data();
}

}  // namespace nibble::load
