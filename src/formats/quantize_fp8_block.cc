// Block FP8: E4M3 codes, a scale per block of rows and columns. Source: formats spec, 3.4.
#include <cstring>

#include "formats/element.h"
#include "formats/quantize_common.h"

namespace nibble::formats {
namespace {

/// A block's scale as stored; writes it to `out` and returns the divisor of its elements.
float store_scale(float amax, ScaleKind kind, std::byte* out) {
  if (kind == ScaleKind::kE8M0) {
    const uint8_t byte = mx_scale_byte(amax, FormatId::kMxfp8, MxRounding::kCeil);
    *out = static_cast<std::byte>(byte);
    return decode_e8m0(byte);
  }
  float scale = amax / 448.0f;
  if (!(scale > 0.0f)) scale = 1.0f;
  std::memcpy(out, &scale, sizeof(scale));
  return scale;
}

/// One row of blocks: element rows [begin, end). False if a value is not finite.
bool quantize_stripe(const float* w, int64_t begin, int64_t end, QuantizedMatrix* out) {
  const MatrixView& meta = out->meta;
  const int64_t across = (meta.cols + meta.block_cols - 1) / meta.block_cols;
  const int64_t each = scale_bytes(meta.scale_kind);
  std::byte* scales = out->scales.data() + begin / meta.block_rows * across * each;
  for (int64_t b = 0; b < across; ++b) {
    const int64_t col = b * meta.block_cols;
    const int64_t width = std::min(meta.block_cols, meta.cols - col);
    int32_t most = 0;
    for (int64_t r = begin; r < end; ++r) {
      most = std::max(most, internal::amax_bits(w + r * meta.cols + col, width));
    }
    if (most >= internal::kInfinityBits) return false;
    const float scale = store_scale(std::bit_cast<float>(static_cast<uint32_t>(most)),
                                    meta.scale_kind, scales + b * each);
    for (int64_t r = begin; r < end; ++r) {
      const float* src = w + r * meta.cols + col;
      std::byte* codes = out->codes.data() + r * meta.cols + col;
      for (int64_t i = 0; i < width; ++i) {
        codes[i] = static_cast<std::byte>(encode_e4m3(src[i] / scale));
      }
    }
  }
  return true;
}

}  // namespace

Result<QuantizedMatrix> quantize_fp8_block(std::span<const float> w, int64_t rows, int64_t cols,
                                           std::string_view name, int64_t block_rows,
                                           int64_t block_cols, ThreadPool* pool,
                                           ScaleKind scale_kind) {
  if (scale_kind != ScaleKind::kF32 && scale_kind != ScaleKind::kE8M0) {
    return Error(Code::kInvalidArgument,
                 cat("tensor '", name, "': fp8_block is written with FP32 or E8M0 scales only"));
  }
  MatrixView meta;
  meta.format = FormatId::kFp8Block;
  meta.scale_kind = scale_kind;
  meta.rows = rows;
  meta.cols = cols;
  meta.block_rows = block_rows;
  meta.block_cols = block_cols;
  NIBBLE_TRY(QuantizedMatrix out, internal::make_planes(meta, w.size(), name));
  std::atomic<bool> finite{true};
  const auto stripe = [&](int64_t task) {
    const int64_t begin = task * block_rows;
    const int64_t end = begin + std::min(block_rows, rows - begin);
    if (!quantize_stripe(w.data(), begin, end, &out)) {
      finite.store(false, std::memory_order_relaxed);
    }
  };
  const int64_t stripes = (rows - 1) / block_rows + 1;
  if (pool == nullptr) {
    for (int64_t task = 0; task < stripes; ++task) stripe(task);
  } else {
    pool->parallel_for(stripes, [&](int64_t task, int) { stripe(task); });
  }
  if (!finite.load(std::memory_order_relaxed)) return internal::non_finite(w, name);
  return out;
}

}  // namespace nibble::formats
