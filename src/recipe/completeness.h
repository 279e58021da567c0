// The two-way diff between what a graph needs and what the files hold, and how it reads.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "checkpoint/checkpoint_index.h"

namespace nibble::recipe {

/// Which tensors of an index have been used. Tensors not of this index are our bug.
class Usage {
 public:
  explicit Usage(const checkpoint::CheckpointIndex& index);
  void mark(const checkpoint::TensorInfo* tensor);
  struct Rest {
    std::vector<std::string> surplus;        // names nobody can explain
    std::map<std::string, int64_t> ignored;  // allow-listed: last component to count
  };
  Rest rest() const;

 private:
  const checkpoint::CheckpointIndex& index_;
  std::vector<bool> used_;
};

/// Stored tensors that no weight needs: activation scales of 4-bit activations, KV scales, tables.
bool is_allowed_extra(std::string_view name);

/// kCorruptInput, "tensor_missing: ..." (or "tensor_surplus: " where nothing is missing) with both
/// lists by pattern and count; a value if both are empty. `whys` explain single missing tensors.
Result<void> completeness(const std::vector<std::string>& missing,
                          const std::vector<std::string>& surplus,
                          const std::vector<std::string>& whys);

}  // namespace nibble::recipe
