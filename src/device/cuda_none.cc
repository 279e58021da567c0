#include "device/cuda.h"

namespace nibble::device {
namespace {

Error no_cuda() {
  return Error(Code::kUnsupported,
               "this build has no CUDA (no NVIDIA driver, or no nvcc, when it was made)");
}

}  // namespace

Result<CudaDevice> cuda_device(int) { return no_cuda(); }
Result<void> cuda_use(int) { return no_cuda(); }
Result<Memory> cuda_memory(int64_t) { return no_cuda(); }
Result<Memory> cuda_pinned(int64_t) { return no_cuda(); }
Result<double> cuda_copy_bandwidth() { return no_cuda(); }
Result<double> cuda_upload_bandwidth() { return no_cuda(); }

}  // namespace nibble::device
