// The core of `nibble verify`: decodes every scale plane of a checkpoint and proves that no byte
// was lost, alone (every stream legal, every plane through the codec and back) or against a second
// checkpoint (every tensor, in whatever form its scales are stored).
// Source: spec: csf, sections 2 and 3.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/result.h"
#include "base/thread_pool.h"
#include "load/convert.h"

namespace nibble::load {

/// Where two checkpoints first differ, in order of tensor names.
struct Difference {
  std::string tensor;  // in plain form: "....weight_scale"
  /// Empty if bytes differ, else what does: "is missing in ...", "F32 [2] against BF16 [2]".
  std::string what;
  int64_t row = 0, column = 0;  // of the first byte that differs; columns count elements
  int left = 0, right = 0;      // that byte on both sides
};
/// One line for a user.
std::string difference_text(const Difference& difference);

struct VerifyReport {
  int64_t planes = 0, plane_bytes = 0;    // decoded scale planes and their bytes
  int64_t stored_planes = 0;              // of them stored as CSF
  int64_t csf_bytes = 0, exceptions = 0;  // of the streams: stored ones, or those of a trial encode
  int64_t not_canonical = 0;              // legal streams that nibble's encoder would not write
  int64_t not_encodable = 0;              // planes of a size that the codec does not take
  int64_t tensors = 0, tensor_bytes = 0;  // compared with the other checkpoint, planes included
  int64_t differing = 0;                  // tensors that differ
  std::optional<Difference> first;
  bool same() const { return differing == 0; }
};

/// Every scale plane of `directory` (NVFP4, MXFP4 and MXFP8, any container): stored streams are
/// validated, decoded, and compared with the canonical encoding of what they decode to; plain ones
/// are encoded, decoded and compared. Memory: two planes and their streams per thread.
/// Errors: those of opening; a malformed stream's, by the codec's name and with its tensor.
Result<VerifyReport> verify_checkpoint(const std::string& directory, ThreadPool& pool,
                                       const std::function<void(const ConvertProgress&)>& progress);

/// The same, and every tensor byte for byte against `other`: scale planes decoded, whatever forms
/// they have, all others as stored (name, type, shape, bytes).
Result<VerifyReport> verify_against(const std::string& directory, const std::string& other,
                                    ThreadPool& pool,
                                    const std::function<void(const ConvertProgress&)>& progress);

}  // namespace nibble::load
