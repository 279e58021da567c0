// Quantizers against a second implementation that follows the formulas one element at a time, with
// encoders that search; error cases; equal bytes for any pool.
#include "formats/quantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "formats/element.h"
#include "formats/packing.h"

namespace nibble::formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// Nearest of the first `count` values of an ascending table, ties to the even code, sign on top.
uint8_t search(double x, const float* table, int count, int sign_bit) {
  const double a = std::min(std::fabs(x), static_cast<double>(table[count - 1]));
  int best = 0;
  for (int code = 1; code < count; ++code) {
    const double now = std::fabs(static_cast<double>(table[code]) - a);
    const double before = std::fabs(static_cast<double>(table[best]) - a);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? sign_bit : 0));
}
uint8_t slow_e2m1(double x) { return search(x, kE2M1Values.data(), 8, 8); }
uint8_t slow_e4m3(double x) { return search(x, kE4M3Values.data(), 127, 128); }

/// Results before packing.
struct Slow {
  std::vector<uint8_t> codes, scales;
  std::vector<float> float_scales;
  float global = 1.0f;
};

float group_amax(const std::vector<float>& w, size_t begin, size_t count) {
  float most = 0.0f;
  for (size_t i = begin; i < begin + count; ++i) most = std::max(most, std::fabs(w[i]));
  return most;
}

Slow slow_nvfp4(const std::vector<float>& w, float amax, Nvfp4Profile profile) {
  Slow out;
  const float top = amax < 1e-8f ? 1e-8f : amax;
  const float g = 2688.0f / top;
  const bool divide = profile == Nvfp4Profile::kDivide;
  out.global = divide ? top / 2688.0f : 1.0f / g;
  for (size_t begin = 0; begin < w.size(); begin += 16) {
    const float b = group_amax(w, begin, 16);
    uint8_t byte;
    if (divide) {
      const float six = 6.0f * out.global;
      const float t = b / six;
      byte = slow_e4m3(static_cast<double>(t));
      if (byte == 0) byte = 1;
      if (t == 0.0f) byte = 0x38;
    } else {
      const float sixth = 1.0f / 6.0f;
      const float product = b * sixth;
      const float scaled = g * product;
      byte = slow_e4m3(static_cast<double>(scaled));
    }
    const float d = decode_e4m3(byte) * out.global;
    const float inv = byte == 0 ? 0.0f : 1.0f / d;
    out.scales.push_back(byte);
    for (size_t i = begin; i < begin + 16; ++i) {
      const float x = divide ? w[i] / d : w[i] * inv;
      out.codes.push_back(slow_e2m1(static_cast<double>(x)));
    }
  }
  return out;
}

uint8_t slow_mx_byte(float amax, bool e2m1, MxRounding mode) {
  if (amax == 0.0f) return 127;
  int exponent = 0;
  const double m = 2 * std::frexp(static_cast<double>(amax), &exponent);
  int e = exponent - 1 - (e2m1 ? 2 : 8);
  if (mode == MxRounding::kCeil && m > (e2m1 ? 1.5 : 1.75)) ++e;
  if (mode == MxRounding::kEven && m >= 1.75) ++e;
  return static_cast<uint8_t>(std::min(std::max(e, -127), 127) + 127);
}

Slow slow_mx(const std::vector<float>& w, bool e2m1, MxRounding mode) {
  Slow out;
  for (size_t begin = 0; begin < w.size(); begin += 32) {
    const uint8_t byte = slow_mx_byte(group_amax(w, begin, 32), e2m1, mode);
    out.scales.push_back(byte);
    for (size_t i = begin; i < begin + 32; ++i) {
      const double exact = std::ldexp(static_cast<double>(w[i]), 127 - byte);
      out.codes.push_back(e2m1 ? slow_e2m1(exact) : slow_e4m3(exact));
    }
  }
  return out;
}

