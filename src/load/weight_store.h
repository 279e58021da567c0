// Immutable owner of every loaded plane, shared read-only by all threads.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "codec/csf_tile16.h"
#include "recipe/recipe.h"
#include "tensor/tensor_ref.h"

namespace nibble::load {

struct AlignedFree {
  void operator()(std::byte* p) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;
/// 64-byte aligned; zeroed only where the OS zeroes fresh pages. Null on failure.
AlignedBytes allocate_aligned(int64_t bytes);

class WeightStore {
 public:
  /// A matrix in its planned layout. The weight must exist (has()).
  const tensor::TensorRef& matrix(const recipe::WeightKey& key) const;
  /// A vector widened to FP32; null if the checkpoint does not hold it.
  const float* vector(const recipe::WeightKey& key) const;
  bool has(const recipe::WeightKey& key) const { return matrices_.count(key) != 0; }
  int64_t bytes() const { return bytes_; }

 private:
  friend class StoreBuilder;
  std::map<recipe::WeightKey, tensor::TensorRef> matrices_;
  std::map<recipe::WeightKey, std::vector<float>> vectors_;
  AlignedBytes block_;               // codes and plain scales of every layer
  std::deque<codec::CsfTiles> csf_;  // compressed scales, one per matrix that has them
  int64_t bytes_ = 0;
};

}  // namespace nibble::load
