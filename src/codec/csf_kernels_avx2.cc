// AVX2 inner loops. What is left of a row after whole vectors goes through the scalar table
// or plain loops.
#if defined(__x86_64__)
#include <immintrin.h>

#include <bit>

#include "codec/csf_best_base.h"

#define NIBBLE_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))

namespace nibble::codec {
namespace {

NIBBLE_AVX2 inline __m256i splat(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
NIBBLE_AVX2 inline __m256i load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
NIBBLE_AVX2 inline __m128i load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
NIBBLE_AVX2 inline void store32(uint8_t* p, __m256i v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
// Bit i set where byte i of a <= byte i of b, unsigned.
NIBBLE_AVX2 inline uint32_t at_most(__m256i a, __m256i b) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(a, b), a)));
}

NIBBLE_AVX2 inline CsfCount count(const uint8_t* row, int64_t n, int base, int window) {
  const __m256i low = splat(base), top = splat(window - 1);
  int64_t covered = 0, not_below = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i v = load32(row + i);
    covered += std::popcount(at_most(_mm256_sub_epi8(v, low), top));
    not_below += std::popcount(at_most(low, v));
  }
  int64_t below = i - not_below;
  for (; i < n; ++i) {
    covered += row[i] >= base && row[i] < base + window;
    below += row[i] < base;
  }
  return {covered, below};
}

NIBBLE_AVX2 inline int row_max(const uint8_t* row, int64_t n) {
  __m256i best = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) best = _mm256_max_epu8(best, load32(row + i));
  uint8_t lanes[32];
  store32(lanes, best);
  uint8_t top = 0;
  for (const uint8_t lane : lanes) top = lane > top ? lane : top;
  for (; i < n; ++i) top = row[i] > top ? row[i] : top;
  return top;
}

NIBBLE_AVX2 inline int64_t row_sum(const uint8_t* row, int64_t n) {
  __m256i sums = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(load32(row + i), _mm256_setzero_si256()));
  }
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  int64_t sum = _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
  for (; i < n; ++i) sum += row[i];
  return sum;
}

NIBBLE_AVX2 int best_base(const uint8_t* row, int64_t n, int window) {
  return csf_best_base(
      row, n, window, [=](int base) NIBBLE_AVX2 { return count(row, n, base, window); },
      [=]() NIBBLE_AVX2 { return row_max(row, n); }, [=]() NIBBLE_AVX2 { return row_sum(row, n); });
}

NIBBLE_AVX2 inline int64_t emit(const uint8_t* row, uint32_t outside, uint32_t position,
                                uint32_t* words) {
  int64_t found = 0;
  for (; outside != 0; outside &= outside - 1) {
    const int lane = std::countr_zero(outside);
    words[found++] = uint32_t{row[lane]} << 24 | (position + static_cast<uint32_t>(lane));
  }
  return found;
}

NIBBLE_AVX2 int64_t pack_nvfp4(const uint8_t* row, int64_t n, int base, uint32_t position,
                               uint8_t* packed, uint32_t* words) {
  const __m256i low = splat(base), top = splat(15), weights = _mm256_set1_epi16(0x1001);
  int64_t found = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i delta = _mm256_sub_epi8(load32(row + i), low);
    const __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(delta, top), delta);
    // even + 16 * odd, at most 255
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_and_si256(delta, inside), weights);
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(packed + i / 2), _mm256_castsi256_si128(bytes));
    const uint32_t outside = ~static_cast<uint32_t>(_mm256_movemask_epi8(inside));
    found += emit(row + i, outside, position + static_cast<uint32_t>(i), words + found);
  }
  return found + kCsfScalar.pack_nvfp4(row + i, n - i, base, position + static_cast<uint32_t>(i),
                                       packed + i / 2, words + found);
}

