#include "recipe/module_tensors.h"

#include <algorithm>
#include <span>

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;

constexpr std::string_view kWeightSuffixes[] = {".weight", ".weight_packed", ".nf3_packed",
                                                ".nf3_refit_packed"};

/// The first tensor whose name is not below `text`.
std::span<const TensorInfo>::iterator first_from(const CheckpointIndex& index,
                                                 std::string_view text) {
  const std::span<const TensorInfo> tensors = index.tensors();
  return std::lower_bound(
      tensors.begin(), tensors.end(), text,
      [](const TensorInfo& tensor, std::string_view value) { return tensor.name < value; });
}

struct Slot {
  std::string_view suffix;
  const TensorInfo* ModuleTensors::*member;
};
constexpr Slot kSlots[] = {
    {"weight", &ModuleTensors::weight},
    {"weight_packed", &ModuleTensors::weight_packed},
    {"nf3_packed", &ModuleTensors::nf3_packed},
    {"weight_scale", &ModuleTensors::weight_scale},
    {"weight_scale_inv", &ModuleTensors::weight_scale_inv},
    {"scale", &ModuleTensors::scale},
    {"weight_scale_fp8", &ModuleTensors::weight_scale_fp8},
    {"nf3_scale", &ModuleTensors::nf3_scale},
    {"weight_scale_2", &ModuleTensors::weight_scale_2},
    {"weight_global_scale", &ModuleTensors::weight_global_scale},
    {"input_scale", &ModuleTensors::input_scale},
    {"input_global_scale", &ModuleTensors::input_global_scale},
};

void take(ModuleTensors& out, std::string_view suffix, const TensorInfo& tensor) {
  for (const Slot& slot : kSlots) {
    if (slot.suffix == suffix) {
      out.*slot.member = &tensor;
      return;
    }
  }
  if (suffix == "nf3_refit_packed") {
    out.second_nf3 = out.nf3_packed != nullptr;
    out.nf3_packed = &tensor;
  } else if (suffix == "nf3_refit_scale") {
    out.nf3_scale = &tensor;
  } else if (suffix.ends_with("_csf_fixed") || suffix.ends_with("_csf_exceptions")) {
    out.encoded = &tensor;
  }
}

Error form_error(const TensorInfo& tensor, const std::string& expected) {
  return Error(Code::kCorruptInput,
               cat("tensor_form: '", tensor.name, "': expected ", expected, ", found ",
                   formats::dtype_name(tensor.dtype), " ", checkpoint::shape_text(tensor.shape)));
}

}  // namespace

ModuleTensors find_module(const CheckpointIndex& index, const std::string& module) {
  ModuleTensors out;
  const std::string prefix = module + ".";
  for (auto it = first_from(index, prefix);
       it != index.tensors().end() && it->name.starts_with(prefix); ++it) {
    take(out, std::string_view(it->name).substr(prefix.size()), *it);
  }
  if (out.any()) return out;
  // gpt-oss joins with an underscore.
  const TensorInfo* blocks = index.find(module + "_blocks");
  if (blocks != nullptr) {
    out.blocks = true;
    out.weight = blocks;
    out.weight_scale = index.find(module + "_scales");
  }
  return out;
}

bool module_exists(const CheckpointIndex& index, const std::string& module) {
  const std::string prefix = module + ".";
  const auto it = first_from(index, prefix);
  return it != index.tensors().end() && it->name.starts_with(prefix);
}

std::vector<std::string> weight_modules(const CheckpointIndex& index) {
  std::vector<std::string> out;
  for (const TensorInfo& tensor : index.tensors()) {
    for (const std::string_view suffix : kWeightSuffixes) {
      if (!tensor.name.ends_with(suffix)) continue;
      out.push_back(tensor.name.substr(0, tensor.name.size() - suffix.size()));
      break;
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

Result<StoredPlane> stored_plane(const TensorInfo& tensor, const ModuleRef& module) {
  std::span<const int64_t> shape = tensor.shape;
  StoredPlane out;
  out.tensor = &tensor;
  out.bytes = tensor.bytes;
  if (module.stacked()) {
    if (shape.empty() || shape[0] != module.experts) {
      return form_error(tensor, cat("a leading extent of ", module.experts, " experts"));
    }
    if (tensor.bytes % module.experts != 0) {
      return form_error(tensor, "whole bytes for each expert");
    }
    out.bytes = tensor.bytes / module.experts;
    out.begin = out.bytes * module.expert;
    shape = shape.subspan(1);
  }
  if (shape.size() > out.shape.size()) return form_error(tensor, "a matrix");
  for (const int64_t extent : shape) {
    if (extent < 1) return form_error(tensor, "extents above 0");
    out.shape[static_cast<size_t>(out.rank++)] = extent;
  }
  return out;
}

Result<StoredPlane> stored_scalar(const TensorInfo& tensor, const ModuleRef& module) {
  if (module.stacked() && checkpoint::element_count(tensor) == 1) {
    return stored_plane(tensor, ModuleRef{module.name, -1, 0});
  }
  return stored_plane(tensor, module);
}

}  // namespace nibble::recipe
