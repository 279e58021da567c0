#include "recipe/module_resolver.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "base/json.h"
#include "recipe/csf_scales.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using formats::DType;
using formats::FormatId;
using formats::MatrixView;
using formats::ScaleKind;

bool is_packed4(DType dtype) {
  return dtype == DType::kU8 || dtype == DType::kI8 || dtype == DType::kF4;
}

bool is_e8m0(DType dtype) { return dtype == DType::kU8 || dtype == DType::kF8E8M0; }

std::string matrix_text(int64_t rows, int64_t cols) { return cat("[", rows, ", ", cols, "]"); }

std::optional<FormatId> plain_format(DType dtype) {
  switch (dtype) {
    case DType::kF32: return FormatId::kF32;
    case DType::kF16: return FormatId::kF16;
    case DType::kBf16: return FormatId::kBf16;
    default: return std::nullopt;
  }
}

std::string_view format_name(FormatId id) { return formats::block_format(id).name; }

}  // namespace

Error tensor_form(const TensorInfo& tensor, const std::string& expected) {
  return Error(Code::kCorruptInput,
               cat("tensor_form: '", tensor.name, "': expected ", expected, ", found ",
                   formats::dtype_name(tensor.dtype), " ", checkpoint::shape_text(tensor.shape)));
}

Resolution ModuleResolver::missing(const std::string& suffix, std::string why) const {
  Resolution out;
  out.missing = module.name + suffix;
  out.why = std::move(why);
  out.declared = declared;
  return out;
}

Result<float> ModuleResolver::global_scale(const TensorInfo& tensor, bool divisor) const {
  NIBBLE_TRY(const StoredPlane plane, stored_scalar(tensor, module));
  const bool scalar = plane.rank == 0 || (plane.rank == 1 && plane.shape[0] == 1);
  if (tensor.dtype != DType::kF32 || !scalar) return tensor_form(tensor, "F32 [] or [1]");
  std::byte raw[4];
  NIBBLE_TRY(index.read(tensor, plane.begin, raw));
  uint32_t bits = 0;
  std::memcpy(&bits, raw, sizeof(bits));
  const float stored = std::bit_cast<float>(bits);
  const float global = divisor ? 1.0f / stored : stored;
  if (!(std::isfinite(stored) && std::isfinite(global) && global > 0)) {
    return Error(Code::kCorruptInput,
                 cat("global_scale: '", tensor.name, "': expected a positive finite ",
                     divisor ? "divisor" : "factor", ", found ", stored));
  }
  return global;
}

Result<Resolution> ModuleResolver::finish(const StoredPlane& codes, const StoredPlane* scale,
                                          MatrixView meta, std::string dialect) const {
  const std::string_view name = format_name(meta.format);
  if ((rows > 0 && meta.rows != rows) || (cols > 0 && meta.cols != cols)) {
    return tensor_form(*codes.tensor, cat(name, " codes of a matrix ", matrix_text(rows, cols)));
  }
  const auto geometry = formats::check_geometry(meta);
  if (!geometry) {
    return tensor_form(*codes.tensor,
                       cat(name, " codes of whole groups (", geometry.error().message(), ")"));
  }
  // Shapes agree by now; byte counts are the last word before anybody reads.
  if (codes.bytes != meta.rows * formats::code_row_bytes(meta.format, meta.cols)) {
    return tensor_form(*codes.tensor, cat(name, " codes of ", matrix_text(meta.rows, meta.cols)));
  }
  if (scale != nullptr && scale->bytes != formats::scale_plane_bytes(meta)) {
    return tensor_form(*scale->tensor, cat(name, " scales of ", matrix_text(meta.rows, meta.cols)));
  }
  Resolution out;
  Weight weight;
  weight.meta = meta;
  weight.dialect = std::move(dialect);
  weight.name = module.name;
  weight.codes = Plane{codes.tensor, codes.begin, codes.bytes};
  out.used.push_back(codes.tensor);
  if (scale != nullptr) {
    weight.scales = Plane{scale->tensor, scale->begin, scale->bytes};
    out.used.push_back(scale->tensor);
  }
  weight.has_input_scale = tensors.input_scale != nullptr || tensors.input_global_scale != nullptr;
  out.weight = std::move(weight);
  out.declared = declared;
  if (!fits(declared, meta.format)) {
    if (declared.required) {
      Resolution gone = missing(meta.format == FormatId::kNf3 ? ".weight" : ".nf3_packed",
                                cat(declared.because, " is ", format_name(declared.form->format),
                                    ", the tensors hold ", name));
      if (declared.form->format == FormatId::kMxfp4) gone.missing = module.name + ".weight_packed";
      return gone;
    }
    out.contradiction = std::string(name);
  }
  return out;
}

