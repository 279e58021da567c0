#include "recipe/csf_scales.h"

#include <array>

#include "codec/csf_inventory.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using codec::CsfKind;

Error found_in_header(std::string_view fault, const TensorInfo& tensor,
                      const std::string& expected) {
  return Error(Code::kCorruptInput,
               cat(fault, ": '", tensor.name, "': expected ", expected, ", found ",
                   formats::dtype_name(tensor.dtype), " ", checkpoint::shape_text(tensor.shape)));
}

Error scale_encoding(const std::string& module, std::string_view stored, std::string_view says) {
  return Error(Code::kCorruptInput, cat("scale_encoding: module '", module, "' has ", stored,
                                        " scales, the config declares ", says));
}

}  // namespace

Result<std::optional<CsfTensors>> find_csf(const CheckpointIndex& index, const Quantization& quant,
                                           const ModuleRef& module, const ModuleTensors& tensors,
                                           const Declared& declared) {
  const std::optional<CsfKind> manifest = quant.manifest_csf();
  const bool concerned = tensors.encoded != nullptr || declared.encoded_scale;
  if (!concerned || !tensors.any()) return std::optional<CsfTensors>();
  const CsfKind kind = manifest.value_or(CsfKind::kNvfp4);
  std::string scale = module.name + (tensors.scale != nullptr ? ".scale" : ".weight_scale");
  if (tensors.encoded != nullptr) {
    scale = tensors.encoded->name.substr(0, tensors.encoded->name.rfind('.'));
  }
  NIBBLE_TRY(const codec::CsfForm form,
             codec::judge_csf_names(kind, scale, [&index](std::string_view name) {
               return index.find(name) != nullptr;
             }));
  const bool compressed = form == codec::CsfForm::kCompressed;
  if (!manifest && compressed && !declared.encoded_scale) {
    return scale_encoding(module.name, "compressed (csf)", "no weight_scale_encoding for it");
  }
  if (!manifest && !compressed && declared.encoded_scale) {
    return scale_encoding(module.name, "plain", "weight_scale_encoding csf");
  }
  if (!compressed) return std::optional<CsfTensors>();
  return std::optional<CsfTensors>(CsfTensors{index.find(codec::csf_fixed_name(kind, scale)),
                                              index.find(codec::csf_exceptions_name(kind, scale))});
}

Result<void> check_csf_headers(CsfKind kind, int64_t rows, int64_t cols, const CsfTensors& stored) {
  if (const Result<void> fits = codec::check_csf_geometry(kind, rows, cols); !fits) {
    return Error(Code::kCorruptInput,
                 cat(fits.error().message(), " (scales '", stored.fixed->name, "')"));
  }
  const std::array<int64_t, 2> shape = {rows / codec::kCsfSlabRows,
                                        codec::csf_slab_bytes(kind, cols)};
  const std::string expected = cat("U8 ", checkpoint::shape_text(shape));
  if (stored.fixed->dtype != formats::DType::kU8) {
    return found_in_header("fixed_dtype", *stored.fixed, expected);
  }
  if (stored.exceptions->dtype != formats::DType::kU32) {
    return found_in_header("exception_dtype", *stored.exceptions, "U32 [n]");
  }
  if (!std::equal(shape.begin(), shape.end(), stored.fixed->shape.begin(),
                  stored.fixed->shape.end())) {
    return found_in_header("fixed_shape", *stored.fixed, expected);
  }
  if (stored.exceptions->shape.size() != 1) {
    return found_in_header("exception_shape", *stored.exceptions, "U32 [n]");
  }
  return {};
}

}  // namespace nibble::recipe
