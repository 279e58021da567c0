// Tile kernels. Every one does, for each output element and in this order whatever the row count:
// sum = 0; sum = w x + sum over a sub-block of columns; acc = scale * sum + acc.
// The weights of a sub-block are decoded once, into registers, and used for all rows. One row keeps
// acc in a register (decode: bound by memory); more rows keep it in L1 (prefill: bound by
// multiply-adds, eight rows at a time to hide their latency).
#include "kernels/matmul/decode_tile.h"
#include "kernels/matmul/tile_scale.h"

namespace nibble::kernels::NIBBLE_ISA_NS {
namespace {

using formats::FormatId;

/// FP32 products of 16 columns: a step of one sub-block.
template <typename Codes, typename Scales>
struct F32Step {
  static constexpr int64_t kRowBytes = 128;
  F32x16 w[16];
  F32x16 scale;
  NIBBLE_INLINE void decode(const Codes& codes, const Scales& scales, const std::byte* block,
                            int64_t s) {
    columns(codes, block, s % 2 != 0, w);
    scale = scales.at(s);
  }
  template <int kRows>
  NIBBLE_INLINE void multiply(const std::byte* x, F32x16* acc) const {
    const float* p = reinterpret_cast<const float*>(x);
    F32x16 sum[kRows];
    repeat<kRows>([&](auto t) NIBBLE_INLINE { sum[t] = set1(0.0f); });
    each_column([&](auto c) NIBBLE_INLINE {
      repeat<kRows>([&](auto t) NIBBLE_INLINE { sum[t] = fma(w[c], set1(p[t * 32 + c]), sum[t]); });
    });
    repeat<kRows>([&](auto t) NIBBLE_INLINE { acc[t] = fma(scale, sum[t], acc[t]); });
  }
};

/// Rows [row, row + kRows) of one step, acc in memory.
template <int kRows, typename Step>
NIBBLE_INLINE inline void step_rows(const Step& step, const std::byte* x, float* sums,
                                    int64_t row) {
  F32x16 acc[kRows];
  float* p = sums + 16 * row;
  repeat<kRows>([&](auto t) NIBBLE_INLINE { acc[t] = load(p + 16 * t); });
  step.template multiply<kRows>(x + row * Step::kRowBytes, acc);
  repeat<kRows>([&](auto t) NIBBLE_INLINE { store(p + 16 * t, acc[t]); });
}
template <typename Step>
NIBBLE_INLINE inline void step_all_rows(const Step& step, const std::byte* x, const TileArgs& a) {
  constexpr int kMost = kVectorRegisters >= 32 ? 8 : 4;
  int64_t row = 0;
  for (; row + kMost <= a.rows; row += kMost) step_rows<kMost>(step, x, a.sums, row);
  if (kMost > 4 && row + 4 <= a.rows) {
    step_rows<4>(step, x, a.sums, row);
    row += 4;
  }
  for (; row < a.rows; ++row) step_rows<1>(step, x, a.sums, row);
}

template <typename Codes, typename Scales>
void f32_many(const TileArgs& a) {
  const Codes codes(*a.view);
  const Scales scales(a);
  const int64_t subs = ceil_div(a.view->cols, 16);
  std::memset(a.sums, 0, static_cast<size_t>(a.rows) * 64);
  F32Step<Codes, Scales> step;
  for (int64_t s = 0; s < subs; ++s) {
    step.decode(codes, scales, a.codes + s / 2 * Codes::kBlockBytes, s);
    step_all_rows(step, a.x + s / 2 * a.x_block_stride + s % 2 * 64, a);
  }
}

#if defined(NIBBLE_VEC_AVX512)

// One row is a chain of dependent multiply-adds per sub-block. Blocks of the one-row kernels run
// side by side, so that four chains hide each other's latency: MXFP4 dot products, one chain a
// block, read 19 GB/s on a Zen 5 core with two abreast. Codes of eight registers a block leave room
// for two.
template <typename Codes>
constexpr int abreast(int chains_per_block) {
  return chains_per_block == 1 && Codes::kBlockBytes <= 256 ? 4 : 2;
}
// How far ahead of the codes in use the one-row kernels ask for the next. On a Zen 5 core NVFP4
// streams at 28 GB/s with it and 23 without (BF16 activations, huge pages).
constexpr int64_t kPrefetchBytes = 12288;

template <int64_t kBytes>
NIBBLE_INLINE inline void prefetch(const std::byte* block) {
  for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(block + kPrefetchBytes + i);
}

template <int kBlocks, typename Codes>
NIBBLE_INLINE inline std::array<typename Codes::Block, kBlocks> blocks_at(const std::byte* p) {
  return [p]<int... I>(std::integer_sequence<int, I...>) NIBBLE_INLINE {
    return std::array<typename Codes::Block, kBlocks>{
        typename Codes::Block(p + I * Codes::kBlockBytes)...};
  }
  (std::make_integer_sequence<int, kBlocks>{});
}

/// kBlocks whole blocks from block index b on, for one row.
template <int kBlocks, typename Codes, typename Scales>
NIBBLE_INLINE inline F32x16 f32_blocks(const Codes& codes, const Scales& scales, const TileArgs& a,
                                       int64_t b, F32x16 acc) {
  const std::byte* block = a.codes + b * Codes::kBlockBytes;
  const std::byte* x = a.x + b * a.x_block_stride;
  prefetch<kBlocks * Codes::kBlockBytes>(block);
  const auto lines = blocks_at<kBlocks, Codes>(block);
  F32x16 sum[2 * kBlocks];
  repeat<2 * kBlocks>([&](auto i) NIBBLE_INLINE { sum[i] = set1(0.0f); });
  repeat<16>([&](auto c) NIBBLE_INLINE {
    repeat<2 * kBlocks>([&](auto i) NIBBLE_INLINE {
      constexpr int kColumn = i % 2 * 16 + c;
      const auto* p = reinterpret_cast<const float*>(x + i / 2 * a.x_block_stride);
      const F32x16 w = column<kColumn>(codes, lines[i / 2]);
      sum[i] = fma(w, set1(p[kColumn]), sum[i]);
    });
  });
  repeat<kBlocks>([&](auto i) NIBBLE_INLINE {
    F32x16 scale[2];
    scales.block(b + i, scale);
    acc = fma(scale[0], sum[2 * i], acc);
    acc = fma(scale[Scales::kPer32 ? 0 : 1], sum[2 * i + 1], acc);
  });
  return acc;
}

template <typename Codes, typename Scales>
void f32_one(const TileArgs& a) {
  const Codes codes(*a.view);
  const Scales scales(a);
  const int64_t subs = ceil_div(a.view->cols, 16);
  F32x16 acc = set1(0.0f);
  int64_t b = 0;
  constexpr int kAbreast = abreast<Codes>(2);
  for (; b + kAbreast <= subs / 2; b += kAbreast) {
    acc = f32_blocks<kAbreast>(codes, scales, a, b, acc);
  }
  for (; b < subs / 2; ++b) acc = f32_blocks<1>(codes, scales, a, b, acc);
  if (subs % 2 != 0) {
    F32Step<Codes, Scales> step;
    step.decode(codes, scales, a.codes + b * Codes::kBlockBytes, subs - 1);
    step.template multiply<1>(a.x + b * a.x_block_stride, &acc);
  }
  store(a.sums, acc);
}

#else

template <typename Codes, typename Scales>
void f32_one(const TileArgs& a) {
  f32_many<Codes, Scales>(a);
}

#endif

template <typename Codes, typename Scales>
void f32_tile(const TileArgs& a) {
  return a.rows == 1 ? f32_one<Codes, Scales>(a) : f32_many<Codes, Scales>(a);
}

#if defined(NIBBLE_VEC_BF16)

NIBBLE_INLINE inline F32x16 dot(F32x16 sum, __m512i w, int32_t x_pair) {
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(w),
                           reinterpret_cast<__m512bh>(_mm512_set1_epi32(x_pair)))};
}