Result<Resolution> ModuleResolver::plain(const StoredPlane& codes) const {
  MatrixView meta;
  meta.format = *plain_format(codes.tensor->dtype);
  if (codes.rank != 2) return tensor_form(*codes.tensor, "a matrix of two extents");
  meta.rows = codes.shape[0];
  meta.cols = codes.shape[1];
  return finish(codes, nullptr, meta, "plain");
}

Result<Resolution> ModuleResolver::nf3(const StoredPlane& codes, const TensorInfo* scale_tensor,
                                       std::string dialect) const {
  if (scale_tensor == nullptr) {
    return missing(tensors.nf3_packed != nullptr ? ".nf3_scale" : ".weight_scale", "scales of nf3");
  }
  NIBBLE_TRY(const StoredPlane scale, stored_plane(*scale_tensor, module));
  MatrixView meta;
  meta.format = FormatId::kNf3;
  meta.scale_kind = ScaleKind::kE4M3;
  meta.rows = codes.shape[0];
  if (codes.tensor->dtype != DType::kU8 || codes.rank != 2 || codes.shape[1] % 12 != 0) {
    return tensor_form(*codes.tensor, "U8 [o, 3i/8] of nf3, i a multiple of 32");
  }
  meta.cols = codes.shape[1] / 12 * 32;
  const DType dtype = scale_tensor->dtype;
  if ((dtype != DType::kU8 && dtype != DType::kF8E4M3) || scale.rank != 2 ||
      scale.shape[0] != meta.rows || scale.shape[1] != meta.cols / 32) {
    return tensor_form(*scale_tensor,
                       cat("F8_E4M3 or U8 ", matrix_text(meta.rows, meta.cols / 32), " of nf3"));
  }
  meta.nf3_bias_log2 = dtype == DType::kU8 ? quant.nf3_bias_log2() : 0;
  meta.nf3_levels = quant.nf3_levels();
  return finish(codes, &scale, meta, std::move(dialect));
}

Result<Resolution> ModuleResolver::nvfp4(const StoredPlane& codes, int64_t width,
                                         const StoredPlane& scale, bool packed_name) const {
  MatrixView meta;
  meta.format = FormatId::kNvfp4;
  meta.scale_kind = ScaleKind::kE4M3;
  meta.rows = codes.shape[0];
  meta.cols = width * 2;
  if (scale.tensor->dtype != DType::kF8E4M3 || scale.rank != 2 || scale.shape[0] != meta.rows ||
      meta.cols % 16 != 0 || scale.shape[1] != meta.cols / 16) {
    return tensor_form(*scale.tensor, cat("F8_E4M3 ", matrix_text(meta.rows, meta.cols / 16),
                                          " of nvfp4 ", matrix_text(meta.rows, meta.cols)));
  }
  return nvfp4_with_global(codes, &scale, meta, packed_name);
}

Result<Resolution> ModuleResolver::nvfp4_with_global(const StoredPlane& codes,
                                                     const StoredPlane* scale, MatrixView meta,
                                                     bool packed_name) const {
  const TensorInfo* factor = tensors.weight_scale_2;
  const TensorInfo* divisor = tensors.weight_global_scale;
  if (factor != nullptr && divisor != nullptr) {
    return tensor_form(*divisor, "either weight_scale_2 or weight_global_scale, not both");
  }
  if (factor == nullptr && divisor == nullptr) {
    return missing(packed_name ? ".weight_global_scale" : ".weight_scale_2",
                   "global scale of nvfp4");
  }
  const TensorInfo* global = factor != nullptr ? factor : divisor;
  NIBBLE_TRY(meta.global, global_scale(*global, divisor != nullptr));
  NIBBLE_TRY(Resolution out,
             finish(codes, scale, meta,
                    divisor != nullptr ? "compressed-tensors nvfp4" : "modelopt nvfp4"));
  out.used.push_back(global);
  return out;
}

