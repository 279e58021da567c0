// One weight's scale plane, whatever form it is stored in: read as it is, or, where the checkpoint
// stores CSF, read, proved legal and decoded. Everybody who wants scale bytes asks here.
// Source: spec: csf, sections 1 to 3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/csf.h"
#include "recipe/recipe.h"

namespace nibble::recipe {

/// The plain scale plane of `weight`, formats::scale_plane_bytes(weight.meta) bytes, row-major;
/// empty for formats without scales. `index` is the one the weight was resolved in.
/// Errors: kIo; kCorruptInput starting with the codec's error name (base_range, exception_order,
/// ...) and naming the tensor. Thread-safe.
Result<std::vector<std::byte>> read_scale_plane(const checkpoint::CheckpointIndex& index,
                                                const Weight& weight);

/// The codec whose stream fits this weight's scales: NVFP4's for E4M3 scales of NVFP4, MXFP4's for
/// E8M0 scales of MXFP4 and MXFP8; nothing for other formats.
std::optional<codec::CsfKind> csf_kind(const formats::MatrixView& meta);
/// Rows and columns of the scale plane, in bytes. csf_kind must hold one.
struct PlaneShape {
  int64_t rows = 0, cols = 0;
};
PlaneShape scale_plane_shape(const formats::MatrixView& meta);

/// A stored stream, read and proved legal. `view` points into the two buffers, also after a move.
struct StoredCsf {
  std::vector<uint8_t> fixed, exceptions;
  codec::CsfView view;
};
/// weight.stored_csf() must hold. Errors as read_scale_plane.
Result<StoredCsf> read_stored_csf(const checkpoint::CheckpointIndex& index, const Weight& weight);

}  // namespace nibble::recipe
