#include "load/cuda_ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "device/cuda.h"
#include "recipe/scale_plane.h"

namespace nibble::load {
namespace {

// Codes are read in pieces of this size, so that all threads end a slot together.
constexpr int64_t kPieceBytes = 256 << 10;

void widen_scales(formats::ScaleKind kind, std::span<const std::byte> from, std::byte* to) {
  const int64_t count = static_cast<int64_t>(from.size()) / formats::scale_bytes(kind);
  for (int64_t i = 0; i < count; ++i) {
    const float value = formats::scale_value(kind, from.data(), i);
    std::memcpy(to + 4 * i, &value, 4);
  }
}

}  // namespace

Result<void> cuda_ok(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  return Error(Code::kDeviceLost, cat(what, ": ", cudaGetErrorString(error)));
}

Result<std::unique_ptr<CudaRing>> CudaRing::create(const checkpoint::CheckpointIndex& index,
                                                   ThreadPool& pool, int64_t slot_bytes,
                                                   int slots) {
  int device = 0;
  NIBBLE_TRY(cuda_ok(cudaGetDevice(&device), "device"));
  std::unique_ptr<CudaRing> ring(new CudaRing(index, pool, slot_bytes, device));
  NIBBLE_TRY(cuda_ok(cudaStreamCreateWithFlags(&ring->stream_, cudaStreamNonBlocking), "stream"));
  ring->slots_.resize(static_cast<size_t>(slots));
  for (Slot& slot : ring->slots_) {
    NIBBLE_TRY(slot.host, device::cuda_pinned(slot_bytes));
    NIBBLE_TRY(slot.device, device::cuda_memory(slot_bytes));
    NIBBLE_TRY(cuda_ok(cudaEventCreateWithFlags(&slot.free, cudaEventDisableTiming), "event"));
  }
  ring->reader_ = std::thread([r = ring.get()] { r->read_loop(); });
  return ring;
}

CudaRing::~CudaRing() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    requests_.clear();
  }
  changed_.notify_all();
  if (reader_.joinable()) reader_.join();
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  for (Slot& slot : slots_) {
    if (slot.free != nullptr) cudaEventDestroy(slot.free);
  }
}

// Reads request after request into its slot, as soon as the slot's previous content is done with.
void CudaRing::read_loop() {
  cudaSetDevice(device_);
  const auto slots = static_cast<int64_t>(slots_.size());
  for (int64_t number = 0;; ++number) {
    Request request;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(
          lock, [&] { return stop_ || (!requests_.empty() && released_ >= number - slots + 1); });
      if (stop_) return;
      request = std::move(requests_.front());
      requests_.pop_front();
    }
    Slot& slot = slot_of(number);
    Result<void> done = {};
    if (number >= slots) done = cuda_ok(cudaEventSynchronize(slot.free), "loading");
    if (done) done = read_slot(request, slot.host.data());
    {
      std::lock_guard lock(mutex_);
      ready_.emplace_back(request.bytes, std::move(done));
    }
    changed_.notify_all();
  }
}

void CudaRing::enqueue(std::vector<RingRead> reads, int64_t bytes) {
  NIBBLE_CHECK(bytes <= slot_bytes_, bytes, " bytes in a slot of ", slot_bytes_);
  ++enqueued_;
  {
    std::lock_guard lock(mutex_);
    requests_.push_back({std::move(reads), bytes});
  }
  changed_.notify_all();
}

Result<std::byte*> CudaRing::take() {
  if (taken_ > 0) {
    NIBBLE_TRY(cuda_ok(cudaEventRecord(slot_of(taken_ - 1).free, stream_), "loading"));
  }
  int64_t bytes = 0;
  {
    std::unique_lock lock(mutex_);
    released_ = taken_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !ready_.empty(); });
    auto [size, done] = std::move(ready_.front());
    ready_.pop_front();
    if (!done) return done.error();
    bytes = size;
  }
  Slot& slot = slot_of(taken_++);
  NIBBLE_TRY(cuda_ok(cudaMemcpyAsync(slot.device.data(), slot.host.data(),
                                     static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
                     "loading"));
  return slot.device.data();
}

Result<void> CudaRing::read(const RingRead& read, int64_t begin, int64_t bytes,
                            std::byte* slot) const {
  const recipe::Weight& w = *read.weight;
  std::byte* to = slot + read.at + begin;
  if (read.part == RingRead::Part::kCodes) {
    return index_.read(*w.codes.tensor, w.codes.begin + read.begin + begin,
                       {to, static_cast<size_t>(bytes)});
  }
  if (read.part == RingRead::Part::kScales && !w.stored_csf()) {  // straight to its place
    const std::span<std::byte> plane(to, static_cast<size_t>(bytes));
    NIBBLE_TRY(index_.read(*w.scales.tensor, w.scales.begin, plane));
    return recipe::check_scales(read.key, w, plane);
  }
  NIBBLE_TRY(const std::vector<std::byte> plane, recipe::read_scale_plane(index_, w));
  NIBBLE_TRY(recipe::check_scales(read.key, w, plane));
  if (read.part == RingRead::Part::kScales) {
    std::memcpy(to, plane.data(), plane.size());
  } else {
    widen_scales(w.meta.scale_kind, plane, to);
  }
  return {};
}

Result<void> CudaRing::read_slot(const Request& request, std::byte* slot) {
  struct Task {
    const RingRead* read;
    int64_t begin, bytes;
  };
  std::vector<Task> tasks;
  for (const RingRead& r : request.reads) {
    const int64_t step = r.part == RingRead::Part::kCodes ? kPieceBytes : r.bytes;
    for (int64_t b = 0; b < r.bytes; b += step) {
      tasks.push_back({&r, b, std::min(step, r.bytes - b)});
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  const Result<void> done =
      pool_.try_parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
        const Task& task = tasks[static_cast<size_t>(i)];
        return read(*task.read, task.begin, task.bytes, slot);
      });
  reading_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return done;
}

Result<void> CudaRing::finish() { return cuda_ok(cudaStreamSynchronize(stream_), "loading"); }

}  // namespace nibble::load