Result<Resolution> ModuleResolver::csf_packed4(const StoredPlane& codes, int64_t width,
                                               bool packed_name) const {
  if (module.stacked()) return tensor_form(*csf->fixed, "plain scales for stacked experts");
  const bool mxfp4 = csf->fixed->name.ends_with(".mxfp4_csf_fixed");
  MatrixView meta;
  meta.format = mxfp4 ? FormatId::kMxfp4 : FormatId::kNvfp4;
  meta.scale_kind = mxfp4 ? ScaleKind::kE8M0 : ScaleKind::kE4M3;
  meta.rows = codes.shape[0];
  meta.cols = width * 2;
  const int64_t group = formats::block_format(meta.format).group_cols;
  if (meta.cols % group != 0) {
    return tensor_form(*codes.tensor, cat(format_name(meta.format), " codes of whole groups"));
  }
  NIBBLE_TRY(check_csf_headers(mxfp4 ? codec::CsfKind::kMxfp4 : codec::CsfKind::kNvfp4, meta.rows,
                               meta.cols / group, *csf));
  const bool deepseek = csf->fixed->name.starts_with(module.name + ".scale.");
  const std::string_view dialect = packed_name ? "compressed-tensors mxfp4"
                                   : deepseek  ? "deepseek mxfp4"
                                               : "modelopt mxfp4";
  NIBBLE_TRY(Resolution out, mxfp4 ? finish(codes, nullptr, meta, std::string(dialect))
                                   : nvfp4_with_global(codes, nullptr, meta, packed_name));
  if (!out.weight) return out;
  out.weight->dialect += " csf";
  out.weight->csf_fixed = Plane{csf->fixed, 0, csf->fixed->bytes};
  out.weight->csf_exceptions = Plane{csf->exceptions, 0, csf->exceptions->bytes};
  out.used.push_back(csf->fixed);
  out.used.push_back(csf->exceptions);
  return out;
}

Result<Resolution> ModuleResolver::packed4(const StoredPlane& codes, bool packed_name) const {
  const TensorInfo* scale_tensor =
      tensors.weight_scale != nullptr ? tensors.weight_scale : tensors.scale;
  if (scale_tensor == nullptr && csf == nullptr) {
    return missing(tensors.blocks ? "_scales" : ".weight_scale", "scales of a 4-bit weight");
  }
  if (codes.rank != 2) return tensor_form(*codes.tensor, "packed codes [o, i/2]");
  const bool f4 = codes.tensor->dtype == DType::kF4;
  if (f4 && codes.shape[1] % 2 != 0) return tensor_form(*codes.tensor, "an even number of columns");
  const int64_t width = f4 ? codes.shape[1] / 2 : codes.shape[1];
  if (csf != nullptr) return csf_packed4(codes, width, packed_name);
  NIBBLE_TRY(const StoredPlane scale, stored_plane(*scale_tensor, module));
  const int64_t groups = scale.rank == 2 ? scale.shape[1] : 0;
  const bool has_global =
      tensors.weight_scale_2 != nullptr || tensors.weight_global_scale != nullptr;
  const bool e4m3 = scale_tensor->dtype == DType::kF8E4M3;
  // A group is 8 bytes of codes in nvfp4, 16 in mxfp4, 12 in nf3: the two widths tell them apart.
  if (has_global || (e4m3 && width == 8 * groups)) return nvfp4(codes, width, scale, packed_name);
  if (width == 12 * groups) return nf3(codes, scale_tensor, "hybrid nf3");
  MatrixView meta;
  meta.format = FormatId::kMxfp4;
  meta.scale_kind = ScaleKind::kE8M0;
  meta.rows = codes.shape[0];
  meta.cols = width * 2;
  if (!is_e8m0(scale_tensor->dtype) || scale.rank != 2 || scale.shape[0] != meta.rows ||
      width != 16 * groups) {
    return tensor_form(*scale_tensor,
                       cat("U8 or F8_E8M0 ", matrix_text(meta.rows, meta.cols / 32),
                           " of mxfp4, or F8_E4M3 ", matrix_text(meta.rows, meta.cols / 16),
                           " of nvfp4, for ", matrix_text(meta.rows, meta.cols)));
  }
  std::string_view dialect = "modelopt mxfp4";
  if (packed_name) dialect = "compressed-tensors mxfp4";
  if (scale_tensor == tensors.scale) dialect = "deepseek mxfp4";
  if (tensors.blocks) dialect = "gpt-oss mxfp4";
  return finish(codes, &scale, meta, std::string(dialect));
}

