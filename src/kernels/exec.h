// What a CPU op runs with. Every op here queues nothing: it returns when the result is in memory.
#pragma once

#include <cstdint>
#include <span>

#include "base/check.h"
#include "base/thread_pool.h"
#include "device/cpu.h"

namespace nibble::kernels {

/// What a linear layer multiplies with. Residuals, norms and sums are FP32 in both; with kBf16 the
/// input of every quantized or BF16 product is rounded to BF16 first and K and V are kept as BF16.
enum class Activations : uint8_t { kF32, kBf16 };

/// Scratch carved from one block that the owner sized before; ops take what they need and give it
/// back by scope. Never grows: a shortage is our own bug.
class Workspace {
 public:
  explicit Workspace(std::span<std::byte> block) : block_(block) {}
  template <typename T>
  T* take(int64_t count) {
    const int64_t begin = (used_ + 63) / 64 * 64;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    NIBBLE_CHECK(begin + bytes <= static_cast<int64_t>(block_.size()), "workspace of ",
                 block_.size(), " bytes is short by ",
                 begin + bytes - static_cast<int64_t>(block_.size()));
    used_ = begin + bytes;
    if (used_ > peak_) peak_ = used_;
    return reinterpret_cast<T*>(block_.data() + begin);
  }
  int64_t mark() const { return used_; }
  void release(int64_t mark) { used_ = mark; }
  int64_t peak() const { return peak_; }
  /// Bytes take<T>(count) uses at most, alignment included: for the sizing functions.
  template <typename T>
  static int64_t bytes_for(int64_t count) {
    return count * static_cast<int64_t>(sizeof(T)) + 64;
  }

 private:
  std::span<std::byte> block_;
  int64_t used_ = 0, peak_ = 0;
};

/// Gives back what was taken since its construction.
class WorkspaceScope {
 public:
  explicit WorkspaceScope(Workspace& workspace) : workspace_(workspace), mark_(workspace.mark()) {}
  ~WorkspaceScope() { workspace_.release(mark_); }
  WorkspaceScope(const WorkspaceScope&) = delete;
  WorkspaceScope& operator=(const WorkspaceScope&) = delete;

 private:
  Workspace& workspace_;
  int64_t mark_;
};

struct Exec {
  ThreadPool* pool = nullptr;
  device::Isa isa = device::Isa::kScalar;
  Activations activations = Activations::kF32;
  Workspace* workspace = nullptr;
};

}  // namespace nibble::kernels
