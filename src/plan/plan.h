// Decisions for this host: layout and place of every weight, expert groups of equal format, and
// byte budgets, all from headers. Building it fails if a tensor has no kernel.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "kernels/attention/kv_pages.h"
#include "kernels/exec.h"
#include "kernels/repack/repack.h"
#include "recipe/recipe.h"
#include "tensor/tensor_ref.h"

namespace nibble::plan {

/// How scale planes of NVFP4, MXFP4 and MXFP8 matrices are held: as stored, or compressed without
/// loss wherever that shrinks a layer's projection.
enum class Scales : uint8_t { kPlain, kCsf };

struct PlanOptions {
  int64_t ranks = 1;  // tensor-parallel shares, for `inspect --tp`; loading takes 1 here
  kernels::Activations activations = kernels::Activations::kBf16;
  int64_t max_context = 0;         // tokens of KV to budget; 0: the model's max_positions
  int64_t max_batch_tokens = 512;  // rows of one step
  int threads = 1;
  bool load_mtp = true;
  Scales scales = Scales::kPlain;
};

/// Vectors (norms, biases) are widened to FP32; matrices keep their format.
bool is_vector(recipe::Role role);

struct PlannedWeight {
  tensor::Layout layout = tensor::Layout::kTile16;
  kernels::TiledBytes planes;  // codes and scales in that layout; vectors: FP32 in codes
  int64_t resident_bytes() const { return planes.codes + planes.scales; }
  int64_t source_bytes = 0;   // as stored
  bool may_compress = false;  // its scales: the loader decides by what they encode to; never larger
  int64_t chunk_rows = 0;     // rows read and repacked at a time, a multiple of 16 (or all)
};

/// A layer's experts that share the formats of all three projections: the op may run once per
/// group.
struct ExpertGroup {
  int32_t layer = 0;
  formats::FormatId gate, up, down;
  std::vector<int32_t> experts;
};

struct MemoryPlan {
  std::map<std::string, int64_t> weights_by_format;  // resident bytes
  int64_t weights_bytes = 0;
  int64_t mtp_bytes = 0;  // part of weights_bytes
  int64_t kv_bytes_per_token = 0, kv_bytes = 0;
  int64_t staging_peak_bytes = 0;  // source buffers while loading, at most
  int64_t load_peak_bytes() const { return weights_bytes + staging_peak_bytes; }
};

struct PrecisionPlan {
  PlanOptions options;
  std::map<recipe::WeightKey, PlannedWeight> weights;
  std::vector<ExpertGroup> groups;
  MemoryPlan memory;  // of one rank
  kernels::KvGeometry kv;
};

/// Shape of the KV pages of this model.
kernels::KvGeometry kv_geometry(const recipe::ModelConfig& config,
                                kernels::Activations activations);

/// The stored weight that a planned key is loaded from: its own, or the embedding for a tied head
/// (which is held a second time, in the layout of a product).
const recipe::Weight& source_weight(const recipe::Recipe& recipe, const recipe::WeightKey& key);

/// Errors: kUnsupported naming the weight that no kernel serves, or the one a share would cut
/// inside a block ("cut_not_group").
Result<PrecisionPlan> make_plan(const recipe::Recipe& recipe, const PlanOptions& options);

}  // namespace nibble::plan