Slow slow_nf3(const std::vector<float>& w, int bias, const std::array<float, 8>& levels) {
  Slow out;
  float top = 0.0f;
  for (const float level : levels) top = std::max(top, std::fabs(level));
  const float factor = bias == 4 ? 16.0f : 1.0f;
  for (size_t begin = 0; begin < w.size(); begin += 32) {
    const float base = group_amax(w, begin, 32) / top;
    uint8_t byte = slow_e4m3(static_cast<double>(factor * base));
    byte = std::max<uint8_t>(byte, bias == 4 ? 0x08 : 0x01);
    if (base == 0.0f) byte = 0;
    out.scales.push_back(byte);
    const float t = decode_e4m3(byte) / factor;
    for (size_t i = begin; i < begin + 32; ++i) {
      uint8_t code = 0;
      for (size_t k = 0; k < 7; ++k) {
        const double mid =
            (static_cast<double>(levels[k]) + static_cast<double>(levels[k + 1])) / 2;
        if (t > 0.0f && static_cast<double>(w[i] / t) > mid) ++code;
      }
      out.codes.push_back(base == 0.0f ? 4 : code);
    }
  }
  return out;
}

Slow slow_fp8_block(const std::vector<float>& w, int64_t rows, int64_t cols, int64_t br, int64_t bc,
                    bool e8m0) {
  Slow out;
  out.codes.resize(w.size());
  for (int64_t r0 = 0; r0 < rows; r0 += br) {
    for (int64_t c0 = 0; c0 < cols; c0 += bc) {
      std::vector<size_t> inside;
      float most = 0.0f;
      for (int64_t r = r0; r < std::min(rows, r0 + br); ++r) {
        for (int64_t c = c0; c < std::min(cols, c0 + bc); ++c) {
          inside.push_back(static_cast<size_t>(r * cols + c));
          most = std::max(most, std::fabs(w[inside.back()]));
        }
      }
      float s = most / 448.0f;
      if (s == 0.0f) s = 1.0f;
      const uint8_t byte = slow_mx_byte(most, false, MxRounding::kCeil);
      out.float_scales.push_back(s);
      out.scales.push_back(byte);
      for (const size_t i : inside) {
        out.codes[i] = slow_e4m3(e8m0 ? std::ldexp(static_cast<double>(w[i]), 127 - byte)
                                      : static_cast<double>(w[i] / s));
      }
    }
  }
  return out;
}

/// BF16 values over many magnitudes, with empty groups, -0 and exact ties.
std::vector<float> heavy_tailed(size_t n, uint32_t seed, int spread) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-spread, spread);
  std::vector<float> w(n);
  for (size_t i = 0; i < n; ++i) {
    const int kind = static_cast<int>(i / 32 % 5);
    const float x = normal(rng);
    if (kind == 0) w[i] = 0.02f * x;
    if (kind == 1) w[i] = std::ldexp(x * x * x, exponent(rng));
    if (kind == 2) w[i] = rng() % 9 == 0 ? std::ldexp(x, exponent(rng)) : (x < 0 ? -0.0f : 0.0f);
    if (kind == 3) w[i] = 0.25f * static_cast<float>(static_cast<int>(rng() % 49) - 24);  // ties
    if (kind == 4) w[i] = i / 160 % 3 == 0 ? -0.0f : std::ldexp(x, -120 + exponent(rng) / 4);
    w[i] = decode_bf16(encode_bf16(w[i]));
  }
  return w;
}

std::vector<uint8_t> unpack(const QuantizedMatrix& q) {
  const int64_t n = q.meta.rows * q.meta.cols;
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  switch (block_format(q.meta.format).code_bits) {
    case 4: unpack_nibbles(q.codes.data(), n, codes.data()); break;
    case 3: unpack_nf3(q.codes.data(), n, codes.data()); break;
    default: std::memcpy(codes.data(), q.codes.data(), codes.size()); break;
  }
  return codes;
}

void expect_planes(const Result<QuantizedMatrix>& got, const Slow& want) {
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_TRUE(check_geometry(got->view()));
  EXPECT_TRUE(unpack(*got) == want.codes) << "codes differ";
  ASSERT_EQ(got->scales.size(),
            want.scales.size() * static_cast<size_t>(scale_bytes(got->meta.scale_kind)));
  const void* scales = got->meta.scale_kind == ScaleKind::kF32
                           ? static_cast<const void*>(want.float_scales.data())
                           : want.scales.data();
  EXPECT_EQ(std::memcmp(got->scales.data(), scales, got->scales.size()), 0) << "scales differ";
  EXPECT_EQ(std::bit_cast<uint32_t>(got->meta.global), std::bit_cast<uint32_t>(want.global));
}

constexpr int64_t kRows = 100, kCols = 320;

