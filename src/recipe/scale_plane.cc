#include "recipe/scale_plane.h"

namespace nibble::recipe {

using checkpoint::CheckpointIndex;
using formats::FormatId;

std::optional<codec::CsfKind> csf_kind(const formats::MatrixView& meta) {
  switch (meta.format) {
    case FormatId::kNvfp4: return codec::CsfKind::kNvfp4;
    case FormatId::kMxfp4:
    case FormatId::kMxfp8: return codec::CsfKind::kMxfp4;
    default: return std::nullopt;
  }
}

PlaneShape scale_plane_shape(const formats::MatrixView& meta) {
  return {meta.rows, meta.cols / formats::block_format(meta.format).group_cols};
}

Result<StoredCsf> read_stored_csf(const CheckpointIndex& index, const Weight& weight) {
  NIBBLE_CHECK(weight.stored_csf(), weight.name);
  const std::optional<codec::CsfKind> kind = csf_kind(weight.meta);
  NIBBLE_CHECK(kind, weight.name);
  const checkpoint::TensorInfo& fixed = *weight.csf_fixed.tensor;
  const checkpoint::TensorInfo& exceptions = *weight.csf_exceptions.tensor;
  std::vector<uint8_t> fixed_bytes(static_cast<size_t>(fixed.bytes));
  std::vector<uint8_t> exception_bytes(static_cast<size_t>(exceptions.bytes));
  NIBBLE_TRY(index.read(fixed, 0, std::as_writable_bytes(std::span(fixed_bytes))));
  NIBBLE_TRY(index.read(exceptions, 0, std::as_writable_bytes(std::span(exception_bytes))));
  const codec::CsfStored stored{fixed.dtype == formats::DType::kU8,
                                exceptions.dtype == formats::DType::kU32,
                                fixed.shape,
                                exceptions.shape,
                                fixed_bytes,
                                exception_bytes};
  const PlaneShape shape = scale_plane_shape(weight.meta);
  Result<codec::CsfView> view = codec::read_csf(*kind, shape.rows, shape.cols, stored);
  if (!view) {
    return Error(view.error().code(),
                 cat(view.error().message(), " (scales of '", fixed.name, "')"));
  }
  return StoredCsf{std::move(fixed_bytes), std::move(exception_bytes), *view};
}

Result<std::vector<std::byte>> read_scale_plane(const CheckpointIndex& index,
                                                const Weight& weight) {
  if (!weight.stored_csf()) {
    std::vector<std::byte> plane(static_cast<size_t>(weight.scales.bytes));
    if (weight.scales.tensor != nullptr) {
      NIBBLE_TRY(index.read(*weight.scales.tensor, weight.scales.begin, plane));
    }
    return plane;
  }
  NIBBLE_TRY(const StoredCsf stored, read_stored_csf(index, weight));
  const codec::CsfView& view = stored.view;
  std::vector<std::byte> plane(static_cast<size_t>(view.rows() * view.cols()));
  NIBBLE_TRY(
      codec::decode_csf(view, std::span(reinterpret_cast<uint8_t*>(plane.data()), plane.size())));
  return plane;
}

}  // namespace nibble::recipe
