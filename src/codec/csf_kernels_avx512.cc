// AVX-512 (F, BW, VL) inner loops. Rows end in masked loads and stores, so nothing outside the
// given ranges is touched except the exception words' slack.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <bit>

#include "codec/csf_best_base.h"

#define NIBBLE_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,bmi,bmi2,popcnt")))

namespace nibble::codec {
namespace {

// The first n of 64 lanes; n >= 64 is all of them.
inline __mmask64 first_lanes(int64_t n) { return n >= 64 ? ~0ULL : (1ULL << n) - 1; }
NIBBLE_AVX512 inline __m512i splat(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

NIBBLE_AVX512 inline CsfCount count(const uint8_t* row, int64_t n, int base, int window) {
  const __m512i low = splat(base), width = splat(window);
  int64_t covered = 0, below = 0;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const __m512i v = _mm512_loadu_si512(row + i);
    covered += std::popcount(_mm512_cmplt_epu8_mask(_mm512_sub_epi8(v, low), width));
    below += std::popcount(_mm512_cmplt_epu8_mask(v, low));
  }
  if (i < n) {
    const __mmask64 live = first_lanes(n - i);
    const __m512i v = _mm512_maskz_loadu_epi8(live, row + i);
    covered += std::popcount(_mm512_mask_cmplt_epu8_mask(live, _mm512_sub_epi8(v, low), width));
    below += std::popcount(_mm512_mask_cmplt_epu8_mask(live, v, low));
  }
  return {covered, below};
}

NIBBLE_AVX512 inline int row_max(const uint8_t* row, int64_t n) {
  __m512i best = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 64) {
    best = _mm512_max_epu8(best, _mm512_maskz_loadu_epi8(first_lanes(n - i), row + i));
  }
  const __m256i half =
      _mm256_max_epu8(_mm512_castsi512_si256(best), _mm512_extracti64x4_epi64(best, 1));
  const __m128i quarter =
      _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // phminposuw finds a least 16-bit lane: of the complements, after folding odd bytes into even.
  const __m128i folded = _mm_max_epu8(quarter, _mm_srli_epi16(quarter, 8));
  const __m128i least = _mm_minpos_epu16(
      _mm_xor_si128(_mm_and_si128(folded, _mm_set1_epi16(255)), _mm_set1_epi16(255)));
  return 255 - _mm_cvtsi128_si32(least) % 256;
}

NIBBLE_AVX512 inline int64_t row_sum(const uint8_t* row, int64_t n) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 64) {
    const __m512i v = _mm512_maskz_loadu_epi8(first_lanes(n - i), row + i);
    sum = _mm512_add_epi64(sum, _mm512_sad_epu8(v, _mm512_setzero_si512()));
  }
  return _mm512_reduce_add_epi64(sum);
}

NIBBLE_AVX512 int best_base(const uint8_t* row, int64_t n, int window) {
  return csf_best_base(
      row, n, window, [=](int base) NIBBLE_AVX512 { return count(row, n, base, window); },
      [=]() NIBBLE_AVX512 { return row_max(row, n); },
      [=]() NIBBLE_AVX512 { return row_sum(row, n); });
}

// Appends the exceptions among 64 bytes. Without branches on single bytes: where a block has any,
// it usually has several at unpredictable places.
NIBBLE_AVX512 inline int64_t emit(__m512i v, uint64_t outside, uint32_t position, uint32_t* words) {
  int64_t found = 0;
  __m512i at =
      _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(position)),
                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m128i parts[4] = {_mm512_extracti32x4_epi32(v, 0), _mm512_extracti32x4_epi32(v, 1),
                            _mm512_extracti32x4_epi32(v, 2), _mm512_extracti32x4_epi32(v, 3)};
  for (int q = 0; q < 4; ++q) {
    const auto lanes = static_cast<__mmask16>(outside >> (16 * q));
    const __m512i value = _mm512_slli_epi32(_mm512_cvtepu8_epi32(parts[q]), 24);
    _mm512_storeu_si512(words + found,
                        _mm512_maskz_compress_epi32(lanes, _mm512_or_si512(value, at)));
    found += std::popcount(static_cast<uint16_t>(lanes));
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
  return found;
}

NIBBLE_AVX512 int64_t pack_nvfp4(const uint8_t* row, int64_t n, int base, uint32_t position,
                                 uint8_t* packed, uint32_t* words) {
  const __m512i low = splat(base), width = splat(16), weights = _mm512_set1_epi16(0x1001);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 64) {
    const __mmask64 live = first_lanes(n - i);
    const __m512i v = _mm512_maskz_loadu_epi8(live, row + i);
    const __m512i delta = _mm512_sub_epi8(v, low);
    const __mmask64 inside = _mm512_mask_cmplt_epu8_mask(live, delta, width);
    // even + 16 * odd, at most 255
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_maskz_mov_epi8(inside, delta), weights);
    _mm256_mask_storeu_epi8(packed + i / 2, static_cast<__mmask32>(first_lanes((n - i) / 2)),
                            _mm512_cvtepi16_epi8(pairs));
    const uint64_t outside = live & ~inside;
    if (outside != 0) found += emit(v, outside, position + static_cast<uint32_t>(i), words + found);
  }
  return found;
}

