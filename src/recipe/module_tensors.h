// The stored tensors of one module, found by the suffixes all dialects use, as whole tensors or as
// one expert's slice of stacked ones. Names only; module_resolver.h gives them meaning.
// Spec: containers, sections 2 and 4 to 7.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "checkpoint/checkpoint_index.h"

namespace nibble::recipe {

/// A module, or expert `expert` of a module whose tensors carry a leading extent `experts`.
struct ModuleRef {
  std::string name;
  int64_t expert = -1, experts = 0;
  bool stacked() const { return expert >= 0; }
};

/// Null where absent.
struct ModuleTensors {
  using Info = checkpoint::TensorInfo;
  const Info *weight = nullptr, *weight_packed = nullptr, *nf3_packed = nullptr;
  const Info *weight_scale = nullptr, *weight_scale_inv = nullptr, *scale = nullptr;
  const Info *weight_scale_fp8 = nullptr, *nf3_scale = nullptr;
  const Info *weight_scale_2 = nullptr, *weight_global_scale = nullptr;
  const Info *input_scale = nullptr, *input_global_scale = nullptr;
  const Info* encoded =
      nullptr;              // part of a compressed scale plane (".…_csf_fixed" or its partner)
  bool second_nf3 = false;  // nf3_packed is there under both of its names
  bool blocks = false;      // weight and scale are gpt-oss "_blocks" and "_scales"
  bool any() const {
    return weight != nullptr || weight_packed != nullptr || nf3_packed != nullptr;
  }
};
ModuleTensors find_module(const checkpoint::CheckpointIndex& index, const std::string& module);

/// Whether any tensor's name starts with "module.".
bool module_exists(const checkpoint::CheckpointIndex& index, const std::string& module);
/// Every module that has a weight tensor (".weight", ".weight_packed", ".nf3_packed",
/// ".nf3_refit_packed"), sorted.
std::vector<std::string> weight_modules(const checkpoint::CheckpointIndex& index);

/// A stored plane: its shape without the experts' extent, and where it lies inside the tensor.
struct StoredPlane {
  const checkpoint::TensorInfo* tensor = nullptr;
  std::array<int64_t, 4> shape = {};
  int rank = 0;
  int64_t begin = 0, bytes = 0;
};
/// Errors: kCorruptInput starting with "tensor_form: " if the rank is above 4, an extent is 0, or
/// the leading extent is not the number of experts.
Result<StoredPlane> stored_plane(const checkpoint::TensorInfo& tensor, const ModuleRef& module);
/// A scalar: as above, but one value shared by all experts is taken too.
Result<StoredPlane> stored_scalar(const checkpoint::TensorInfo& tensor, const ModuleRef& module);

}  // namespace nibble::recipe
