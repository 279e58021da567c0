// Stored CSF scales of one module, judged from names and headers: which form is stored, whether
// the config declares it, and whether the two tensors have the form that the weight implies. The
// streams themselves are scale_plane.h's business. Source: spec: containers, sections 2.1 and 3;
// csf, section 3.
#pragma once

#include <optional>

#include "recipe/module_resolver.h"

namespace nibble::recipe {

struct CsfTensors {
  const checkpoint::TensorInfo *fixed = nullptr, *exceptions = nullptr;
};

/// The module's compressed scale, or nothing if its scales are plain (or it has none).
/// Errors: kCorruptInput starting with partner_missing, scale_twice or scale_missing; or with
/// scale_encoding, where a ModelOpt config and the stored form disagree.
Result<std::optional<CsfTensors>> find_csf(const checkpoint::CheckpointIndex& index,
                                           const Quantization& quant, const ModuleRef& module,
                                           const ModuleTensors& tensors, const Declared& declared);

/// Are both headers those of a plane [rows, cols]? Errors: kCorruptInput starting with rows_not_16,
/// columns_odd, position_limit, fixed_dtype, exception_dtype, fixed_shape or exception_shape.
Result<void> check_csf_headers(codec::CsfKind kind, int64_t rows, int64_t cols,
                               const CsfTensors& stored);

}  // namespace nibble::recipe
