// E4M3 weights: which of the five scale forms the siblings hold. Spec: containers, sections 2, 6
// and 8; the two FP8_PB_WO conventions differ in name and rank only.
#include <string>

#include "recipe/module_resolver.h"

namespace nibble::recipe {
namespace {

using checkpoint::TensorInfo;
using formats::DType;
using formats::FormatId;
using formats::MatrixView;
using formats::ScaleKind;

std::optional<ScaleKind> scale_kind(DType dtype) {
  switch (dtype) {
    case DType::kF32: return ScaleKind::kF32;
    case DType::kBf16: return ScaleKind::kBf16;
    case DType::kU8:
    case DType::kF8E8M0: return ScaleKind::kE8M0;
    default: return std::nullopt;
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace

Result<Resolution> ModuleResolver::fp8_block(const StoredPlane& codes, const StoredPlane& scale,
                                             std::string dialect) const {
  MatrixView meta;
  meta.format = FormatId::kFp8Block;
  meta.scale_kind = *scale_kind(scale.tensor->dtype);
  meta.rows = codes.shape[0];
  meta.cols = codes.shape[1];
  const bool four = scale.rank == 4 && scale.shape[1] == 1 && scale.shape[3] == 1;
  const int64_t grid_rows = scale.shape[0];
  const int64_t grid_cols = scale.rank == 2 ? scale.shape[1] : scale.shape[2];
  const std::array<int64_t, 2> block = quant.fp8_block(declared);
  // The declared block first; where the grid denies it, the tensors decide for the common one.
  for (const std::array<int64_t, 2>& extents : {block, std::array<int64_t, 2>{128, 128}}) {
    if (scale.rank != 2 && !four) break;
    if (grid_rows != ceil_div(meta.rows, extents[0]) ||
        grid_cols != ceil_div(meta.cols, extents[1])) {
      continue;
    }
    meta.block_rows = extents[0];
    meta.block_cols = extents[1];
    NIBBLE_TRY(Resolution out, finish(codes, &scale, meta, std::move(dialect)));
    if (extents != block && out.contradiction.empty()) {
      out.contradiction = cat("fp8 blocks of ", extents[0], " x ", extents[1], ", not of ",
                              block[0], " x ", block[1]);
    }
    return out;
  }
  return tensor_form(*scale.tensor,
                     cat("one scale per ", block[0], " x ", block[1], " block: [",
                         ceil_div(meta.rows, block[0]), ", ", ceil_div(meta.cols, block[1]), "]"));
}

Result<Resolution> ModuleResolver::fp8(const StoredPlane& codes) const {
  if (codes.rank != 2) return tensor_form(*codes.tensor, "F8_E4M3 [o, i]");
  const TensorInfo* scale_tensor = tensors.weight_scale_fp8;
  std::string_view dialect = "hybrid fp8";
  if (scale_tensor == nullptr && tensors.weight_scale_inv != nullptr) {
    scale_tensor = tensors.weight_scale_inv;
    dialect = "deepseek fp8";
  } else if (scale_tensor == nullptr && tensors.weight_scale != nullptr) {
    scale_tensor = tensors.weight_scale;
    dialect = quant.method() == QuantMethod::kCompressedTensors ? "compressed-tensors fp8"
                                                                : "modelopt fp8";
  } else if (scale_tensor == nullptr && tensors.scale != nullptr) {
    scale_tensor = tensors.scale;
    dialect = "deepseek fp8";
  }
  if (scale_tensor == nullptr) return missing(".weight_scale", "scale of an F8_E4M3 weight");
  const bool per_expert_scalar =
      scale_tensor->shape.empty() || scale_tensor->shape == std::vector<int64_t>{1};
  NIBBLE_TRY(const StoredPlane scale, per_expert_scalar ? stored_scalar(*scale_tensor, module)
                                                        : stored_plane(*scale_tensor, module));
  const std::optional<ScaleKind> kind = scale_kind(scale_tensor->dtype);
  if (!kind) return tensor_form(*scale_tensor, "scales in F32, BF16, F8_E8M0 or U8");

  MatrixView meta;
  meta.rows = codes.shape[0];
  meta.cols = codes.shape[1];
  meta.scale_kind = *kind;
  if (*kind == ScaleKind::kE8M0) {
    const std::array<int64_t, 2> block = quant.fp8_block(declared);
    const bool mx = scale.rank == 2 && meta.cols % 32 == 0 && scale.shape[0] == meta.rows &&
                    scale.shape[1] == meta.cols / 32;
    // [o, i/32] can be a grid of blocks only if o is 1 (or blocks one row high): config decides.
    const bool grid = scale.rank == 2 && scale.shape[0] == ceil_div(meta.rows, block[0]) &&
                      scale.shape[1] == ceil_div(meta.cols, block[1]);
    const bool says_block =
        declared.form != nullptr && declared.form->format == FormatId::kFp8Block;
    if (!mx || (grid && says_block)) return fp8_block(codes, scale, std::string(dialect));
    meta.format = FormatId::kMxfp8;
    return finish(codes, &scale, meta, "modelopt mxfp8");
  }
  const bool one = scale.rank == 0 || (scale.rank == 1 && scale.shape[0] == 1);
  if (one && *kind == ScaleKind::kF32) {
    meta.format = FormatId::kFp8Tensor;
    return finish(codes, &scale, meta, cat(dialect, " tensor"));
  }
  const bool column = scale.rank == 1 || (scale.rank == 2 && scale.shape[1] == 1);
  const bool one_block = scale.rank == 2 && scale.shape[0] == 1 && scale.shape[1] == 1 &&
                         tensors.weight_scale_inv == scale_tensor;
  if (column && scale.shape[0] == meta.rows && !one_block) {
    meta.format = FormatId::kFp8Channel;
    return finish(codes, &scale, meta, cat(dialect, " channel"));
  }
  if (scale_tensor == tensors.weight_scale_fp8 || scale.rank == 1) {
    return tensor_form(*scale_tensor, cat("one scale per row: [", meta.rows, "]"));
  }
  return fp8_block(codes, scale, std::string(dialect));
}

}  // namespace nibble::recipe
