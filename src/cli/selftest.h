// What `nibble selftest` runs, one line a kernel and format. In a build without CUDA the GPU part
// says so (selftest_cuda_none.cc).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/result.h"
#include "recipe/recipe.h"

namespace nibble::cli {

struct KernelVerdict {
  std::string kernel, format;
  int64_t checks = 0, failed = 0;
  double worst = 0;      // largest error in units of its stated bound
  std::string failures;  // a line each
};
using VerdictSink = std::function<void(const KernelVerdict&)>;

/// Every CUDA kernel with every format, or with `recipe` those that this checkpoint uses, on the
/// thread's current device; verdicts come as they are known. Errors: kUnsupported without CUDA.
Result<void> selftest_cuda(const recipe::Recipe* recipe, const VerdictSink& sink);

}  // namespace nibble::cli