NIBBLE_AVX512 int64_t pack_mxfp4(const uint8_t* row, int64_t n, int base, uint32_t position,
                                 uint8_t* packed, uint32_t* words) {
  const __m512i low = splat(base), width = splat(2), one = splat(1);
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 64) {
    const __mmask64 live = first_lanes(n - i);
    const __m512i v = _mm512_maskz_loadu_epi8(live, row + i);
    const __m512i delta = _mm512_sub_epi8(v, low);
    const uint64_t bits = _mm512_mask_cmpeq_epu8_mask(live, delta, one);
    if (n - i >= 64) {
      std::memcpy(packed + i / 8, &bits, 8);
    } else {
      for (int64_t k = 0; i + 8 * k < n; ++k) {
        packed[i / 8 + k] = static_cast<uint8_t>(bits >> (8 * k));
      }
    }
    const uint64_t outside = live & ~_mm512_mask_cmplt_epu8_mask(live, delta, width);
    if (outside != 0) found += emit(v, outside, position + static_cast<uint32_t>(i), words + found);
  }
  return found;
}

NIBBLE_AVX512 inline __m512i expand_nibbles(__m256i packed, __m512i base) {
  const __m512i wide = _mm512_cvtepu8_epi16(packed);
  const __m512i codes =
      _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
  return _mm512_add_epi8(codes, base);
}

NIBBLE_AVX512 void unpack_nvfp4(const uint8_t* slab, int64_t cols, uint8_t* out) {
  const uint8_t* packed = slab + 16;
  const int64_t rest = cols % 64;
  const __mmask64 tail = first_lanes(rest);
  const auto packed_tail = static_cast<__mmask32>(first_lanes(rest / 2));
  for (int r = 0; r < 16; ++r) {
    const __m512i base = splat(slab[r]);
    int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
      const __m256i in = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + c / 2));
      _mm512_storeu_si512(out + c, expand_nibbles(in, base));
    }
    if (rest != 0) {
      const __m256i in = _mm256_maskz_loadu_epi8(packed_tail, packed + c / 2);
      _mm512_mask_storeu_epi8(out + c, tail, expand_nibbles(in, base));
    }
    packed += cols / 2;
    out += cols;
  }
}

NIBBLE_AVX512 void unpack_mxfp4(const uint8_t* slab, int64_t cols, uint8_t* out) {
  const uint8_t* packed = slab + 16;
  const int64_t rest = cols % 64;
  const __mmask64 tail = first_lanes(rest);
  const auto packed_tail = static_cast<__mmask16>(first_lanes((rest + 7) / 8));
  for (int r = 0; r < 16; ++r) {
    const __m512i base = splat(slab[r]), next = splat(slab[r] + 1);
    int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
      uint64_t bits;
      std::memcpy(&bits, packed + c / 8, 8);
      _mm512_storeu_si512(out + c, _mm512_mask_blend_epi8(bits, base, next));
    }
    if (rest != 0) {
      const __m128i in = _mm_maskz_loadu_epi8(packed_tail, packed + c / 8);
      const auto bits = static_cast<uint64_t>(_mm_cvtsi128_si64(in));
      _mm512_mask_storeu_epi8(out + c, tail, _mm512_mask_blend_epi8(bits, base, next));
    }
    packed += (cols + 7) / 8;
    out += cols;
  }
}

NIBBLE_AVX512 inline __m128i load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

NIBBLE_AVX512 void tile_nvfp4(const uint8_t* bases, const uint8_t* groups, int64_t groups_count,
                              uint8_t* out) {
  const __m512i base = _mm512_broadcast_i32x4(load16(bases));
  // Two groups at once: lanes hold group 0 twice, group 1 twice; the odd lanes take high nibbles.
  const __m512i order = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
  const __m512i shift = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
  const __m512i nibble = _mm512_set1_epi8(15);
  int64_t j = 0;
  for (; j + 2 <= groups_count; j += 2) {
    const __m256i in = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(groups + 16 * j));
    const __m512i twice = _mm512_permutexvar_epi64(order, _mm512_castsi256_si512(in));
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi64(twice, shift), nibble);
    _mm512_storeu_si512(out + 32 * j, _mm512_add_epi8(codes, base));
  }
  if (j < groups_count) {
    const __m512i twice = _mm512_broadcast_i32x4(load16(groups + 16 * j));
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi64(twice, shift), nibble);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * j),
                        _mm512_castsi512_si256(_mm512_add_epi8(codes, base)));
  }
}

NIBBLE_AVX512 void tile_mxfp4(const uint8_t* bases, const uint8_t* groups, int64_t groups_count,
                              uint8_t* out) {
  const __m512i base = _mm512_broadcast_i32x4(load16(bases));
  const __m512i next = _mm512_add_epi8(base, _mm512_set1_epi8(1));
  // Lane q of a vector tests bit q (then bit q + 4) of the group's 16 bytes.
  const __m512i low = _mm512_setr_epi64(0x0101010101010101, 0x0101010101010101, 0x0202020202020202,
                                        0x0202020202020202, 0x0404040404040404, 0x0404040404040404,
                                        0x0808080808080808, 0x0808080808080808);
  const __m512i high = _mm512_slli_epi64(low, 4);
  for (int64_t j = 0; j < groups_count; ++j) {
    const __m512i bits = _mm512_broadcast_i32x4(load16(groups + 16 * j));
    _mm512_storeu_si512(out + 128 * j,
                        _mm512_mask_blend_epi8(_mm512_test_epi8_mask(bits, low), base, next));
    _mm512_storeu_si512(out + 128 * j + 64,
                        _mm512_mask_blend_epi8(_mm512_test_epi8_mask(bits, high), base, next));
  }
}

}  // namespace

constinit const CsfKernels kCsfAvx512 = {best_base,    pack_nvfp4, pack_mxfp4, unpack_nvfp4,
                                         unpack_mxfp4, tile_nvfp4, tile_mxfp4};

}  // namespace nibble::codec
#endif
