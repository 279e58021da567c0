#include "load/cuda_ring.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "device/cuda.h"
#include "recipe/scale_plane.h"

namespace nibble::load {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::byte> widen_scales(formats::ScaleKind kind, std::span<const std::byte> from) {
  const int64_t count = static_cast<int64_t>(from.size()) / formats::scale_bytes(kind);
  std::vector<std::byte> to(static_cast<size_t>(4 * count));
  for (int64_t i = 0; i < count; ++i) {
    const float value = formats::scale_value(kind, from.data(), i);
    std::memcpy(to.data() + 4 * i, &value, 4);
  }
  return to;
}

}  // namespace

Result<void> cuda_ok(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return {};
  return Error(Code::kDeviceLost, cat(what, ": ", cudaGetErrorString(error)));
}

RingRead::Part staged_scale_part(const formats::MatrixView& matrix) {
  return matrix.format == formats::FormatId::kFp8Block ? RingRead::Part::kScalesF32
                                                       : RingRead::Part::kScales;
}
int64_t staged_scale_bytes(const formats::MatrixView& matrix) {
  const int64_t plane = formats::scale_plane_bytes(matrix);
  return staged_scale_part(matrix) == RingRead::Part::kScales
             ? plane
             : plane / formats::scale_bytes(matrix.scale_kind) * 4;
}

Result<std::unique_ptr<CudaRing>> CudaRing::create(const checkpoint::CheckpointIndex& index,
                                                   ThreadPool& pool,
                                                   const plan::CudaStaging& staging) {
  int device = 0;
  NIBBLE_TRY(cuda_ok(cudaGetDevice(&device), "device"));
  std::unique_ptr<CudaRing> ring(new CudaRing(index, pool, staging, device));
  NIBBLE_TRY(ring->allocate());
  ring->starter_ = std::thread([r = ring.get()] {
    r->pool_.parallel_for(static_cast<int64_t>(r->readers_.size()), [r](int64_t i, int) {
      r->read_loop(r->readers_[static_cast<size_t>(i)]);
    });
  });
  return ring;
}

