// How products are cut into tasks: enough of them for balance, none so small that handing it out
// costs more than a few percent.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.h"

namespace nibble::kernels {

// A task should run some microseconds (in cycles, as tile_cost counts); measured on one Zen 5 host
// handing out a task costs 0.1 us and waking the spinning workers about 1 us.
constexpr int64_t kMinTaskCycles = 8000;
constexpr int64_t kTasksPerThread = 6;
// Few rows stream weights from memory, and a contiguous stream is worth more than balance: one
// NVFP4 row on two Zen 5 cores reads 52 % of the bandwidth with 24 tasks a thread, 69 % with 6, 74
// % with 2 and 79 % or more with 1.
constexpr int64_t kStreamingRows = 4;

/// Rough cycles of one tile: streaming its weights, or two multiply-adds of 16 lanes a cycle.
inline int64_t tile_cost(int64_t k, int64_t rows) { return k * std::max<int64_t>(rows, 3) / 2; }

/// Chunks to cut `units` equal pieces of work into; `total_cost` is that of all of them, and every
/// chunk is run `repeats` times (in tasks of their own) on `rows` rows.
inline int64_t task_count(int64_t units, int64_t unit_cost, int threads, int64_t rows,
                          int64_t repeats = 1) {
  if (threads <= 1) return 1;
  const int64_t per_thread = rows < kStreamingRows ? 1 : kTasksPerThread;
  const int64_t by_cost = units * unit_cost / repeats / kMinTaskCycles;
  const int64_t by_threads = (threads * per_thread + repeats - 1) / repeats;
  return std::clamp<int64_t>(std::min(by_cost, by_threads), 1, units);
}

/// Chunk `i` of `chunks` begins here; chunks differ by one unit at most.
inline int64_t share_begin(int64_t units, int64_t chunks, int64_t i) { return units * i / chunks; }

/// A single task runs here and now, without the pool.
template <typename Body>
void run_tasks(ThreadPool* pool, int64_t tasks, Body& body) {
  if (pool == nullptr || tasks == 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i, 0);
    return;
  }
  pool->parallel_for(tasks, body);
}

}  // namespace nibble::kernels
