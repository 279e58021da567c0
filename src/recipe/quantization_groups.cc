// compressed-tensors config_groups. Spec: containers, section 4.
#include "base/json.h"
#include "recipe/module_name.h"
#include "recipe/quantization.h"

namespace nibble::recipe {

Result<std::optional<DeclaredForm>> compressed_tensors_form(const std::string& format,
                                                            const Json* weights) {
  using formats::FormatId;
  if (format == "dense") return std::optional<DeclaredForm>();
  DeclaredForm form;
  form.label = cat("format ", format);
  if (format == "nvfp4-pack-quantized") {
    form.format = FormatId::kNvfp4;
    return std::optional<DeclaredForm>(std::move(form));
  }
  if (format == "mxfp4-pack-quantized") {
    form.format = FormatId::kMxfp4;
    return std::optional<DeclaredForm>(std::move(form));
  }
  if (format == "mxfp8-quantized") {
    form.format = FormatId::kMxfp8;
    return std::optional<DeclaredForm>(std::move(form));
  }
  if (format == "float-quantized" || format == "naive-quantized") {
    form.any_fp8 = true;
    form.format = FormatId::kFp8Channel;
    if (weights != nullptr) {
      NIBBLE_TRY(const int64_t bits, json_int(*weights, "num_bits", 8));
      NIBBLE_TRY(const std::string type, json_string(*weights, "type", "float"));
      if (bits != 8 || type != "float") {
        return Error(Code::kUnsupported,
                     cat("quant_method: compressed-tensors format '", format,
                         "': expected 8-bit float weights, found ", bits, "-bit ", type));
      }
    }
    return std::optional<DeclaredForm>(std::move(form));
  }
  return Error(Code::kUnsupported,
               cat("quant_method: compressed-tensors format '", format.substr(0, 60),
                   "' is not known; known are nvfp4-pack-quantized, mxfp4-pack-quantized, "
                   "mxfp8-quantized, float-quantized, naive-quantized, dense, mixed-precision"));
}

Result<void> Quantization::parse_compressed_tensors(const Json& quant) {
  method_ = QuantMethod::kCompressedTensors;
  NIBBLE_TRY(add_names(quant, "ignore", ignore_));
  NIBBLE_TRY(const std::string top_format, json_string(quant, "format", ""));
  const Json* groups = json_find(quant, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) {
    return Error(Code::kCorruptInput,
                 cat("key 'config_groups': expected an object of groups, found ",
                     groups == nullptr ? "nothing" : json_dump(*groups).substr(0, 60)));
  }
  for (const auto& [name, value] : groups->items()) {
    const std::string where = cat("config_groups '", name, "'");
    NIBBLE_TRY(std::string format, json_string(value, "format", top_format), where);
    NIBBLE_TRY(std::optional<DeclaredForm> form,
               compressed_tensors_form(format, json_find(value, "weights")), where);
    if (!form) continue;
    Group group;
    group.form = std::move(*form);
    const Json* targets = json_find(value, "targets");
    if (targets == nullptr || !targets->is_array()) {
      return Error(Code::kCorruptInput, cat(where, ": key 'targets': expected a list"));
    }
    for (const Json& target : *targets) {
      if (!target.is_string()) {
        return Error(Code::kCorruptInput, cat(where, ": key 'targets': expected names, found ",
                                              json_dump(target).substr(0, 60)));
      }
      const std::string& text = target.get_ref<const std::string&>();
      if (text == "Linear") {
        group.every_linear = true;
      } else {
        NIBBLE_TRY(group.targets.add(text));
      }
    }
    groups_.push_back(std::move(group));
  }
  return {};
}

}  // namespace nibble::recipe
