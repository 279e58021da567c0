#include "device/cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

namespace nibble::device {
namespace {

Error cuda_error(Code code, std::string_view what, cudaError_t error) {
  return Error(code, cat(what, ": ", cudaGetErrorString(error)));
}

}  // namespace

Result<CudaDevice> cuda_device(int index) {
  int count = 0;
  if (cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess) {
    return cuda_error(Code::kUnsupported, "no usable NVIDIA GPU", e);
  }
  if (index < 0 || index >= count) {
    return Error(Code::kUnsupported, cat("cuda:", index, ": this host has ", count, " GPUs"));
  }
  cudaDeviceProp p;
  if (cudaError_t e = cudaGetDeviceProperties(&p, index); e != cudaSuccess) {
    return cuda_error(Code::kUnsupported, cat("cuda:", index), e);
  }
  if (p.major < 8) {
    return Error(Code::kUnsupported, cat("cuda:", index, " (", p.name, "): compute capability ",
                                         p.major, ".", p.minor, ", at least 8.0 is needed"));
  }
  NIBBLE_TRY(cuda_use(index));
  size_t free_bytes = 0, all_bytes = 0;
  if (cudaError_t e = cudaMemGetInfo(&free_bytes, &all_bytes); e != cudaSuccess) {
    return cuda_error(Code::kUnsupported, cat("cuda:", index), e);
  }
  CudaDevice device;
  device.index = index;
  device.name = p.name;
  device.major = p.major;
  device.minor = p.minor;
  device.processors = p.multiProcessorCount;
  device.bytes = static_cast<int64_t>(all_bytes);
  device.block_shared_bytes = static_cast<int64_t>(p.sharedMemPerBlockOptin);
  device.free_bytes = static_cast<int64_t>(free_bytes);
  return device;
}

Result<void> cuda_use(int index) {
  if (cudaError_t e = cudaSetDevice(index); e != cudaSuccess) {
    return cuda_error(Code::kUnsupported, cat("cuda:", index), e);
  }
  return {};
}

Result<Memory> cuda_memory(int64_t bytes) {
  if (bytes == 0) return Memory();
  void* data = nullptr;
  if (cudaError_t e = cudaMalloc(&data, static_cast<size_t>(bytes)); e != cudaSuccess) {
    cudaGetLastError();  // it was reported here
    size_t free_bytes = 0, all_bytes = 0;
    cudaMemGetInfo(&free_bytes, &all_bytes);
    return cuda_error(
        Code::kResourceExhausted,
        cat("device memory: ", bytes, " bytes asked for, ", free_bytes, " of ", all_bytes, " free"),
        e);
  }
  return Memory(static_cast<std::byte*>(data), bytes, [](std::byte* p, int64_t) { cudaFree(p); });
}

Result<Memory> cuda_pinned(int64_t bytes) {
  if (bytes == 0) return Memory();
  void* data = nullptr;
  if (cudaError_t e = cudaMallocHost(&data, static_cast<size_t>(bytes)); e != cudaSuccess) {
    cudaGetLastError();
    return cuda_error(Code::kResourceExhausted, cat("page-locked memory: ", bytes, " bytes"), e);
  }
  return Memory(static_cast<std::byte*>(data), bytes,
                [](std::byte* p, int64_t) { cudaFreeHost(p); });
}

namespace {

// Bytes a second of one kind of copy: the median of nine after one that warms up.
Result<double> copy_speed(std::byte* to, const std::byte* from, int64_t bytes,
                          cudaMemcpyKind kind) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::array<float, 9> milliseconds{};
  cudaError_t error = cudaSuccess;
  for (size_t i = 0; i <= milliseconds.size() && error == cudaSuccess; ++i) {
    cudaEventRecord(begin);
    error = cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind);
    cudaEventRecord(end);
    if (error == cudaSuccess) error = cudaEventSynchronize(end);
    if (i > 0) cudaEventElapsedTime(&milliseconds[i - 1], begin, end);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (error != cudaSuccess) return cuda_error(Code::kDeviceLost, "measuring copies", error);
  std::sort(milliseconds.begin(), milliseconds.end());
  return static_cast<double>(bytes) / (milliseconds[milliseconds.size() / 2] * 1e-3);
}

/// Random bytes, as weights are: one block from the host, then copies of what is there.
Result<void> fill_random(std::byte* to, int64_t bytes) {
  std::vector<uint64_t> block(size_t{2} << 20);
  std::mt19937_64 random(1);
  for (uint64_t& word : block) word = random();
  int64_t filled = std::min(bytes, static_cast<int64_t>(block.size() * sizeof(uint64_t)));
  cudaError_t error =
      cudaMemcpy(to, block.data(), static_cast<size_t>(filled), cudaMemcpyHostToDevice);
  while (filled < bytes && error == cudaSuccess) {
    const int64_t more = std::min(filled, bytes - filled);
    error = cudaMemcpy(to + filled, to, static_cast<size_t>(more), cudaMemcpyDeviceToDevice);
    filled += more;
  }
  if (error != cudaSuccess) return cuda_error(Code::kDeviceLost, "filling memory", error);
  return {};
}

}  // namespace

Result<double> cuda_copy_bandwidth() {
  // Large enough that starting and ending do not count.
  constexpr int64_t kMostBytes = int64_t{4} << 30;
  size_t free = 0, total = 0;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  if (error != cudaSuccess) return cuda_error(Code::kDeviceLost, "free memory", error);
  // Where two blocks lie may make a tenth of the speed (3.85 to 4.29 TB/s seen on one H200 with 4
  // GiB): the best of all pairs of four.
  std::array<Memory, 4> blocks;
  const int64_t bytes =
      std::min(kMostBytes, static_cast<int64_t>(free) / static_cast<int64_t>(blocks.size() + 1));
  for (Memory& block : blocks) {
    NIBBLE_TRY(block, cuda_memory(bytes));
    NIBBLE_TRY(fill_random(block.data(), bytes));
  }
  double best = 0;
  for (size_t to = 0; to < blocks.size(); ++to) {
    for (size_t from = 0; from < to; ++from) {
      NIBBLE_TRY(const double speed, copy_speed(blocks[to].data(), blocks[from].data(), bytes,
                                                cudaMemcpyDeviceToDevice));
      best = std::max(best, speed);
    }
  }
  return 2 * best;
}

Result<double> cuda_upload_bandwidth() {
  constexpr int64_t kBytes = int64_t{256} << 20;
  NIBBLE_TRY(const Memory from, cuda_pinned(kBytes));
  NIBBLE_TRY(const Memory to, cuda_memory(kBytes));
  std::fill_n(from.data(), kBytes, std::byte{0x5A});
  return copy_speed(to.data(), from.data(), kBytes, cudaMemcpyHostToDevice);
}

}  // namespace nibble::device
