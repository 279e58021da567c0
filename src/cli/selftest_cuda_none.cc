#include "cli/selftest.h"
#include "device/cuda.h"

namespace nibble::cli {

Result<void> selftest_cuda(const recipe::Recipe*, const VerdictSink&) {
  return device::cuda_use(0).error();
}

}  // namespace nibble::cli
