#include "load/cuda_ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>

#include "device/cuda.h"
#include "formats/element.h"
#include "recipe/scale_plane.h"

namespace nibble::load {
namespace {

// Codes are read in pieces of this size, so that one large matrix keeps every thread busy.
constexpr int64_t kPieceBytes = 4 << 20;

void widen_scales(formats::ScaleKind kind, std::span<const std::byte> from, std::byte* to) {
  const int64_t step = formats::scale_bytes(kind);
  const auto count = static_cast<int64_t>(from.size()) / step;
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* p = from.data() + i * step;
    float value = 0.0f;
    uint16_t half;
    switch (kind) {
      case formats::ScaleKind::kF32: std::memcpy(&value, p, 4); break;
      case formats::ScaleKind::kBf16:
        std::memcpy(&half, p, 2);
        value = formats::decode_bf16(half);
        break;
      case formats::ScaleKind::kE8M0: value = formats::decode_e8m0(static_cast<uint8_t>(*p)); break;
      default: NIBBLE_CHECK(false, "scale kind ", static_cast<int>(kind));
    }
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
  std::unique_ptr<CudaRing> ring(new CudaRing(index, pool, slot_bytes));
  NIBBLE_TRY(cuda_ok(cudaStreamCreateWithFlags(&ring->stream_, cudaStreamNonBlocking), "stream"));
  ring->slots_.resize(static_cast<size_t>(slots));
  for (Slot& slot : ring->slots_) {
    NIBBLE_TRY(slot.host, device::cuda_pinned(slot_bytes));
    NIBBLE_TRY(slot.device, device::cuda_memory(slot_bytes));
    NIBBLE_TRY(cuda_ok(cudaEventCreateWithFlags(&slot.free, cudaEventDisableTiming), "event"));
  }
  return ring;
}

CudaRing::~CudaRing() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  for (Slot& slot : slots_) {
    if (slot.free != nullptr) cudaEventDestroy(slot.free);
  }
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
    return recipe::check_scales(*read.key, w, plane);
  }
  NIBBLE_TRY(const std::vector<std::byte> plane, recipe::read_scale_plane(index_, w));
  NIBBLE_TRY(recipe::check_scales(*read.key, w, plane));
  if (read.part == RingRead::Part::kScales) {
    std::memcpy(to, plane.data(), plane.size());
  } else {
    widen_scales(w.meta.scale_kind, plane, to);
  }
  return {};
}

Result<std::byte*> CudaRing::fill(std::span<const RingRead> reads, int64_t bytes) {
  NIBBLE_CHECK(bytes <= slot_bytes_, bytes, " bytes in a slot of ", slot_bytes_);
  if (current_ >= 0) {
    Slot& last = slots_[static_cast<size_t>(current_)];
    NIBBLE_TRY(cuda_ok(cudaEventRecord(last.free, stream_), "loading"));
    last.used = true;
  }
  current_ = (current_ + 1) % static_cast<int>(slots_.size());
  Slot& slot = slots_[static_cast<size_t>(current_)];
  if (slot.used) NIBBLE_TRY(cuda_ok(cudaEventSynchronize(slot.free), "loading"));

  struct Task {
    size_t read;
    int64_t begin, bytes;
  };
  std::vector<Task> tasks;
  for (size_t i = 0; i < reads.size(); ++i) {
    const bool codes = reads[i].part == RingRead::Part::kCodes;
    const int64_t step = codes ? kPieceBytes : reads[i].bytes;
    for (int64_t b = 0; b < reads[i].bytes; b += step) {
      tasks.push_back({i, b, std::min(step, reads[i].bytes - b)});
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  std::mutex mutex;
  std::optional<std::pair<int64_t, Error>> failed;
  pool_.parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
    const Task& task = tasks[static_cast<size_t>(i)];
    if (Result<void> ok = read(reads[task.read], task.begin, task.bytes, slot.host.data()); !ok) {
      std::lock_guard lock(mutex);
      if (!failed || i < failed->first) failed.emplace(i, ok.error());
    }
  });
  reading_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (failed) return failed->second;
  NIBBLE_TRY(cuda_ok(cudaMemcpyAsync(slot.device.data(), slot.host.data(),
                                     static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
                     "loading"));
  return slot.device.data();
}

Result<void> CudaRing::finish() { return cuda_ok(cudaStreamSynchronize(stream_), "loading"); }

}  // namespace nibble::load
