// Test and bench material for CSF on the device. Not part of the library.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "codec/csf.h"
#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/moe_case.h"

namespace nibble::kernels::cuda {

template <typename T>
std::vector<T> download(const T* data, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  must(cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

/// The streams of a stack with room for `capacity` exceptions.
struct StreamBuffers {
  StreamBuffers(const CsfStack& s, int64_t capacity)
      : stack(s),
        fixed(s.experts * codec::csf_fixed_bytes(s.kind, s.rows, s.cols)),
        exceptions(4 * capacity + 16),
        row_begin(4 * (s.experts * s.rows + 1)),
        scratch(csf_encode_scratch_bytes(s)),
        room(capacity) {}
  CsfStreams view() const {
    return {fixed.as<uint8_t>(), exceptions.as<uint32_t>(), row_begin.as<uint32_t>(), room};
  }
  int64_t count() const {
    return download(row_begin.as<uint32_t>() + stack.experts * stack.rows, 1)[0];
  }
  CsfStack stack;
  DeviceBuffer fixed, exceptions, row_begin, scratch;
  int64_t room;
};

/// Are the device's streams byte for byte what the CPU codec writes for the planes?
inline bool equals_cpu_codec(const StreamBuffers& out, const std::vector<uint8_t>& planes) {
  const CsfStack& s = out.stack;
  const auto fixed = download(out.fixed.as<uint8_t>(), out.fixed.bytes());
  const auto begins = download(out.row_begin.as<uint32_t>(), s.experts * s.rows + 1);
  const auto words = download(out.exceptions.as<uint32_t>(), begins.back());
  const int64_t cells = s.rows * s.cols, bytes = codec::csf_fixed_bytes(s.kind, s.rows, s.cols);
  std::atomic<bool> equal = true;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 16; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t e = t; e < s.experts; e += 16) {
        const auto cpu = codec::encode_csf(s.kind, s.rows, s.cols,
                                           {planes.data() + e * cells, static_cast<size_t>(cells)});
        const uint32_t begin = begins[static_cast<size_t>(e * s.rows)];
        const uint32_t end = begins[static_cast<size_t>((e + 1) * s.rows)];
        const bool same =
            cpu.has_value() &&
            std::memcmp(cpu->fixed.data(), fixed.data() + e * bytes, cpu->fixed.size()) == 0 &&
            cpu->exceptions.size() == end - begin &&
            std::memcmp(cpu->exceptions.data(), words.data() + begin, 4 * (end - begin)) == 0;
        if (!same) equal = false;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return equal;
}

}  // namespace nibble::kernels::cuda
