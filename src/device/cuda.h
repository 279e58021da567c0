// NVIDIA GPUs of this host: what is there, and memory on them. In a build without a CUDA compiler
// every function says so (cuda_none.cc); in one with it, on a machine without a driver, the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "device/memory.h"

namespace nibble::device {

struct CudaDevice {
  int index = 0;
  std::string name;  // "NVIDIA H200"
  int major = 0, minor = 0, processors = 0;
  int64_t bytes = 0, free_bytes = 0;
  int64_t block_shared_bytes = 0;  // the most shared memory that a block may ask for
};

/// The device with this index. Errors: kUnsupported with the reason (no CUDA in this build, no
/// driver, no such device, compute capability below 8.0).
Result<CudaDevice> cuda_device(int index);
/// Makes it this thread's current device.
Result<void> cuda_use(int index);

/// Device memory on this thread's current device, not initialised, 256-byte aligned. Errors:
/// kResourceExhausted with the bytes asked for and free.
Result<Memory> cuda_memory(int64_t bytes);
/// Page-locked host memory, for copies that overlap.
Result<Memory> cuda_pinned(int64_t bytes);

/// Bytes a second that copying device memory moves, read and written, on this thread's current
/// device: of copies of 4 GiB, or less where memory is short, between the best two of four places.
/// What "share of the bandwidth" means everywhere.
Result<double> cuda_copy_bandwidth();
/// Bytes a second from page-locked host memory to this thread's current device, of large copies.
Result<double> cuda_upload_bandwidth();

}  // namespace nibble::device
