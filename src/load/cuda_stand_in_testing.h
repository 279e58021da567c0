// A stand-in for the CUDA runtime in tests of the loader: device memory is host memory, and each
// stream is a thread that does what is queued on it, late. So a buffer that is used again too
// early, or read before its copy, shows as wrong bytes, and in the thread sanitizer. Include it in
// one file of a test binary; it replaces libcudart there.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

/// Calls so far: copies queued, waits of a thread for an event.
inline std::atomic<int> copies{0}, waits{0};
/// How late a stream does each thing.
inline std::atomic<int> stand_in_delay_us{0};

/// How often an event was recorded, and how many of these are done.
struct StandInEvent {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0, done = 0;

  int64_t last() {
    std::lock_guard lock(mutex);
    return recorded;
  }
  void wait(int64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= number; });
  }
};

class StandInStream {
 public:
  ~StandInStream() {
    queue([this] { stop_ = true; });
    thread_.join();
  }
  void queue(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void finish() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty(); });
  }

 private:
  void run() {
    while (!stop_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void()>& next = work_.front();  // stays in place while others come
      lock.unlock();
      if (const int us = stand_in_delay_us; us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      }
      next();
      lock.lock();
      work_.pop_front();
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;  // the thread's own
  std::thread thread_{[this] { run(); }};
};

/// What a stand-in for a kernel does: `work`, when the stream comes to it.
inline void queue_on(cudaStream_t stream, std::function<void()> work) {
  reinterpret_cast<StandInStream*>(stream)->queue(std::move(work));
}

extern "C" {
cudaError_t cudaMalloc(void** p, size_t n) {
  *p = std::malloc(n);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t n) { return cudaMalloc(p, n); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new StandInStream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  reinterpret_cast<StandInStream*>(stream)->finish();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<StandInStream*>(stream);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new StandInEvent);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<StandInEvent*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto* e = reinterpret_cast<StandInEvent*>(event);
  std::unique_lock lock(e->mutex);
  const int64_t number = ++e->recorded;
  lock.unlock();
  queue_on(stream, [e, number] {
    std::lock_guard done(e->mutex);
    e->done = number;
    e->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++waits;
  auto* e = reinterpret_cast<StandInEvent*>(event);
  e->wait(e->last());
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto* e = reinterpret_cast<StandInEvent*>(event);
  queue_on(stream, [e, number = e->last()] { e->wait(number); });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind,
                            cudaStream_t stream) {
  ++copies;
  queue_on(stream, [=] { std::memcpy(to, from, n); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  std::memcpy(to, from, n);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemset(void* p, int value, size_t n) {
  std::memset(p, value, n);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
  queue_on(stream, [=] { std::memset(p, value, n); });
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) {
  *free_bytes = *all = size_t{1} << 30;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
}
