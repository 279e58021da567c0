// A bounded ring between checkpoint files and a GPU: slots of page-locked host memory, each with as
// much device staging. A thread of its own reads ahead, with the pool's help, while earlier slots
// are copied and repacked on the device and the caller allocates and queues.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
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
  recipe::WeightKey key;
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
  /// Time that files were being read.
  double reading_seconds() const { return reading_seconds_; }

  /// Hands `reads` to the reading thread: they will fill one slot, `bytes` of it. Nothing waits.
  void enqueue(std::vector<RingRead> reads, int64_t bytes);
  /// The next slot in the order of enqueue(): waits until it is read and queues its copy to the
  /// device. Work that the caller queues on stream() before the next take() may read the result
  /// (device memory). Errors: the first failing read in order; kDeviceLost.
  Result<std::byte*> take();
  /// Both, for a single slot; nothing else may be enqueued.
  Result<std::byte*> fill(std::vector<RingRead> reads, int64_t bytes) {
    NIBBLE_CHECK(idle(), enqueued_ - taken_, " slots are still to be taken");
    enqueue(std::move(reads), bytes);
    return take();
  }
  /// Every enqueued request was taken.
  bool idle() const { return enqueued_ == taken_; }
  /// Everything queued is done.
  Result<void> finish();

 private:
  struct Slot {
    device::Memory host, device;
    cudaEvent_t free = nullptr;  // recorded when the last work that reads it is queued
  };
  struct Request {
    std::vector<RingRead> reads;
    int64_t bytes = 0;
  };
  CudaRing(const checkpoint::CheckpointIndex& index, ThreadPool& pool, int64_t slot_bytes,
           int device)
      : index_(index), pool_(pool), slot_bytes_(slot_bytes), device_(device) {}
  void read_loop();
  Result<void> read_slot(const Request& request, std::byte* slot);
  Result<void> read(const RingRead& read, int64_t begin, int64_t bytes, std::byte* slot) const;
  Slot& slot_of(int64_t request) { return slots_[static_cast<size_t>(request) % slots_.size()]; }

  const checkpoint::CheckpointIndex& index_;
  ThreadPool& pool_;
  const int64_t slot_bytes_;
  const int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<Slot> slots_;
  double reading_seconds_ = 0;  // the reading thread's; read by others when nothing is enqueued

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;                        // not yet read
  std::deque<std::pair<int64_t, Result<void>>> ready_;  // bytes and outcome, not yet taken
  int64_t enqueued_ = 0;                                // by the caller's thread, like taken_
  int64_t taken_ = 0;                                   // requests that take() returned
  int64_t released_ = 0;                                // of these, whose `free` event is recorded
  bool stop_ = false;
  std::thread reader_;
};

}  // namespace nibble::load
