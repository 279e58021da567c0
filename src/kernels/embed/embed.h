// Token embedding: rows of the table, decoded to FP32.
#pragma once

#include <cstdint>

#include "formats/block_format.h"
#include "kernels/exec.h"

namespace nibble::kernels {

/// out[t, :] = table[tokens[t], :]. table is in checkpoint rows (any format); every token is in
/// range.
void embed(const Exec& exec, const formats::MatrixView& table, const int32_t* tokens, int64_t rows,
           float* out);

}  // namespace nibble::kernels
