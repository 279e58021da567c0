// Arbitrary bytes as a safetensors file: parse_header either refuses them or proves ranges that
// tile the data part. The first byte picks how much data the file claims to have.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "checkpoint/checkpoint_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble::checkpoint;
  if (size == 0) return 0;
  const std::string_view file(reinterpret_cast<const char*>(data) + 1, size - 1);
  // Even: exactly these bytes. Odd: a file with up to 255 bytes more than were read.
  const int64_t extra = (data[0] & 1) != 0 ? data[0] : 0;
  const auto file_size = static_cast<int64_t>(file.size()) + extra;
  const auto header = parse_header(file, file_size);
  if (!header) {
    NIBBLE_CHECK(header.error().message().find(": ") != std::string::npos);
    return 0;
  }
  int64_t at = header->data_begin;
  for (const TensorInfo& tensor : header->tensors) {
    NIBBLE_CHECK(tensor.offset == at && tensor.bytes >= 0, tensor.offset, " ", at);
    const int64_t bits = element_count(tensor) * nibble::formats::dtype_bits(tensor.dtype);
    NIBBLE_CHECK(bits == tensor.bytes * 8, bits, " ", tensor.bytes);
    at += tensor.bytes;
  }
  NIBBLE_CHECK(at == file_size, at, " ", file_size);
  return 0;
}
