#include "device/memory.h"

#include <sys/mman.h>

#include <fstream>
#include <string>
#include <utility>

namespace nibble::device {

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

Result<Memory> Memory::host(int64_t bytes) {
  if (bytes == 0) return Memory();
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Error(Code::kResourceExhausted, cat("the system refused ", bytes,
                                               " bytes; available are ", available_memory_bytes()));
  }
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish: fewer TLB misses
  return Memory(static_cast<std::byte*>(data), bytes,
                [](std::byte* p, int64_t n) { munmap(p, static_cast<size_t>(n)); });
}

Memory::~Memory() {
  if (free_ != nullptr) free_(data_, bytes_);
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      free_(std::exchange(other.free_, nullptr)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(free_, other.free_);
  return *this;
}

}  // namespace nibble::device
