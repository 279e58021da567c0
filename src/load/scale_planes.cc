#include "load/scale_planes.h"

#include "recipe/module_resolver.h"

namespace nibble::load {
namespace {

using checkpoint::TensorInfo;
using recipe::ModuleRef;

bool is_plain(formats::DType dtype) {
  return dtype == formats::DType::kF32 || dtype == formats::DType::kF16 ||
         dtype == formats::DType::kBf16;
}

/// Whether the module's tensors can be a quantized matrix at all (a norm has a ".weight" too).
bool looks_quantized(const recipe::ModuleTensors& tensors) {
  if (tensors.nf3_packed != nullptr || tensors.weight_packed != nullptr) return true;
  return tensors.weight != nullptr && !is_plain(tensors.weight->dtype) &&
         tensors.weight->shape.size() == 2;
}

}  // namespace

Result<std::vector<QuantizedModule>> quantized_modules(const recipe::Container& container) {
  NIBBLE_TRY(const recipe::Quantization quant, container.quantization());
  std::vector<QuantizedModule> out;
  const auto add = [&](const ModuleRef& module) -> Result<void> {
    NIBBLE_TRY(recipe::Resolution found, recipe::resolve(container.index, quant, module, 0, 0));
    QuantizedModule entry;
    NIBBLE_TRY(entry.weight, recipe::weight_of(std::move(found), module.name));
    entry.expert = module.expert;
    if (entry.weight.stored_csf()) {
      entry.scale = recipe::csf_source_name(*entry.kind(), entry.weight.csf_fixed.tensor->name);
    } else if (entry.kind()) {
      entry.scale = entry.weight.scales.tensor->name;
    }
    out.push_back(std::move(entry));
    return {};
  };
  for (const std::string& module : recipe::weight_modules(container.index)) {
    if (!looks_quantized(recipe::find_module(container.index, module))) continue;
    NIBBLE_TRY(add({module, -1, 0}));
  }
  constexpr std::string_view kBlocks = "_blocks";
  for (const TensorInfo& tensor : container.index.tensors()) {
    if (!tensor.name.ends_with(kBlocks) || tensor.shape.empty()) continue;
    const std::string module = tensor.name.substr(0, tensor.name.size() - kBlocks.size());
    for (int64_t e = 0; e < tensor.shape[0]; ++e) NIBBLE_TRY(add({module, e, tensor.shape[0]}));
  }
  return out;
}

}  // namespace nibble::load
