// The engine's few large allocations, made once: page-aligned, zero, and refused with numbers
// instead of being killed later by the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"

namespace nibble::runtime {

/// Bytes this host can still give without swapping (MemAvailable), or -1 if it does not say.
int64_t available_memory_bytes();

class MemoryBlock {
 public:
  MemoryBlock() = default;
  /// Errors: kResourceExhausted with the bytes asked for and the bytes available.
  static Result<MemoryBlock> allocate(int64_t bytes);
  ~MemoryBlock();
  MemoryBlock(MemoryBlock&& other) noexcept;
  MemoryBlock& operator=(MemoryBlock&& other) noexcept;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace nibble::runtime
