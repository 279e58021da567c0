// A bounded way from checkpoint files to a GPU. Threads of the pool read pieces of requests, each
// into a few page-locked chunks of its own, which stay in its cache, and queue their copies into
// slots of device memory; a request that fills a slot is taken by the caller and repacked there.
// Readers know no requests' ends: whoever is free takes the next piece, as far ahead as slots
// allow.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "device/memory.h"
#include "plan/cuda_plan.h"
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

/// How a matrix's scale plane is staged: block FP8's widened to FP32, the others as they are.
/// Bytes; 0: it has none.
int64_t staged_scale_bytes(const formats::MatrixView& matrix);
RingRead::Part staged_scale_part(const formats::MatrixView& matrix);

class CudaRing {
 public:
  /// The pool is the ring's as long as this lives. Errors: kResourceExhausted, kDeviceLost.
  static Result<std::unique_ptr<CudaRing>> create(const checkpoint::CheckpointIndex& index,
                                                  ThreadPool& pool,
                                                  const plan::CudaStaging& staging);
  ~CudaRing();
  int64_t slot_bytes() const { return staging_.slot_bytes; }
  /// Page-locked host memory.
  int64_t host_bytes() const { return staging_.host_bytes(static_cast<int>(readers_.size())); }
  cudaStream_t stream() const { return stream_; }
  /// Time in which at least one thread was reading.
  double reading_seconds();

  /// Hands `reads` to the readers: they will fill one slot, `bytes` of it, in ascending order of
  /// their places. Nothing waits.
  void enqueue(std::vector<RingRead> reads, int64_t bytes);
  /// The next slot (device memory) in the order of enqueue(): waits until it is read and its copies
  /// are queued. Work that the caller queues on stream() before the next take() may read it.
  /// Errors: of the first request that fails, its first failing piece in order; kDeviceLost.
  Result<std::byte*> take();
  /// Every enqueued request was taken.
  bool idle() const { return enqueued_ == taken_; }
  /// Everything queued on stream() is done.
  Result<void> finish();

 private:
  struct Slot {
    device::Memory device;
    cudaEvent_t filled = nullptr;  // recorded when the last copy into it is queued
    cudaEvent_t free = nullptr;    // recorded when the last work that reads it is queued
  };
  /// Page-locked memory of one reader, a part of Reader::host.
  struct Chunk {
    std::byte* host = nullptr;
    cudaEvent_t copied = nullptr;
    bool busy = false;    // its reader's: sent, and not waited for
    bool queued = false;  // its copy waits in to_send_; under mutex_
  };
  struct Reader {
    device::Memory host;
    bool locked = false;
    std::vector<Chunk> chunks;
    size_t next = 0;
  };
  /// Bytes [begin, begin + bytes) of a read.
  struct Part {
    const RingRead* read = nullptr;
    int64_t begin = 0, bytes = 0;
  };
  /// What one thread reads at a time: parts that lie together in the slot. It fits a chunk, but for
  /// a scale plane larger than one or not copied as stored, which is a piece of its own.
  struct Piece {
    size_t first = 0, end = 0;  // in Request::parts
    int64_t at = 0, bytes = 0;  // in the slot
    bool whole_plane = false;
  };
  struct Request {
    int64_t number = 0;
    std::vector<RingRead> reads;
    std::vector<Part> parts;
    std::vector<Piece> pieces;
    // Under mutex_:
    size_t claimed = 0, done = 0;                    // pieces; done: sent or failed
    std::optional<std::pair<size_t, Error>> failed;  // the first in order
    bool started = false;                            // its first copy is queued
  };
  /// A chunk on its way into a slot.
  struct Send {
    Chunk* chunk = nullptr;
    Request* request = nullptr;
    size_t piece = 0;
    int64_t at = 0, bytes = 0;  // in the slot
    bool last = false;          // of its piece
  };
  CudaRing(const checkpoint::CheckpointIndex& index, ThreadPool& pool,
           const plan::CudaStaging& staging, int device)
      : index_(index), pool_(pool), staging_(staging), device_(device) {}
  Result<void> allocate();
  void cut(Request& request) const;
  Result<void> lock_chunks(Reader& reader);
  void read_loop(Reader& reader);
  /// The next piece to read; a null request at the end.
  std::pair<Request*, size_t> claim();
  Result<void> read_piece(Reader& reader, Request& request, size_t number);
  Result<void> read_part(const Part& part, std::byte* to) const;
  Result<std::vector<std::byte>> read_plane(const RingRead& read) const;
  /// The reader's next chunk, once its last copy is done.
  Result<Chunk*> free_chunk(Reader& reader);
  void send(Reader& reader, Send send);
  Result<void> copy(const Send& send, bool first, bool last);
  void fail(Request& request, size_t piece, const Error& error);
  void finish_piece(Request& request);
  Slot& slot_of(int64_t request) { return slots_[static_cast<size_t>(request) % slots_.size()]; }

  const checkpoint::CheckpointIndex& index_;
  ThreadPool& pool_;
  const plan::CudaStaging staging_;
  const int device_;
  cudaStream_t stream_ = nullptr, copies_ = nullptr;
  std::vector<Slot> slots_;
  std::vector<Reader> readers_;

  std::mutex mutex_;
  std::condition_variable claimable_, sent_, done_;
  std::deque<Request> requests_;  // not yet taken; the first is number taken_
  int64_t claiming_ = 0;          // the request whose pieces are handed out
  int64_t enqueued_ = 0;          // written by the caller's thread alone, like taken_
  int64_t taken_ = 0;             // requests that take() returned
  int64_t released_ = 0;          // of these, whose `free` event is recorded
  std::deque<Send> to_send_;
  bool sending_ = false;  // a thread is queueing the copies of to_send_
  bool stop_ = false;
  int reading_ = 0;  // threads with a piece
  std::chrono::steady_clock::time_point reading_since_;
  double reading_seconds_ = 0;

  std::thread starter_;  // gives the pool's threads to read_loop()
};

}  // namespace nibble::load
