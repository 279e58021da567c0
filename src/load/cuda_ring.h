// A bounded ring between checkpoint files and a GPU: slots of page-locked host memory, each with as
// much device staging. While one slot is copied and repacked on the device, the next is read.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "device/memory.h"
#include "recipe/recipe.h"

namespace nibble::load {

/// The outcome of a CUDA call as a Result; `what` names the step.
Result<void> cuda_ok(cudaError_t error, std::string_view what);

/// One piece of a weight and its place in the slot.
struct RingRead {
  enum class Part : uint8_t {
    kCodes,      // bytes [begin, begin + bytes) of the codes
    kScales,     // the whole scale plane (decoded if stored compressed), checked
    kScalesF32,  // the same of block, channel or tensor FP8, widened to FP32
  };
  const recipe::WeightKey* key = nullptr;
  const recipe::Weight* weight = nullptr;
  Part part = Part::kCodes;
  int64_t begin = 0, bytes = 0;  // bytes: in the slot
  int64_t at = 0;                // offset in the slot
};

class CudaRing {
 public:
  /// Errors: kResourceExhausted.
  static Result<std::unique_ptr<CudaRing>> create(const checkpoint::CheckpointIndex& index,
                                                  ThreadPool& pool, int64_t slot_bytes, int slots);
  ~CudaRing();
  int64_t slot_bytes() const { return slot_bytes_; }
  cudaStream_t stream() const { return stream_; }
  /// Time that fill() spent reading files; the rest of a load waits for the device.
  double reading_seconds() const { return reading_seconds_; }

  /// Waits for the next slot, reads into it with all threads and queues the copy of its first
  /// `bytes` to the device. Work that the caller queues on stream() before the next fill() may read
  /// the result (device memory). Errors: the first failing read in order; kDeviceLost.
  Result<std::byte*> fill(std::span<const RingRead> reads, int64_t bytes);
  /// Everything queued is done.
  Result<void> finish();

 private:
  struct Slot {
    device::Memory host, device;
    cudaEvent_t free = nullptr;  // recorded when its last reader is queued
    bool used = false;
  };
  CudaRing(const checkpoint::CheckpointIndex& index, ThreadPool& pool, int64_t slot_bytes)
      : index_(index), pool_(pool), slot_bytes_(slot_bytes) {}
  Result<void> read(const RingRead& read, int64_t begin, int64_t bytes, std::byte* slot) const;

  const checkpoint::CheckpointIndex& index_;
  ThreadPool& pool_;
  const int64_t slot_bytes_;
  cudaStream_t stream_ = nullptr;
  std::vector<Slot> slots_;
  int current_ = -1;
  double reading_seconds_ = 0;
};

}  // namespace nibble::load
