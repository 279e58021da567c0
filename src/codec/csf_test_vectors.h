// For this folder's tests: cases of vectors.json as planes and streams.
#pragma once

#include <string>

#include "codec/csf_test_planes.h"
#include "support/vector_file.h"

namespace nibble::codec::testing {

using nibble::testing::Blob;
using nibble::testing::Case;
using nibble::testing::VectorSet;

inline CsfKind kind_of(const Case& c, const char* key = "kind") {
  return c.params.at(key) == "nvfp4" ? CsfKind::kNvfp4 : CsfKind::kMxfp4;
}
inline int64_t param(const Case& c, const char* key) { return c.params.at(key).get<int64_t>(); }

inline CsfStored stored_of(const Blob& fixed, const Blob& exceptions) {
  CsfStored facts;
  facts.fixed_is_u8 = fixed.dtype == "U8";
  facts.exceptions_are_u32 = exceptions.dtype == "U32";
  facts.fixed_shape = fixed.shape;
  facts.exception_shape = exceptions.shape;
  facts.fixed = {reinterpret_cast<const uint8_t*>(fixed.bytes.data()), fixed.bytes.size()};
  facts.exceptions = {reinterpret_cast<const uint8_t*>(exceptions.bytes.data()),
                      exceptions.bytes.size()};
  return facts;
}
inline CsfPlane plane_of(CsfKind kind, int64_t rows, int64_t cols, const Blob& fixed,
                         const Blob& exceptions) {
  return {kind, rows, cols, fixed.as<uint8_t>(), exceptions.as<uint32_t>()};
}
/// Does a message start with "<name>: "?
inline bool names(const Error& error, const std::string& name) {
  return error.message().starts_with(name + ": ");
}

}  // namespace nibble::codec::testing