TEST(Quantize, Nvfp4EqualsTheSlowFormulas) {
  for (const int spread : {3, 20, 60}) {
    const auto w = heavy_tailed(kRows * kCols, static_cast<uint32_t>(spread), spread);
    const float amax = group_amax(w, 0, w.size());
    for (const Nvfp4Profile profile : {Nvfp4Profile::kDivide, Nvfp4Profile::kReciprocal}) {
      expect_planes(quantize_nvfp4(w, kRows, kCols, "w", {}, profile),
                    slow_nvfp4(w, amax, profile));
      for (const float shared : {amax * 2, 0.0f, amax / 100, std::numeric_limits<float>::max()}) {
        expect_planes(quantize_nvfp4(w, kRows, kCols, "w", shared, profile),
                      slow_nvfp4(w, shared, profile));
      }
    }
  }
}

/// Groups whose weights lie on E2M1 ties of their real scale. There the last bit of the quotient
/// decides, so a product with a reciprocal must be told apart from a division.
TEST(Quantize, Nvfp4DividesAtExactTies) {
  int groups = 0, told_apart = 0;
  for (int significand = 128; significand < 256; ++significand) {
    const float amax = static_cast<float>(significand) / 64;
    for (uint8_t byte = 0x70; byte < 0x7E; ++byte) {
      const double unit = static_cast<double>(decode_e4m3(byte)) * static_cast<double>(amax) / 2688;
      std::vector<float> w(16, 0.0f);
      w[0] = decode_bf16(encode_bf16(static_cast<float>(6 * unit)));
      size_t n = 1;
      for (const double tie : {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0}) {
        const float x = static_cast<float>(tie * unit);
        if (static_cast<double>(x) != tie * unit || decode_bf16(encode_bf16(x)) != x) continue;
        w[n++] = x;
        w[n++] = -x;
      }
      const Slow want = slow_nvfp4(w, amax, Nvfp4Profile::kDivide);
      if (n == 1 || want.scales[0] != byte) continue;
      ++groups;
      expect_planes(quantize_nvfp4(w, 1, 16, "w", amax), want);
      const float inverse = 1.0f / (decode_e4m3(byte) * want.global);
      for (size_t i = 0; i < 16; ++i) {
        told_apart += slow_e2m1(static_cast<double>(w[i] * inverse)) != want.codes[i];
      }
    }
  }
  EXPECT_GT(groups, 50);
  EXPECT_GT(told_apart, 10);
}

TEST(Quantize, MxEqualsTheSlowFormulas) {
  for (const int spread : {3, 60, 120}) {
    const auto w = heavy_tailed(kRows * kCols, static_cast<uint32_t>(spread), spread);
    for (const MxRounding mode : {MxRounding::kFloor, MxRounding::kCeil, MxRounding::kEven}) {
      expect_planes(quantize_mxfp4(w, kRows, kCols, "w", mode), slow_mx(w, true, mode));
      if (mode == MxRounding::kEven) continue;
      expect_planes(quantize_mxfp8(w, kRows, kCols, "w", mode), slow_mx(w, false, mode));
    }
  }
}

TEST(Quantize, MxScaleByteForEveryBf16) {
  int wrong = 0;
  for (int bits = 0; bits < 0x7F80; ++bits) {
    const float amax = decode_bf16(static_cast<uint16_t>(bits));
    for (const MxRounding mode : {MxRounding::kFloor, MxRounding::kCeil, MxRounding::kEven}) {
      wrong += mx_scale_byte(amax, FormatId::kMxfp4, mode) != slow_mx_byte(amax, true, mode);
      if (mode == MxRounding::kEven) continue;
      wrong += mx_scale_byte(amax, FormatId::kMxfp8, mode) != slow_mx_byte(amax, false, mode);
    }
  }
  EXPECT_EQ(wrong, 0);
  // FP32 subnormals below every BF16, and significands that a BF16 cannot hold
  for (const float amax : {0x1p-149f, 0x1.8p-148f, 0x1.800002p0f, 0x1.c00002p0f, 0x1.bffffep0f}) {
    EXPECT_EQ(mx_scale_byte(amax, FormatId::kMxfp4, MxRounding::kCeil),
              slow_mx_byte(amax, true, MxRounding::kCeil));
    EXPECT_EQ(mx_scale_byte(amax, FormatId::kMxfp8, MxRounding::kCeil),
              slow_mx_byte(amax, false, MxRounding::kCeil));
  }
}

