// The CUDA kernels against their references on the GPU at hand: what `nibble selftest --device
// cuda` and the *_cuda_check programs run. No device code here; every function uses the current
// device, and reports CUDA errors as failed checks.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>

namespace nibble::kernels::cuda {

/// kQuick: a few cases, seconds under compute-sanitizer. kUsual: rows 1..256 on the shapes that
/// matter, about a minute for all kernels. kFull: every case there is.
enum class CheckSize : uint8_t { kQuick, kUsual, kFull };

struct CheckOptions {
  std::string_view format;  // as kernel_checks() names it
  CheckSize size = CheckSize::kFull;
  bool print_cases = true;  // a line for every case; failures are printed anyway
};

struct CheckSummary {
  int64_t checks = 0, failed = 0;
  double worst = 0;  // largest error in units of its stated bound, infinity for NaN
  void add(const CheckSummary& other);
};

CheckSummary check_linear(const CheckOptions& options, std::ostream& out);
CheckSummary check_router(const CheckOptions& options, std::ostream& out);
CheckSummary check_step(const CheckOptions& options, std::ostream& out);
CheckSummary check_embed(const CheckOptions& options, std::ostream& out);
CheckSummary check_norm(const CheckOptions& options, std::ostream& out);
CheckSummary check_sample(const CheckOptions& options, std::ostream& out);
CheckSummary check_moe(const CheckOptions& options, std::ostream& out);
CheckSummary check_csf(const CheckOptions& options, std::ostream& out);
CheckSummary check_attention(const CheckOptions& options, std::ostream& out);

struct KernelCheck {
  std::string_view kernel, format;
  CheckSummary (*run)(const CheckOptions& options, std::ostream& out);
};
/// Every kernel with every format that it takes.
std::span<const KernelCheck> kernel_checks();

}  // namespace nibble::kernels::cuda
