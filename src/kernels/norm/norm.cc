// Contract checks and work split of the norms; the arithmetic of a row is in norm_isa.cc.
#include "kernels/norm/norm.h"

#include <algorithm>

#include "kernels/norm/norm_isa.h"

namespace nibble::kernels {
namespace {

// Elements per task: some microseconds of memory traffic, well above the cost of handing it out.
constexpr int64_t kTaskElems = 16384;

void run_rows(const Exec& exec, const RmsNormRows& all) {
  if (all.rows == 0) return;
  const RmsNormRowsFn kernel = rms_norm_rows_kernel(exec.isa);
  const int64_t per_task = std::max<int64_t>(1, kTaskElems / all.n);
  exec.pool->parallel_for((all.rows + per_task - 1) / per_task, [&](int64_t task, int) {
    const int64_t begin = task * per_task;
    RmsNormRows part = all;
    part.rows = std::min(per_task, all.rows - begin);
    part.x += begin * all.n;
    part.out += begin * all.n;
    if (part.delta != nullptr) part.delta += begin * all.n;
    kernel(part);
  });
}

}  // namespace

RmsNormRowsFn rms_norm_rows_kernel(device::Isa isa) {
  switch (isa) {
#define NIBBLE_CASE(ns, value) \
  case value: return ns::rms_norm_rows;
    NIBBLE_FOR_EACH_ISA(NIBBLE_CASE)
#undef NIBBLE_CASE
    default: break;
  }
  check_failed(__FILE__, __LINE__, "isa is in this build", std::string(device::isa_name(isa)));
}

void rms_norm(const Exec& exec, const float* x, int64_t rows, int64_t n, const float* weight,
              float eps, float* out) {
  NIBBLE_CHECK(exec.pool != nullptr && rows >= 0 && n > 0, rows, " rows of ", n);
  NIBBLE_CHECK(x != nullptr && weight != nullptr && out != nullptr);
  // The row kernel writes x only where a delta is given.
  run_rows(exec, {.x = const_cast<float*>(x),
                  .delta = nullptr,
                  .weight = weight,
                  .out = out,
                  .rows = rows,
                  .n = n,
                  .eps = eps});
}

void add_rms_norm(const Exec& exec, float* residual, const float* delta, int64_t rows, int64_t n,
                  const float* weight, float eps, float* out) {
  NIBBLE_CHECK(exec.pool != nullptr && rows >= 0 && n > 0, rows, " rows of ", n);
  NIBBLE_CHECK(residual != nullptr && delta != nullptr && weight != nullptr && out != nullptr);
  NIBBLE_CHECK(out != residual && out != delta);
  run_rows(exec, {.x = residual,
                  .delta = delta,
                  .weight = weight,
                  .out = out,
                  .rows = rows,
                  .n = n,
                  .eps = eps});
}

void add(const Exec& exec, float* residual, const float* delta, int64_t count) {
  NIBBLE_CHECK(exec.pool != nullptr && count >= 0, count, " elements");
  if (count == 0) return;
  NIBBLE_CHECK(residual != nullptr && delta != nullptr);
  exec.pool->parallel_for((count + kTaskElems - 1) / kTaskElems, [&](int64_t task, int) {
    const int64_t begin = task * kTaskElems;
    const int64_t end = std::min(count, begin + kTaskElems);
    for (int64_t i = begin; i < end; ++i) residual[i] += delta[i];
  });
}

}  // namespace nibble::kernels
