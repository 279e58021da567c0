#include "runtime/memory_block.h"

#include <sys/mman.h>

#include <fstream>
#include <string>
#include <utility>

namespace nibble::runtime {

int64_t available_memory_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name, unit;
  int64_t kib = 0;
  while (meminfo >> name >> kib) {
    std::getline(meminfo, unit);
    if (name == "MemAvailable:") return kib * 1024;
  }
  return -1;
}

Result<MemoryBlock> MemoryBlock::allocate(int64_t bytes) {
  MemoryBlock block;
  if (bytes == 0) return block;
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Error(Code::kResourceExhausted, cat("the system refused ", bytes,
                                               " bytes; available are ", available_memory_bytes()));
  }
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: fewer TLB misses
  block.bytes_ = {static_cast<std::byte*>(data), static_cast<size_t>(bytes)};
  return block;
}

MemoryBlock::~MemoryBlock() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
}

MemoryBlock::MemoryBlock(MemoryBlock&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MemoryBlock& MemoryBlock::operator=(MemoryBlock&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace nibble::runtime