TEST(Quantize, Nf3EqualsTheSlowFormulas) {
  const std::array<float, 8> own = {-1.0f, -0.69921875f, -0.41015625f, -0.1298828125f,
                                    0.09f, 0.33f,        0.66015625f,  1.5f};
  std::array<float, 8> rounded = own;
  for (float& level : rounded) level = decode_bf16(encode_bf16(level));
  ASSERT_NE(rounded[4], own[4]);
  // Midpoints of these need more bits than a float has.
  const std::array<float, 8> wide = {-1.0f, -0x1p-30f, 0x1p-40f, 0x1p-20f, 0.5f, 1.0f, 1.5f, 2.0f};
  for (const int spread : {3, 20, 60}) {
    const auto w = heavy_tailed(kRows * kCols, static_cast<uint32_t>(spread), spread);
    for (const int bias : {0, 4}) {
      expect_planes(quantize_nf3(w, kRows, kCols, "w", bias), slow_nf3(w, bias, kNf3Levels));
      expect_planes(quantize_nf3(w, kRows, kCols, "w", bias, own), slow_nf3(w, bias, rounded));
      expect_planes(quantize_nf3(w, kRows, kCols, "w", bias, wide), slow_nf3(w, bias, wide));
    }
  }
}

TEST(Quantize, Fp8BlockEqualsTheSlowFormulas) {
  for (const int spread : {3, 60}) {
    const auto w = heavy_tailed(kRows * kCols, static_cast<uint32_t>(spread), spread);
    for (const auto& [br, bc] : {std::array<int64_t, 2>{128, 128}, {20, 96}, {1, 1}, {7, 500}}) {
      for (const bool e8m0 : {false, true}) {
        const auto got = quantize_fp8_block(w, kRows, kCols, "w", br, bc, nullptr,
                                            e8m0 ? ScaleKind::kE8M0 : ScaleKind::kF32);
        expect_planes(got, slow_fp8_block(w, kRows, kCols, br, bc, e8m0));
      }
    }
  }
  const auto odd = heavy_tailed(5 * 7, 1, 3);  // odd columns are allowed here
  expect_planes(quantize_fp8_block(odd, 5, 7, "w", 2, 3), slow_fp8_block(odd, 5, 7, 2, 3, false));
}

using Quantizer =
    std::function<Result<QuantizedMatrix>(std::span<const float>, int64_t, int64_t, ThreadPool*)>;
const struct {
  std::string name;
  int64_t group;
  Quantizer run;
} kQuantizers[] = {
    {"nvfp4", 16,
     [](auto w, auto r, auto c, auto* p) {
       return quantize_nvfp4(w, r, c, "layer.w", {}, Nvfp4Profile::kDivide, p);
     }},
    {"nvfp4 with amax", 16,
     [](auto w, auto r, auto c, auto* p) {
       return quantize_nvfp4(w, r, c, "layer.w", 3.0f, Nvfp4Profile::kReciprocal, p);
     }},
    {"mxfp4", 32,
     [](auto w, auto r, auto c, auto* p) {
       return quantize_mxfp4(w, r, c, "layer.w", MxRounding::kCeil, p);
     }},
    {"mxfp8", 32,
     [](auto w, auto r, auto c, auto* p) {
       return quantize_mxfp8(w, r, c, "layer.w", MxRounding::kCeil, p);
     }},
    {"nf3", 32,
     [](auto w, auto r, auto c, auto* p) { return quantize_nf3(w, r, c, "layer.w", 4, {}, p); }},
    {"fp8_block", 1,
     [](auto w, auto r, auto c, auto* p) {
       return quantize_fp8_block(w, r, c, "layer.w", 16, 16, p);
     }},
};

TEST(Quantize, BytesDoNotDependOnThePool) {
  const int64_t rows = 700, cols = 512;  // several tasks
  const auto w = heavy_tailed(static_cast<size_t>(rows * cols), 5, 10);
  ThreadPool one(1), four(4);
  for (const auto& q : kQuantizers) {
    SCOPED_TRACE(q.name);
    const auto alone = q.run(w, rows, cols, nullptr);
    ASSERT_TRUE(alone);
    for (ThreadPool* pool : {&one, &four}) {
      const auto got = q.run(w, rows, cols, pool);
      ASSERT_TRUE(got);
      EXPECT_TRUE(got->codes == alone->codes);
      EXPECT_TRUE(got->scales == alone->scales);
      EXPECT_EQ(got->meta.global, alone->meta.global);
    }
  }
}

