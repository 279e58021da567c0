// One step's facts in device memory, passed to kernels by value. The arrays stay where they are
// from step to step, so that a captured graph sees each step's new contents.
#pragma once

#include <cstdint>

namespace nibble::kernels::cuda {

/// Rows of one sequence are neighbours with consecutive positions. A row of position -1 is padding
/// of a captured graph: it touches no KV page and its outputs are never read.
struct StepView {
  const int32_t* tokens = nullptr;         // [rows]
  const int32_t* positions = nullptr;      // [rows]
  const int32_t* row_sequence = nullptr;   // [rows], in [0, sequences)
  const int32_t* seq_row_begin = nullptr;  // [sequences + 1]
  const int32_t* page_table = nullptr;     // [sequences][table_stride]
  int32_t table_stride = 0, rows = 0, sequences = 0;
};

}  // namespace nibble::kernels::cuda
