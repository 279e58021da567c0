// A fork-join pool for kernels and loading. parallel_for hands out task indices; which thread runs
// a task is not fixed, so a task's result must not depend on it (each output element belongs to one
// task, and a task reduces in its own fixed order: that is how nibble keeps bits equal at any
// thread count).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/result.h"

namespace nibble {

class ThreadPool {
 public:
  /// `threads` counts the caller, so 1 starts no thread. 0 means one per usable core.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Runs body(task, worker) for every task in [0, tasks); returns when all are done. worker is in
  /// [0, threads()) and unique among bodies running at the same time: use it to pick scratch.
  /// Not reentrant: a body must not call parallel_for of the same pool. One caller at a time.
  template <typename Body>
  void parallel_for(int64_t tasks, Body&& body) {
    using Fn = std::remove_reference_t<Body>;
    run(
        tasks, [](void* ctx, int64_t task, int worker) { (*static_cast<Fn*>(ctx))(task, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  /// The same for bodies that return Result<void>. All tasks run; the error is that of the first
  /// failing task in order, so the same every run.
  template <typename Body>
  Result<void> try_parallel_for(int64_t tasks, Body&& body) {
    std::mutex mutex;
    std::optional<std::pair<int64_t, Error>> failed;
    parallel_for(tasks, [&](int64_t task, int worker) {
      if (Result<void> ok = body(task, worker); !ok) {
        std::lock_guard lock(mutex);
        if (!failed || task < failed->first) failed.emplace(task, ok.error());
      }
    });
    if (failed) return failed->second;
    return {};
  }

 private:
  using TaskFn = void (*)(void*, int64_t, int);
  void run(int64_t tasks, TaskFn fn, void* ctx);
  void worker_loop(int worker);
  void drain(int worker);

  std::vector<std::thread> workers_;
  TaskFn fn_ = nullptr;
  void* ctx_ = nullptr;
  int64_t tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<int> running_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

/// Cores this process may use (affinity mask), at least 1.
int usable_cores();

}  // namespace nibble
