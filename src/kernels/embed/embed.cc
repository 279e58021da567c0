// Token embedding. F32 and BF16 tables are copied and widened here; every other format goes through
// the reference decoder, which is fast enough for a row per token.
#include "kernels/embed/embed.h"

#include <bit>
#include <cstring>

namespace nibble::kernels {
namespace {

void widen_bf16(const std::byte* codes, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, codes + 2 * i, sizeof(bits));
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
}

}  // namespace

void embed(const Exec& exec, const formats::MatrixView& table, const int32_t* tokens, int64_t rows,
           float* out) {
  NIBBLE_CHECK(exec.pool != nullptr && rows >= 0, rows, " rows");
  if (rows == 0) return;
  NIBBLE_CHECK(table.codes != nullptr && tokens != nullptr && out != nullptr);
  for (int64_t t = 0; t < rows; ++t) {
    NIBBLE_CHECK(tokens[t] >= 0 && tokens[t] < table.rows, "token ", tokens[t], " of ", table.rows);
  }
  const int64_t cols = table.cols;
  exec.pool->parallel_for(rows, [&](int64_t t, int) {
    const int64_t token = tokens[t];
    float* row = out + t * cols;
    switch (table.format) {
      case formats::FormatId::kF32:
        std::memcpy(row, table.codes + token * cols * 4, static_cast<size_t>(cols) * 4);
        break;
      case formats::FormatId::kBf16: widen_bf16(table.codes + token * cols * 2, cols, row); break;
      default: formats::decode_rows(table, token, 1, row); break;
    }
  });
}

}  // namespace nibble::kernels