/// BF16 dot products of 32 columns: one sum where they share a scale, else one for each 16.
template <typename Codes, typename Scales>
struct DotStep {
  static constexpr int64_t kRowBytes = 64;
  static constexpr int kSums = Scales::kPer32 ? 1 : 2;
  static constexpr int kPairs = 16 / kSums;  // of a sum
  __m512i w[16];
  F32x16 scale[kSums];
  NIBBLE_INLINE void decode(const Codes& codes, const Scales& scales, const std::byte* block,
                            int64_t b) {
    const typename Codes::Block lines(block);
    repeat<16>([&](auto j) NIBBLE_INLINE { w[j] = codes.template pair<j>(lines); });
    scales.block(b, scale);
  }
  template <int kRows>
  NIBBLE_INLINE void multiply(const std::byte* x, F32x16* acc) const {
    const int32_t* p = reinterpret_cast<const int32_t*>(x);
    repeat<kSums>([&](auto i) NIBBLE_INLINE {
      F32x16 sum[kRows];
      repeat<kRows>([&](auto t) NIBBLE_INLINE { sum[t] = set1(0.0f); });
      repeat<kPairs>([&](auto j) NIBBLE_INLINE {
        constexpr int kPair = kPairs * i + j;
        repeat<kRows>([&](auto t)
                          NIBBLE_INLINE { sum[t] = dot(sum[t], w[kPair], p[t * 16 + kPair]); });
      });
      repeat<kRows>([&](auto t) NIBBLE_INLINE { acc[t] = fma(scale[i], sum[t], acc[t]); });
    });
  }
};