Result<Resolution> ModuleResolver::resolve_codes() const {
  if (tensors.nf3_packed != nullptr) {
    if (tensors.second_nf3) return tensor_form(*tensors.nf3_packed, "one of the nf3 code tensors");
    NIBBLE_TRY(const StoredPlane codes, stored_plane(*tensors.nf3_packed, module));
    return nf3(codes, tensors.nf3_scale, "kquant nf3");
  }
  const bool packed_name = tensors.weight_packed != nullptr;
  const TensorInfo* tensor = packed_name ? tensors.weight_packed : tensors.weight;
  if (tensor == nullptr) {
    const bool packed =
        declared.form != nullptr && quant.method() == QuantMethod::kCompressedTensors;
    return missing(packed && !declared.form->any_fp8 ? ".weight_packed" : ".weight", "weight");
  }
  NIBBLE_TRY(StoredPlane codes, stored_plane(*tensor, module));
  if (tensors.blocks) {
    // [rows, K/32, 16] is [rows, K/2].
    if (codes.rank != 3 || codes.shape[2] != 16) return tensor_form(*tensor, "U8 [o, i/32, 16]");
    codes.rank = 2;
    codes.shape[1] *= 16;
  }
  if (is_packed4(tensor->dtype)) return packed4(codes, packed_name);
  if (!packed_name && tensor->dtype == DType::kF8E4M3) return fp8(codes);
  if (!packed_name && plain_format(tensor->dtype)) return plain(codes);
  return tensor_form(*tensor, packed_name ? "packed codes in U8, I8 or F4"
                                          : "BF16, F16, F32, F8_E4M3, U8, I8 or F4");
}

Result<Resolution> resolve(const CheckpointIndex& index, const Quantization& quant,
                           const ModuleRef& module, int64_t rows, int64_t cols) {
  const ModuleTensors tensors = find_module(index, module.name);
  NIBBLE_TRY(const Declared declared, quant.declared(module.name));
  NIBBLE_TRY(const std::optional<CsfTensors> csf,
             find_csf(index, quant, module, tensors, declared));
  const ModuleResolver resolver{index, quant, module, tensors, declared, csf ? &*csf : nullptr,
                                rows,  cols};
  return resolver.resolve_codes();
}

Result<Weight> weight_of(Resolution resolution, const std::string& module) {
  if (resolution.weight) return std::move(*resolution.weight);
  return Error(Code::kCorruptInput, cat("tensor_missing: '", resolution.missing, "' (",
                                        resolution.why, " of module '", module, "')"));
}

Result<Weight> resolve_module(const CheckpointIndex& index, const Json& quantization,
                              const std::string& module, int64_t rows, int64_t cols) {
  NIBBLE_TRY(const Quantization quant, Quantization::parse(quantization, 0));
  NIBBLE_TRY(Resolution found, resolve(index, quant, ModuleRef{module, -1, 0}, rows, cols));
  return weight_of(std::move(found), module);
}

Result<Resolution> resolve_vector(const CheckpointIndex& index, const std::string& tensor_name,
                                  int64_t elems) {
  Resolution out;
  const TensorInfo* tensor = index.find(tensor_name);
  if (tensor == nullptr) {
    out.missing = tensor_name;
    out.why = "vector";
    return out;
  }
  const std::optional<FormatId> format = plain_format(tensor->dtype);
  if (!format || tensor->shape.size() != 1 || tensor->shape[0] != elems) {
    return tensor_form(*tensor, cat("F32, BF16 or F16 [", elems, "]"));
  }
  Weight weight;
  weight.meta.format = *format;
  weight.meta.rows = 1;
  weight.meta.cols = elems;
  weight.dialect = "plain";
  weight.name = tensor_name;
  constexpr std::string_view kSuffix = ".weight";
  if (tensor_name.ends_with(kSuffix)) weight.name.resize(tensor_name.size() - kSuffix.size());
  weight.codes = Plane{tensor, 0, tensor->bytes};
  out.used.push_back(tensor);
  out.weight = std::move(weight);
  return out;
}

}  // namespace nibble::recipe
