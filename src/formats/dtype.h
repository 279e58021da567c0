// Element types of stored tensors, as safetensors names them (spec: containers, section 1).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace nibble::formats {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
  kC64,
  kF4,
  kF6E2M3,
  kF6E3M2,
};

std::string_view dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
/// Bits of one element: 4, 6, 8, 16, 32 or 64.
int dtype_bits(DType dtype);

}  // namespace nibble::formats