Result<void> CudaRing::allocate() {
  const auto event = [](cudaEvent_t& e) {
    return cuda_ok(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "event");
  };
  NIBBLE_TRY(cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
  NIBBLE_TRY(cuda_ok(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "stream"));
  slots_.resize(static_cast<size_t>(staging_.slots));
  for (Slot& slot : slots_) {
    NIBBLE_TRY(slot.device, device::cuda_memory(staging_.slot_bytes));
    NIBBLE_TRY(event(slot.filled));
    NIBBLE_TRY(event(slot.free));
  }
  // One of the pool's cores is left to the caller.
  readers_.resize(static_cast<size_t>(std::clamp(pool_.threads() - 1, 1, staging_.readers)));
  for (Reader& reader : readers_) {
    NIBBLE_TRY(reader.host, device::Memory::host(staging_.host_bytes(1)));
    reader.chunks.resize(static_cast<size_t>(staging_.chunks));
    std::byte* host = reader.host.data();
    for (Chunk& chunk : reader.chunks) {
      chunk.host = host;
      host += staging_.chunk_bytes;
      NIBBLE_TRY(event(chunk.copied));
    }
  }
  return {};
}

CudaRing::~CudaRing() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  claimable_.notify_all();
  if (starter_.joinable()) starter_.join();
  for (cudaStream_t stream : {copies_, stream_}) {
    if (stream == nullptr) continue;
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  const auto destroy = [](cudaEvent_t event) {
    if (event != nullptr) cudaEventDestroy(event);
  };
  for (Slot& slot : slots_) {
    destroy(slot.filled);
    destroy(slot.free);
  }
  for (Reader& reader : readers_) {
    for (Chunk& chunk : reader.chunks) destroy(chunk.copied);
    if (reader.locked) cudaHostUnregister(reader.host.data());
  }
}

double CudaRing::reading_seconds() {
  std::lock_guard lock(mutex_);
  double seconds = reading_seconds_;
  if (reading_ > 0) seconds += std::chrono::duration<double>(Clock::now() - reading_since_).count();
  return seconds;
}

// Cuts the reads into pieces.
void CudaRing::cut(Request& request) const {
  const int64_t chunk = staging_.chunk_bytes;
  std::vector<Piece>& pieces = request.pieces;
  bool open = false;  // the last piece takes more
  for (const RingRead& r : request.reads) {
    const bool plane = r.part != RingRead::Part::kCodes;
    const bool whole_plane = plane && (r.part == RingRead::Part::kScalesF32 ||
                                       r.weight->stored_csf() || r.bytes > chunk);
    for (int64_t begin = 0; begin < r.bytes;) {
      const int64_t at = r.at + begin, left = r.bytes - begin;
      const int64_t room = open ? pieces.back().at + chunk - at : 0;
      if (whole_plane || room <= 0 || (plane && room < left)) {
        pieces.push_back({request.parts.size(), request.parts.size(), at, 0, whole_plane});
        open = !whole_plane;
      }
      Piece& piece = pieces.back();
      const int64_t bytes = whole_plane ? left : std::min(left, piece.at + chunk - at);
      request.parts.push_back({&r, begin, bytes});
      piece.end = request.parts.size();
      piece.bytes = at + bytes - piece.at;
      begin += bytes;
    }
  }
}

void CudaRing::enqueue(std::vector<RingRead> reads, int64_t bytes) {
  NIBBLE_CHECK(bytes <= staging_.slot_bytes, bytes, " bytes in a slot of ", staging_.slot_bytes);
  std::unique_lock lock(mutex_);
  Request& request = requests_.emplace_back();
  request.number = enqueued_++;
  request.reads = std::move(reads);
  cut(request);
  NIBBLE_CHECK(!request.pieces.empty());
  lock.unlock();
  claimable_.notify_all();
}

std::pair<CudaRing::Request*, size_t> CudaRing::claim() {
  std::unique_lock lock(mutex_);
  claimable_.wait(lock, [&] {
    return stop_ || (claiming_ < enqueued_ && claiming_ < released_ + staging_.slots);
  });
  if (stop_) return {nullptr, 0};
  Request& request = requests_[static_cast<size_t>(claiming_ - taken_)];
  const size_t piece = request.claimed++;
  if (request.claimed == request.pieces.size()) ++claiming_;
  if (reading_++ == 0) reading_since_ = Clock::now();
  return {&request, piece};
}

// Locks the reader's memory, which its own thread touches first: all of them do at the same time.
Result<void> CudaRing::lock_chunks(Reader& reader) {
  NIBBLE_TRY(cuda_ok(cudaSetDevice(device_), "loading"));
  const std::span<std::byte> host = reader.host.bytes();
  std::fill(host.begin(), host.end(), std::byte{0});
  if (cudaHostRegister(host.data(), host.size(), cudaHostRegisterDefault) != cudaSuccess) {
    return Error(Code::kResourceExhausted, cat("page-locked memory: ", host.size(), " bytes"));
  }
  reader.locked = true;
  return {};
}

// One thread's part of the work, until the ring ends.
void CudaRing::read_loop(Reader& reader) {
  const Result<void> locked = lock_chunks(reader);
  for (;;) {
    // The chunk first: a piece that is handed out is read at once.
    Result<void> ready = locked;
    if (ready) {
      if (const Result<Chunk*> chunk = free_chunk(reader); !chunk) ready = chunk.error();
    }
    const auto [request, number] = claim();
    if (request == nullptr) return;
    if (ready) ready = read_piece(reader, *request, number);
    std::lock_guard lock(mutex_);
    if (--reading_ == 0) {
      reading_seconds_ += std::chrono::duration<double>(Clock::now() - reading_since_).count();
    }
    if (ready) continue;
    fail(*request, number, ready.error());
    finish_piece(*request);
  }
}

Result<CudaRing::Chunk*> CudaRing::free_chunk(Reader& reader) {
  Chunk& chunk = reader.chunks[reader.next];
  if (!chunk.busy) return &chunk;
  {
    std::unique_lock lock(mutex_);
    sent_.wait(lock, [&] { return !chunk.queued; });
  }
  NIBBLE_TRY(cuda_ok(cudaEventSynchronize(chunk.copied), "loading"));
  chunk.busy = false;
  return &chunk;
}

// Reads a piece and sends it; its end is noted when its last copy is queued, or by the caller if
// this fails.
Result<void> CudaRing::read_piece(Reader& reader, Request& request, size_t number) {
  const Piece piece = request.pieces[number];  // a copy: the last send() may end the request
  if (piece.whole_plane) {
    NIBBLE_TRY(const std::vector<std::byte> plane, read_plane(*request.parts[piece.first].read));
    for (int64_t begin = 0; begin < piece.bytes; begin += staging_.chunk_bytes) {
      const int64_t bytes = std::min(staging_.chunk_bytes, piece.bytes - begin);
      NIBBLE_TRY(Chunk * chunk, free_chunk(reader));
      std::memcpy(chunk->host, plane.data() + begin, static_cast<size_t>(bytes));
      const bool last = begin + bytes == piece.bytes;
      send(reader, {chunk, &request, number, piece.at + begin, bytes, last});
    }
    return {};
  }
  NIBBLE_TRY(Chunk * chunk, free_chunk(reader));
  for (size_t i = piece.first; i < piece.end; ++i) {
    const Part& part = request.parts[i];
    NIBBLE_TRY(read_part(part, chunk->host + (part.read->at + part.begin - piece.at)));
  }
  send(reader, {chunk, &request, number, piece.at, piece.bytes, true});
  return {};
}

// As stored, straight to its place.
Result<void> CudaRing::read_part(const Part& part, std::byte* to) const {
  const RingRead& read = *part.read;
  const recipe::Weight& w = *read.weight;
  const std::span<std::byte> out(to, static_cast<size_t>(part.bytes));
  if (read.part == RingRead::Part::kCodes) {
    return index_.read(*w.codes.tensor, w.codes.begin + read.begin + part.begin, out);
  }
  NIBBLE_TRY(index_.read(*w.scales.tensor, w.scales.begin, out));
  return recipe::check_scales(read.key, w, out);
}

Result<std::vector<std::byte>> CudaRing::read_plane(const RingRead& read) const {
  const recipe::Weight& w = *read.weight;
  NIBBLE_TRY(std::vector<std::byte> plane, recipe::read_scale_plane(index_, w));
  NIBBLE_TRY(recipe::check_scales(read.key, w, plane));
  if (read.part == RingRead::Part::kScales) return plane;
  return widen_scales(w.meta.scale_kind, plane);
}

// Under mutex_: the first failing piece in order counts, so the error is the same every time.
void CudaRing::fail(Request& request, size_t piece, const Error& error) {
  if (!request.failed || piece < request.failed->first) request.failed.emplace(piece, error);
}

// Under mutex_; the request may be gone once that is free.
void CudaRing::finish_piece(Request& request) {
  if (++request.done == request.pieces.size()) done_.notify_one();
}

// Hands a chunk over to be copied. One thread at a time queues copies, its own and those handed
// over meanwhile; nobody waits for another's calls into the driver.
void CudaRing::send(Reader& reader, Send mine) {
  mine.chunk->busy = true;
  reader.next = (reader.next + 1) % reader.chunks.size();
  std::unique_lock lock(mutex_);
  mine.chunk->queued = true;
  to_send_.push_back(mine);
  if (sending_) return;
  sending_ = true;
  while (!to_send_.empty()) {
    const Send next = to_send_.front();
    to_send_.pop_front();
    Request& request = *next.request;
    const bool first = !request.started;
    const bool last = next.last && request.done + 1 == request.pieces.size();
    request.started = true;
    lock.unlock();
    const Result<void> done = copy(next, first, last);
    lock.lock();
    next.chunk->queued = false;
    sent_.notify_all();
    if (!done) fail(request, next.piece, done.error());
    if (next.last) finish_piece(request);
  }
  sending_ = false;
}

// Queues one copy, the `first` or the `last` of its request.
Result<void> CudaRing::copy(const Send& send, bool first, bool last) {
  Slot& slot = slot_of(send.request->number);
  if (first && send.request->number >= staging_.slots) {
    NIBBLE_TRY(cuda_ok(cudaStreamWaitEvent(copies_, slot.free, 0), "loading"));
  }
  NIBBLE_TRY(
      cuda_ok(cudaMemcpyAsync(slot.device.data() + send.at, send.chunk->host,
                              static_cast<size_t>(send.bytes), cudaMemcpyHostToDevice, copies_),
              "loading"));
  NIBBLE_TRY(cuda_ok(cudaEventRecord(send.chunk->copied, copies_), "loading"));
  if (last) NIBBLE_TRY(cuda_ok(cudaEventRecord(slot.filled, copies_), "loading"));
  return {};
}

Result<std::byte*> CudaRing::take() {
  if (taken_ > 0) {
    NIBBLE_TRY(cuda_ok(cudaEventRecord(slot_of(taken_ - 1).free, stream_), "loading"));
  }
  std::unique_lock lock(mutex_);
  NIBBLE_CHECK(!requests_.empty(), "nothing is enqueued");
  released_ = taken_;
  claimable_.notify_all();
  Request& request = requests_.front();
  done_.wait(lock, [&] { return request.done == request.pieces.size(); });
  if (request.failed) return request.failed->second;
  requests_.pop_front();
  Slot& slot = slot_of(taken_++);
  lock.unlock();
  NIBBLE_TRY(cuda_ok(cudaStreamWaitEvent(stream_, slot.filled, 0), "loading"));
  return slot.device.data();
}

Result<void> CudaRing::finish() { return cuda_ok(cudaStreamSynchronize(stream_), "loading"); }

}  // namespace nibble::load