template <typename Codes, typename Scales>
void dot_many(const TileArgs& a) {
  const Codes codes(*a.view);
  const Scales scales(a);
  const int64_t blocks = block_count(a.view->cols);
  std::memset(a.sums, 0, static_cast<size_t>(a.rows) * 64);
  DotStep<Codes, Scales> step;
  for (int64_t b = 0; b < blocks; ++b) {
    step.decode(codes, scales, a.codes + b * Codes::kBlockBytes, b);
    step_all_rows(step, a.x + b * a.x_block_stride, a);
  }
}

template <int kBlocks, typename Codes, typename Scales>
NIBBLE_INLINE inline F32x16 dot_blocks(const Codes& codes, const Scales& scales, const TileArgs& a,
                                       int64_t b, F32x16 acc) {
  constexpr int kSums = DotStep<Codes, Scales>::kSums;
  constexpr int kPairs = DotStep<Codes, Scales>::kPairs;
  const std::byte* block = a.codes + b * Codes::kBlockBytes;
  const std::byte* x = a.x + b * a.x_block_stride;
  prefetch<kBlocks * Codes::kBlockBytes>(block);
  const auto lines = blocks_at<kBlocks, Codes>(block);
  F32x16 sum[kSums * kBlocks];
  repeat<kSums * kBlocks>([&](auto i) NIBBLE_INLINE { sum[i] = set1(0.0f); });
  repeat<kPairs>([&](auto j) NIBBLE_INLINE {
    repeat<kSums * kBlocks>([&](auto i) NIBBLE_INLINE {
      constexpr int kPair = i % kSums * kPairs + j;
      const auto* p = reinterpret_cast<const int32_t*>(x + i / kSums * a.x_block_stride);
      const __m512i w = codes.template pair<kPair>(lines[i / kSums]);
      sum[i] = dot(sum[i], w, p[kPair]);
    });
  });
  repeat<kBlocks>([&](auto i) NIBBLE_INLINE {
    F32x16 scale[kSums];
    scales.block(b + i, scale);
    repeat<kSums>([&](auto j) NIBBLE_INLINE { acc = fma(scale[j], sum[kSums * i + j], acc); });
  });
  return acc;
}

template <typename Codes, typename Scales>
void dot_one(const TileArgs& a) {
  const Codes codes(*a.view);
  const Scales scales(a);
  const int64_t blocks = block_count(a.view->cols);
  F32x16 acc = set1(0.0f);
  int64_t b = 0;
  constexpr int kAbreast = abreast<Codes>(DotStep<Codes, Scales>::kSums);
  for (; b + kAbreast <= blocks; b += kAbreast) {
    acc = dot_blocks<kAbreast>(codes, scales, a, b, acc);
  }
  for (; b < blocks; ++b) acc = dot_blocks<1>(codes, scales, a, b, acc);
  store(a.sums, acc);
}

template <typename Codes, typename Scales>
void dot_tile(const TileArgs& a) {
  return a.rows == 1 ? dot_one<Codes, Scales>(a) : dot_many<Codes, Scales>(a);
}
template <typename Codes, typename Scales>
TileFn pick(bool bf16_dot) {
  return bf16_dot ? dot_tile<Codes, Scales> : f32_tile<Codes, Scales>;
}
constexpr bool kHasDot = true;

#else

template <typename Codes, typename Scales>
TileFn pick(bool) {
  return f32_tile<Codes, Scales>;
}
constexpr bool kHasDot = false;

#endif