TEST(Quantize, RefusesValuesThatAreNotFinite) {
  const int64_t rows = 300, cols = 512;
  ThreadPool pool(4);
  for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
    auto w = heavy_tailed(static_cast<size_t>(rows * cols), 6, 10);
    w[150 * 512 + 7] = bad;
    w[299 * 512] = bad;  // the first one is named, whoever finds which
    for (const auto& q : kQuantizers) {
      for (ThreadPool* p : {static_cast<ThreadPool*>(nullptr), &pool}) {
        SCOPED_TRACE(q.name);
        const auto got = q.run(w, rows, cols, p);
        ASSERT_FALSE(got);
        EXPECT_EQ(got.error().code(), Code::kCorruptInput);
        EXPECT_NE(got.error().message().find("'layer.w'"), std::string::npos);
        EXPECT_NE(got.error().message().find("element 76807"), std::string::npos)
            << got.error().message();
      }
    }
    const auto amax = finite_amax(w, "layer.w", &pool);
    ASSERT_FALSE(amax);
    EXPECT_EQ(amax.error().code(), Code::kCorruptInput);
  }
}

TEST(Quantize, RefusesShapes) {
  const std::vector<float> w(1000, 1.0f);
  for (const auto& q : kQuantizers) {
    SCOPED_TRACE(q.name);
    const auto refused = [&](int64_t values, int64_t rows, int64_t cols, std::string_view text) {
      const auto got = q.run(std::span(w).first(static_cast<size_t>(values)), rows, cols, nullptr);
      ASSERT_FALSE(got) << rows << " x " << cols;
      EXPECT_EQ(got.error().code(), Code::kInvalidArgument);
      EXPECT_NE(got.error().message().find(text), std::string::npos) << got.error().message();
      EXPECT_NE(got.error().message().find("'layer.w'"), std::string::npos);
    };
    refused(64, 3, 32, "64 values");
    refused(0, 0, 32, "shape");
    refused(0, 2, 0, "shape");
    if (q.group > 1) refused(2 * (q.group + 1), 2, q.group + 1, "columns_not_group");
    if (q.group > 1) refused(q.group / 2, 1, q.group / 2, "columns_not_group");
  }
}

TEST(Quantize, RefusesParameters) {
  const std::vector<float> w(64, 1.0f);
  const auto refused = [](const Result<QuantizedMatrix>& got) {
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code(), Code::kInvalidArgument);
  };
  refused(quantize_mxfp8(w, 2, 32, "w", MxRounding::kEven));
  refused(quantize_nf3(w, 2, 32, "w", 3));
  std::array<float, 8> levels = kNf3Levels;
  levels[4] = -0.1279f;  // ascends only before it is rounded to BF16
  ASSERT_GT(levels[4], levels[3]);
  refused(quantize_nf3(w, 2, 32, "w", 4, levels));
  refused(quantize_nvfp4(w, 2, 32, "w", -1.0f));
  refused(quantize_nvfp4(w, 2, 32, "w", kInf));
  refused(quantize_nvfp4(w, 2, 32, "w", std::numeric_limits<float>::quiet_NaN()));
  refused(quantize_fp8_block(w, 2, 32, "w", 0, 16));
  refused(quantize_fp8_block(w, 2, 32, "w", 16, 16, nullptr, ScaleKind::kBf16));
}

TEST(Quantize, FiniteAmax) {
  EXPECT_EQ(*finite_amax({}, "w"), 0.0f);
  EXPECT_EQ(*finite_amax(std::vector<float>{-0.0f}, "w"), 0.0f);
  EXPECT_EQ(*finite_amax(std::vector<float>{1.0f, -3.0f, 2.0f}, "w"), 3.0f);
  ThreadPool pool(3);
  const auto w = heavy_tailed(500000, 3, 20);
  EXPECT_EQ(*finite_amax(w, "w", &pool), group_amax(w, 0, w.size()));
}

}  // namespace
}  // namespace nibble::formats
