// Memory at a cache line, for the workspaces and tiles of tests and benches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace nibble::kernels::testing {

/// `p` or the next address after it that is a multiple of 64 bytes.
inline std::byte* aligned64(std::byte* p) {
  return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64;
}

/// Exactly `bytes` from an address that is a multiple of 64.
class AlignedBlock {
 public:
  explicit AlignedBlock(int64_t bytes) : storage_(static_cast<size_t>(bytes + 64)) {}
  std::span<std::byte> span() { return {aligned64(storage_.data()), storage_.size() - 64}; }

 private:
  std::vector<std::byte> storage_;
};

}  // namespace nibble::kernels::testing
