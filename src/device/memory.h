// The few large allocations that are made once: on the host page-aligned and zero, refused with
// numbers instead of being killed later by the system; on a GPU through device/cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"

namespace nibble::device {

/// Bytes this host can still give without swapping (MemAvailable), or -1 if it does not say.
int64_t available_memory_bytes();

/// Owns one block, wherever it is.
class Memory {
 public:
  using Free = void (*)(std::byte* data, int64_t bytes);
  Memory() = default;
  Memory(std::byte* data, int64_t bytes, Free free) : data_(data), bytes_(bytes), free_(free) {}
  /// Zeroed host memory. Errors: kResourceExhausted with the bytes asked for and those available.
  static Result<Memory> host(int64_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  std::byte* data() const { return data_; }
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  Free free_ = nullptr;
};

}  // namespace nibble::device