NIBBLE_AVX2 int64_t pack_mxfp4(const uint8_t* row, int64_t n, int base, uint32_t position,
                               uint8_t* packed, uint32_t* words) {
  const __m256i low = splat(base), one = splat(1);
  int64_t found = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m256i delta = _mm256_sub_epi8(load32(row + i), low);
    const auto bits = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(delta, one)));
    std::memcpy(packed + i / 8, &bits, 4);
    const uint32_t outside = ~at_most(delta, one);
    found += emit(row + i, outside, position + static_cast<uint32_t>(i), words + found);
  }
  return found + kCsfScalar.pack_mxfp4(row + i, n - i, base, position + static_cast<uint32_t>(i),
                                       packed + i / 8, words + found);
}

NIBBLE_AVX2 void unpack_nvfp4(const uint8_t* slab, int64_t cols, uint8_t* out) {
  const uint8_t* packed = slab + 16;
  const __m256i nibble = splat(15);
  for (int r = 0; r < 16; ++r) {
    const __m256i base = splat(slab[r]);
    int64_t c = 0;
    for (; c + 32 <= cols; c += 32) {
      const __m256i wide = _mm256_cvtepu8_epi16(load16(packed + c / 2));
      const __m256i codes =
          _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), nibble);
      store32(out + c, _mm256_add_epi8(codes, base));
    }
    for (; c < cols; c += 2) {
      out[c] = static_cast<uint8_t>(slab[r] + (packed[c / 2] & 15));
      out[c + 1] = static_cast<uint8_t>(slab[r] + (packed[c / 2] >> 4));
    }
    packed += cols / 2;
    out += cols;
  }
}

NIBBLE_AVX2 void unpack_mxfp4(const uint8_t* slab, int64_t cols, uint8_t* out) {
  const uint8_t* packed = slab + 16;
  // Byte i of the vector sees byte i / 8 of four packed bytes, and tests bit i % 8 of it.
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                          2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  for (int r = 0; r < 16; ++r) {
    const __m256i base = splat(slab[r]);
    int64_t c = 0;
    for (; c + 32 <= cols; c += 32) {
      int32_t bits;
      std::memcpy(&bits, packed + c / 8, 4);
      const __m256i own = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread);
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(own, bit), bit);  // -1 where set
      store32(out + c, _mm256_sub_epi8(base, set));
    }
    for (; c < cols; ++c) {
      out[c] = static_cast<uint8_t>(slab[r] + (packed[c / 8] >> (c % 8) & 1));
    }
    packed += (cols + 7) / 8;
    out += cols;
  }
}

NIBBLE_AVX2 void tile_nvfp4(const uint8_t* bases, const uint8_t* groups, int64_t groups_count,
                            uint8_t* out) {
  const __m256i base = _mm256_broadcastsi128_si256(load16(bases));
  const __m256i shift = _mm256_setr_epi64x(0, 0, 4, 4), nibble = splat(15);
  for (int64_t j = 0; j < groups_count; ++j) {
    const __m256i twice = _mm256_broadcastsi128_si256(load16(groups + 16 * j));
    const __m256i codes = _mm256_and_si256(_mm256_srlv_epi64(twice, shift), nibble);
    store32(out + 32 * j, _mm256_add_epi8(codes, base));
  }
}

NIBBLE_AVX2 void tile_mxfp4(const uint8_t* bases, const uint8_t* groups, int64_t groups_count,
                            uint8_t* out) {
  const __m256i base = _mm256_broadcastsi128_si256(load16(bases));
  __m256i bit[4];
  for (int k = 0; k < 4; ++k) {
    bit[k] = _mm256_set_m128i(_mm_set1_epi8(static_cast<char>(2 << 2 * k)),
                              _mm_set1_epi8(static_cast<char>(1 << 2 * k)));
  }
  for (int64_t j = 0; j < groups_count; ++j) {
    const __m256i twice = _mm256_broadcastsi128_si256(load16(groups + 16 * j));
    for (int k = 0; k < 4; ++k) {
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(twice, bit[k]), bit[k]);
      store32(out + 128 * j + 32 * k, _mm256_sub_epi8(base, set));
    }
  }
}

}  // namespace

constinit const CsfKernels kCsfAvx2 = {best_base,    pack_nvfp4, pack_mxfp4, unpack_nvfp4,
                                       unpack_mxfp4, tile_nvfp4, tile_mxfp4};

}  // namespace nibble::codec
#endif
