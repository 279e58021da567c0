// Every quantized matrix of a checkpoint with its scale plane, found by names and headers alone: no
// model graph, any dialect that recipe resolves. What convert_scales and verify work on.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "recipe/container.h"
#include "recipe/scale_plane.h"

namespace nibble::load {

struct QuantizedModule {
  recipe::Weight weight;
  std::string scale;    // name of the scale tensor in plain form; empty for FP8 in blocks and NF3
  int64_t expert = -1;  // of stacked experts
  bool fp4() const {
    return weight.meta.format == formats::FormatId::kNvfp4 ||
           weight.meta.format == formats::FormatId::kMxfp4;
  }
  /// The codec for its scales, if there is one.
  std::optional<codec::CsfKind> kind() const { return recipe::csf_kind(weight.meta); }
  recipe::PlaneShape shape() const { return recipe::scale_plane_shape(weight.meta); }
};

/// In order of names; experts of stacked (gpt-oss) tensors one by one. Tensor pointers point into
/// `container`. Errors: those of recipe::resolve; tensor_missing.
Result<std::vector<QuantizedModule>> quantized_modules(const recipe::Container& container);

}  // namespace nibble::load
