// Internal to attention: cuts the rows of a step into blocks that each lie in one sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/attention/kv_pages.h"
#include "kernels/exec.h"

namespace nibble::kernels {

struct RowBlock {
  const SequenceRows* sequence = nullptr;
  int32_t first = 0, rows = 0;  // rows of the sequence, counted from its row_begin
};

/// Blocks of at most `rows_per_block` rows. With `aligned`, they end at absolute positions that are
/// multiples of rows_per_block. Takes sequences + 1 int32 from the workspace.
class RowBlocks {
 public:
  RowBlocks(Workspace& workspace, std::span<const SequenceRows> sequences, int64_t rows_per_block,
            bool aligned)
      : sequences_(sequences), size_(static_cast<int32_t>(rows_per_block)), aligned_(aligned) {
    first_ = workspace.take<int32_t>(static_cast<int64_t>(sequences.size()) + 1);
    first_[0] = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int32_t span = skipped(sequences[s]) + sequences[s].rows;
      first_[s + 1] = first_[s] + (sequences[s].rows == 0 ? 0 : (span + size_ - 1) / size_);
    }
  }

  int64_t count() const { return first_[sequences_.size()]; }

  RowBlock operator[](int64_t block) const {
    const int32_t* begin_of = first_;
    const int32_t* after = std::upper_bound(begin_of, begin_of + sequences_.size() + 1, block);
    const size_t s = static_cast<size_t>(after - begin_of - 1);
    const SequenceRows& sequence = sequences_[s];
    const int32_t begin = (static_cast<int32_t>(block) - first_[s]) * size_ - skipped(sequence);
    const int32_t first = std::max(begin, 0);
    return {&sequence, first, std::min(begin + size_, sequence.rows) - first};
  }

 private:
  int32_t skipped(const SequenceRows& s) const { return aligned_ ? s.position_begin % size_ : 0; }

  std::span<const SequenceRows> sequences_;
  int32_t* first_ = nullptr;  // [sequences + 1] index of a sequence's first block
  int32_t size_;
  bool aligned_;
};

}  // namespace nibble::kernels
