// From one module's stored tensors to a Weight: dtype, shape and sibling scales decide the format,
// the declared quantization only where they leave a choice. Reads no tensor data but global scales.
// Spec: containers, sections 2, 4, 6, 7 and 8.
#pragma once

#include <string>
#include <vector>

#include "recipe/module_tensors.h"
#include "recipe/quantization.h"
#include "recipe/recipe.h"

namespace nibble::recipe {

/// A weight, or the name of the tensor that is missing for it.
struct Resolution {
  std::optional<Weight> weight;
  std::string missing, why;  // without a weight: "model…up_proj.weight_scale", "scale of nvfp4 …"
  Declared declared;         // points into the Quantization
  std::string contradiction;  // what the tensors hold where `declared` says otherwise, else empty
  std::vector<const checkpoint::TensorInfo*> used;
};
/// rows, cols: what the graph expects; 0 takes them from the tensors. Errors: kCorruptInput
/// starting with tensor_form, global_scale, scale_encoding, a hybrid's error, or those of
/// csf_scales.h for a compressed scale.
Result<Resolution> resolve(const checkpoint::CheckpointIndex& index, const Quantization& quant,
                           const ModuleRef& module, int64_t rows, int64_t cols);
/// The Resolution's weight, or a tensor_missing error.
Result<Weight> weight_of(Resolution resolution, const std::string& module);

struct CsfTensors;  // csf_scales.h

/// A vector [elems] of F32, BF16 or F16 stored as `tensor_name`; missing: no weight.
Result<Resolution> resolve_vector(const checkpoint::CheckpointIndex& index,
                                  const std::string& tensor_name, int64_t elems);

// One module's resolution in progress; split over files by element type.
struct ModuleResolver {
  const checkpoint::CheckpointIndex& index;
  const Quantization& quant;
  const ModuleRef& module;
  const ModuleTensors& tensors;
  const Declared& declared;
  const CsfTensors* csf;  // the compressed scale, null if plain
  int64_t rows, cols;     // expected, 0: any

  Result<Resolution> resolve_codes() const;
  Result<Resolution> plain(const StoredPlane& codes) const;
  Result<Resolution> packed4(const StoredPlane& codes, bool packed_name) const;
  Result<Resolution> nvfp4(const StoredPlane& codes, int64_t width, const StoredPlane& scale,
                           bool packed_name) const;
  Result<Resolution> nvfp4_with_global(const StoredPlane& codes, const StoredPlane* scale,
                                       formats::MatrixView meta, bool packed_name) const;
  /// NVFP4 or MXFP4 codes [o, width] whose scales are stored CSF.
  Result<Resolution> csf_packed4(const StoredPlane& codes, int64_t width, bool packed_name) const;
  Result<Resolution> nf3(const StoredPlane& codes, const checkpoint::TensorInfo* scale,
                         std::string dialect) const;
  Result<Resolution> fp8(const StoredPlane& codes) const;
  Result<Resolution> fp8_block(const StoredPlane& codes, const StoredPlane& scale,
                               std::string dialect) const;

  /// Checks sizes against the expected ones and the format's groups.
  Result<Resolution> finish(const StoredPlane& codes, const StoredPlane* scale,
                            formats::MatrixView meta, std::string dialect) const;
  Resolution missing(const std::string& suffix, std::string why) const;
  Result<float> global_scale(const checkpoint::TensorInfo& tensor, bool divisor) const;
};

/// "tensor_form: 'name': expected …, found F32 [3, 4]".
Error tensor_form(const checkpoint::TensorInfo& tensor, const std::string& expected);

}  // namespace nibble::recipe
