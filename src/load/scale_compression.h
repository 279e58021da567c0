// Compressing the scale planes of a checkpoint's weights (plan::Scales::kCsf): what the loader
// keeps, and what `nibble inspect` reports without loading anything else.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/thread_pool.h"
#include "codec/csf_tile16.h"
#include "plan/plan.h"
#include "recipe/recipe.h"

namespace nibble::load {

/// What became of the scales of one projection of one layer.
struct ScaleReport {
  int32_t layer = 0;
  recipe::Role role = recipe::Role::kExpertGate;
  int64_t planes = 0, scales = 0;  // matrices, and scale bytes in them
  int64_t plain_bytes = 0, csf_bytes = 0, exceptions = 0;
  /// Policy: a projection stays plain unless compression saves a quarter of its scale bytes. With
  /// less to save there are so many exceptions that patching them costs decode more than the bytes
  /// do (NVFP4, Student-t weights: 2 % fewer bytes, up to a third slower; docs/results). On a GPU
  /// tiles keep room for exceptions, so it is a tenth there.
  double most_kept = 0.75;
  bool compressed() const {
    return static_cast<double>(csf_bytes) <= most_kept * static_cast<double>(plain_bytes);
  }
  int64_t kept_bytes() const { return compressed() ? csf_bytes : plain_bytes; }
  void add(const plan::PlannedWeight& planned, const codec::CsfTiles& tiles);
};

/// Bytes that scales take as tiles: streams, exceptions and their index.
int64_t csf_resident_bytes(const codec::CsfTiles& tiles);

/// Reads one weight's scale plane, checks it and encodes it; the plane is gone afterwards.
/// Errors: those of reading and of recipe::check_scales.
Result<codec::CsfTiles> encode_scales(const recipe::Recipe& recipe, const recipe::WeightKey& key);

/// Encodes every plane that `plan` may compress and keeps only the sizes, sorted by layer and role.
Result<std::vector<ScaleReport>> measure_scales(const recipe::Recipe& recipe,
                                                const plan::PrecisionPlan& plan, ThreadPool& pool);

}  // namespace nibble::load
