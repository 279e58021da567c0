#include "cli/selftest.h"

namespace nibble::cli {

Result<void> selftest_cuda(const recipe::Recipe*, const VerdictSink&) {
  return Error(Code::kUnsupported, "this build has no CUDA (no CUDA compiler was found)");
}

}  // namespace nibble::cli
