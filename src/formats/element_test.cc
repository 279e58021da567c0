// Every code against a decoder written from the definition, and the encoders against a search for
// the nearest value in double.
#include "formats/element.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "formats/dtype.h"
#include "formats/packing.h"

namespace nibble::formats {
namespace {

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

/// A minifloat as its definition says it, by ldexp; `top` is the largest finite magnitude code.
struct Kind {
  std::string name;
  int exp_bits, man_bits, bias;
  int top;
  int nan_code;       // what a NaN encodes to
  int overflow_code;  // what magnitudes above the largest encode to
  float (*decode)(uint16_t);
  uint16_t (*encode)(float);

  int magnitudes() const { return 1 << (exp_bits + man_bits); }
  double slow_decode(int code) const {  // finite codes only
    const int magnitude = code & (magnitudes() - 1);
    const int e = magnitude >> man_bits;
    const int m = magnitude & ((1 << man_bits) - 1);
    const double steps = 1 << man_bits;
    const double value =
        e == 0 ? std::ldexp(m / steps, 1 - bias) : std::ldexp(1 + m / steps, e - bias);
    return code >= magnitudes() ? -value : value;
  }
  int slow_encode(float x) const {  // of a saturating code
    if (std::isnan(x)) return nan_code;
    const double a = std::min(std::fabs(static_cast<double>(x)), slow_decode(top));
    int best = 0;
    for (int code = 1; code <= top; ++code) {
      const double now = std::fabs(slow_decode(code) - a);
      const double before = std::fabs(slow_decode(best) - a);
      if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return std::signbit(x) ? best + magnitudes() : best;
  }
};

const Kind kE2M1 = {"e2m1",
                    2,
                    1,
                    1,
                    7,
                    7,
                    7,
                    [](uint16_t c) { return decode_e2m1(static_cast<uint8_t>(c)); },
                    [](float x) { return static_cast<uint16_t>(encode_e2m1(x)); }};
const Kind kE4M3 = {"e4m3",
                    4,
                    3,
                    7,
                    0x7E,
                    0x7F,
                    0x7E,
                    [](uint16_t c) { return decode_e4m3(static_cast<uint8_t>(c)); },
                    [](float x) { return static_cast<uint16_t>(encode_e4m3(x)); }};
const Kind kE5M2 = {"e5m2",
                    5,
                    2,
                    15,
                    0x7B,
                    0x7F,
                    0x7B,
                    [](uint16_t c) { return decode_e5m2(static_cast<uint8_t>(c)); },
                    [](float x) { return static_cast<uint16_t>(encode_e5m2(x)); }};
const Kind kF16 = {"f16",
                   5,
                   10,
                   15,
                   0x7BFF,
                   0x7E00,
                   0x7C00,
                   [](uint16_t c) { return decode_f16(c); },
                   [](float x) { return encode_f16(x); }};
const Kind kBf16 = {"bf16",
                    8,
                    7,
                    127,
                    0x7F7F,
                    0x7FC0,
                    0x7F80,
                    [](uint16_t c) { return decode_bf16(c); },
                    [](float x) { return encode_bf16(x); }};
const Kind* const kSmall[] = {&kE2M1, &kE4M3, &kE5M2};
const Kind* const kAll[] = {&kE2M1, &kE4M3, &kE5M2, &kF16, &kBf16};

TEST(Element, DecodesEveryFiniteCode) {
  for (const Kind* kind : kAll) {
    SCOPED_TRACE(kind->name);
    int wrong = 0;
    for (int code = 0; code < 2 * kind->magnitudes(); ++code) {
      if ((code & (kind->magnitudes() - 1)) > kind->top) continue;
      const float want = static_cast<float>(kind->slow_decode(code));
      wrong += bits_of(kind->decode(static_cast<uint16_t>(code))) != bits_of(want);
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST(Element, DecodesSpecials) {
  EXPECT_EQ(bits_of(decode_e4m3(0x7F)), 0x7FC00000u);
  EXPECT_EQ(bits_of(decode_e4m3(0xFF)), 0x7FC00000u);
  EXPECT_EQ(decode_e5m2(0x7C), std::numeric_limits<float>::infinity());
  EXPECT_EQ(decode_e5m2(0xFC), -std::numeric_limits<float>::infinity());
  for (const int code : {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}) {
    EXPECT_TRUE(std::isnan(decode_e5m2(static_cast<uint8_t>(code)))) << code;
  }
  for (int code = 0; code < 65536; ++code) {
    const uint16_t bits = static_cast<uint16_t>(code);
    ASSERT_EQ(std::isnan(decode_f16(bits)), (code & 0x7FFF) > 0x7C00) << code;
    ASSERT_EQ(std::isinf(decode_f16(bits)), (code & 0x7FFF) == 0x7C00) << code;
    ASSERT_EQ(bits_of(decode_bf16(bits)), static_cast<uint32_t>(code) << 16) << code;
  }
  EXPECT_LT(decode_f16(0xFC00), 0.0f);
}

TEST(Element, DecodesEveryE8M0Code) {
  for (int code = 0; code < 255; ++code) {
    const float want = static_cast<float>(std::ldexp(1.0, code - 127));
    EXPECT_EQ(bits_of(decode_e8m0(static_cast<uint8_t>(code))), bits_of(want)) << code;
  }
  EXPECT_EQ(bits_of(decode_e8m0(0)), 0x00400000u);  // not flushed to zero
  EXPECT_EQ(bits_of(decode_e8m0(255)), 0x7FC00000u);
}

TEST(Element, E5M2IsTheUpperByteOfAHalf) {
  for (int code = 0; code < 256; ++code) {
    const float got = decode_e5m2(static_cast<uint8_t>(code));
    const float half = decode_f16(static_cast<uint16_t>(code << 8));
    if (std::isnan(half)) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(bits_of(got), bits_of(half)) << code;
    }
  }
}

TEST(Element, EncodesEveryValueToItsOwnCode) {
  for (const Kind* kind : kAll) {
    SCOPED_TRACE(kind->name);
    int wrong = 0;
    for (int code = 0; code < 2 * kind->magnitudes(); ++code) {
      if ((code & (kind->magnitudes() - 1)) > kind->top) continue;
      const float value = static_cast<float>(kind->slow_decode(code));
      wrong += kind->encode(value) != code;
    }
    EXPECT_EQ(wrong, 0);
  }
}

/// The midpoint above each magnitude and the floats on both sides of it: the tie goes to the even
/// code, its neighbours to the nearer one.
TEST(Element, EncodesTiesToTheEvenCode) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Kind* kind : kAll) {
    SCOPED_TRACE(kind->name);
    int wrong = 0;
    for (int code = 0; code < kind->top; ++code) {
      const double low = kind->slow_decode(code);
      const float mid = static_cast<float>((low + kind->slow_decode(code + 1)) / 2);
      const int even = code % 2 == 0 ? code : code + 1;
      wrong += kind->encode(mid) != even;
      wrong += kind->encode(-mid) != even + kind->magnitudes();
      wrong += kind->encode(std::nextafter(mid, 0.0f)) != code;
      wrong += kind->encode(std::nextafter(mid, inf)) != code + 1;
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST(Element, EncodesKnownTiesOfE2M1) {
  constexpr struct {
    float x;
    float want;
  } kCases[] = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5.0f, 4}};
  for (const auto& c : kCases) {
    EXPECT_EQ(decode_e2m1(encode_e2m1(c.x)), c.want) << c.x;
    EXPECT_EQ(decode_e2m1(encode_e2m1(-c.x)), -c.want) << c.x;
  }
}

TEST(Element, EncodesTheEnds) {
  const float inf = std::numeric_limits<float>::infinity();
  const float most = std::numeric_limits<float>::max();
  const float least = std::numeric_limits<float>::denorm_min();
  for (const Kind* kind : kAll) {
    SCOPED_TRACE(kind->name);
    const int minus = kind->magnitudes();
    EXPECT_EQ(kind->encode(inf), kind->overflow_code);
    EXPECT_EQ(kind->encode(-inf), kind->overflow_code + minus);
    EXPECT_EQ(kind->encode(most), kind->overflow_code);
    EXPECT_EQ(kind->encode(-most), kind->overflow_code + minus);
    EXPECT_EQ(kind->encode(0.0f), 0);
    EXPECT_EQ(kind->encode(-0.0f), minus);
    EXPECT_EQ(kind->encode(least), 0);
    EXPECT_EQ(kind->encode(-least), minus);
    for (const uint32_t nan : {0x7FC00000u, 0xFFC00000u, 0x7F800001u, 0xFFFFFFFFu}) {
      EXPECT_EQ(kind->encode(std::bit_cast<float>(nan)), kind->nan_code) << nan;
    }
  }
  EXPECT_EQ(encode_f16(65519.996f), 0x7BFF);
  EXPECT_EQ(encode_f16(65520.0f), 0x7C00);
}

TEST(Element, EncodesRandomFloatsAsTheSlowSearchDoes) {
  std::mt19937 rng(7);
  std::uniform_int_distribution<uint32_t> any;
  std::uniform_real_distribution<float> exponent(-22.0f, 20.0f);
  for (const Kind* kind : kSmall) {
    SCOPED_TRACE(kind->name);
    int wrong = 0;
    for (int i = 0; i < 40000; ++i) {
      const float near = std::exp2(exponent(rng)) * (any(rng) % 2 == 0 ? 1.0f : -1.0f);
      const float wild = std::bit_cast<float>(any(rng));
      wrong += kind->encode(near) != kind->slow_encode(near);
      wrong += kind->encode(wild) != kind->slow_encode(wild);
    }
    EXPECT_EQ(wrong, 0);
  }
}

/// 16-bit codes are too many to search: the result must be one of the two neighbours of x, and the
/// nearer one.
TEST(Element, EncodesRandomFloatsToTheNearest16BitValue) {
  std::mt19937 rng(8);
  std::uniform_int_distribution<uint32_t> any;
  for (const Kind* kind : {&kF16, &kBf16}) {
    SCOPED_TRACE(kind->name);
    const double top = kind->slow_decode(kind->top);
    int wrong = 0, checked = 0;
    for (int i = 0; i < 300000; ++i) {
      const float x = std::bit_cast<float>(any(rng));
      const double a = std::fabs(static_cast<double>(x));
      if (std::isnan(x) || a > top) continue;
      ++checked;
      const int got = kind->encode(x);
      const int code = got & (kind->magnitudes() - 1);
      wrong += (got >= kind->magnitudes()) != std::signbit(x);
      if (code > kind->top) {
        wrong += a < top + (top - kind->slow_decode(kind->top - 1)) / 2;
        continue;
      }
      const double err = std::fabs(kind->slow_decode(code) - a);
      if (code > 0) wrong += std::fabs(kind->slow_decode(code - 1) - a) < err;
      if (code < kind->top) wrong += std::fabs(kind->slow_decode(code + 1) - a) < err;
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(checked, 100000);
  }
}

TEST(Element, RowHelpersTakeAnyAddress) {
  std::vector<float> values;
  for (int i = 0; i < 1001; ++i) values.push_back(std::ldexp(static_cast<float>(i - 500), i % 30));
  const int64_t n = static_cast<int64_t>(values.size());
  std::vector<std::byte> raw(2 * values.size() + 1);
  std::vector<float> back(values.size());
  encode_bf16_row(values.data(), n, raw.data() + 1);
  decode_bf16_row(raw.data() + 1, n, back.data());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(bits_of(back[i]), bits_of(decode_bf16(encode_bf16(values[i]))));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = static_cast<uint16_t>(i * 61);
    raw[1 + 2 * i] = static_cast<std::byte>(half & 255);
    raw[2 + 2 * i] = static_cast<std::byte>(half >> 8);
  }
  decode_f16_row(raw.data() + 1, n, back.data());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(bits_of(back[i]), bits_of(decode_f16(static_cast<uint16_t>(i * 61))));
  }
}

TEST(Packing, GoldenBytesAndRoundTrips) {
  const uint8_t nibbles[] = {1, 2, 15, 0};
  std::byte packed[12];
  pack_nibbles(nibbles, 4, packed);
  EXPECT_EQ(packed[0], std::byte{0x21});
  EXPECT_EQ(packed[1], std::byte{0x0F});
  const uint8_t in_order[] = {0, 1, 2, 3, 4, 5, 6, 7};
  pack_nf3(in_order, 8, packed);
  EXPECT_EQ(packed[0], std::byte{0x88});
  EXPECT_EQ(packed[1], std::byte{0xC6});
  EXPECT_EQ(packed[2], std::byte{0xFA});
  std::mt19937 rng(9);
  std::vector<uint8_t> codes(32), back(32);
  std::vector<std::byte> bytes(16);
  for (int round = 0; round < 100; ++round) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(rng() % 16);
    pack_nibbles(codes.data(), 32, bytes.data());
    unpack_nibbles(bytes.data(), 32, back.data());
    EXPECT_EQ(back, codes);
    for (uint8_t& code : codes) code &= 7;
    pack_nf3(codes.data(), 32, bytes.data());
    unpack_nf3(bytes.data(), 32, back.data());
    EXPECT_EQ(back, codes);
  }
}

TEST(DTypes, NamesGoBothWaysAndBitsAreKnown) {
  int bits = 0;
  for (int i = 0; i <= static_cast<int>(DType::kF6E3M2); ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
    bits += dtype_bits(dtype);
  }
  EXPECT_EQ(bits, 8 * 8 + 4 * 16 + 3 * 32 + 4 * 64 + 4 + 6 + 6);
  EXPECT_EQ(dtype_name(DType::kF8E4M3), "F8_E4M3");
  EXPECT_EQ(dtype_bits(DType::kF4), 4);
  EXPECT_FALSE(dtype_from_name("f32").has_value());
  EXPECT_FALSE(dtype_from_name("").has_value());
}

}  // namespace
}  // namespace nibble::formats