TileFn tile_fn(const formats::MatrixView& view, bool bf16_dot) {
  switch (view.format) {
    case FormatId::kF32:
    case FormatId::kF16: return f32_tile<F32Codes, PerRow>;
    case FormatId::kBf16: return pick<Bf16Codes, PerRow>(bf16_dot);
    case FormatId::kNvfp4: return pick<E2m1Codes, E4m3Per16>(bf16_dot);
    case FormatId::kMxfp4: return pick<E2m1Codes, E8m0Per32>(bf16_dot);
    case FormatId::kMxfp8: return pick<E4m3Codes, E8m0Per32>(bf16_dot);
    case FormatId::kNf3: return pick<Nf3Codes, E4m3Per32>(bf16_dot);
    case FormatId::kFp8Block:
      if (scale_block_cols(view) > 1) return pick<E4m3Codes, PerBlockColumn>(bf16_dot);
      return pick<E4m3Codes, PerRow>(bf16_dot);
    case FormatId::kFp8Channel:
    case FormatId::kFp8Tensor: return pick<E4m3Codes, PerRow>(bf16_dot);
  }
  return nullptr;
}

#if defined(NIBBLE_VEC_BF16)
template <typename Codes, typename Scales>
TileFn pick_row(bool bf16_dot) {
  return bf16_dot ? dot_one<Codes, Scales> : f32_one<Codes, Scales>;
}
#elif defined(NIBBLE_VEC_AVX512)
template <typename Codes, typename Scales>
TileFn pick_row(bool) {
  return f32_one<Codes, Scales>;
}
#endif

TileFn csf_row_fn([[maybe_unused]] const formats::MatrixView& view,
                  [[maybe_unused]] bool bf16_dot) {
#if defined(NIBBLE_VEC_AVX512)
  if (view.format == FormatId::kNvfp4) return pick_row<E2m1Codes, CsfE4m3Per16>(bf16_dot);
  if (view.format == FormatId::kMxfp4) return pick_row<E2m1Codes, CsfE8m0Per32>(bf16_dot);
  if (view.format == FormatId::kMxfp8) return pick_row<E4m3Codes, CsfE8m0Per32>(bf16_dot);
#endif
  return nullptr;
}

/// One block of 32 columns of one row, the last one perhaps short.
NIBBLE_INLINE inline void pack_block(const float* x, int64_t cols, PackKind kind, std::byte* out) {
  float tail[32];
  if (cols < 32) {
    for (int64_t c = 0; c < 32; ++c) tail[c] = c < cols ? x[c] : 0.0f;
    x = tail;
  }
  if (kind == PackKind::kF32) {
    std::memcpy(out, x, 128);
    return;
  }
  if (kind == PackKind::kBf16) {
    uint16_t* p = reinterpret_cast<uint16_t*>(out);
    store_bf16(p, load(x));
    store_bf16(p + 16, load(x + 16));
    return;
  }
  float* p = reinterpret_cast<float*>(out);
  for (int c = 0; c < 32; ++c) p[c] = bf16_value(bf16_bits(x[c]));
}

void pack(const float* x, int64_t x_stride, const int32_t* ids, int64_t rows, int64_t k,
          PackKind kind, std::byte* out) {
  const int64_t row_bytes = packed_row_bytes(kind);
  for (int64_t t = 0; t < rows; ++t) {
    const float* row = x + (ids != nullptr ? ids[t] : t) * x_stride;
    std::byte* to = out + t * row_bytes;
    for (int64_t c = 0; c < k; c += 32) {
      pack_block(row + c, k - c, kind, to);
      to += rows * row_bytes;
    }
  }
}

void store_rows(const float* sums, int64_t rows, const float* bias, int64_t lanes, float* y,
                int64_t y_stride) {
  for (int64_t t = 0; t < rows; ++t) {
    const float* from = sums + 16 * t;
    float* to = y + t * y_stride;
    if (lanes == 16) {
      F32x16 v = load(from);
      if (bias != nullptr) v = add(v, load(bias));
      store(to, v);
      continue;
    }
    for (int64_t i = 0; i < lanes; ++i) to[i] = bias != nullptr ? from[i] + bias[i] : from[i];
  }
}

}  // namespace

const TileOps& tile_ops() {
  static constexpr TileOps kOps = {kHasDot, tile_fn, csf_row_fn, pack, store_rows};
  return kOps;
}

}  // namespace nibble::kernels::NIBBLE_ISA_NS
