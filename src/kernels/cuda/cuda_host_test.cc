// Which GPUs can run what, where compressed scales lie, and division by multiplication: host
// arithmetic. Needs no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "kernels/cuda/divisor.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/moe_layer.h"
#include "kernels/cuda/router.h"

namespace nibble::kernels::cuda {
namespace {

using ::testing::HasSubstr;

constexpr Gpu kH200{9, 132, 227 * 1024}, kRtx5090{12, 170, 99 * 1024}, kRtx4090{8, 128, 99 * 1024},
    kA100{8, 108, 163 * 1024};
constexpr FormatId kFormats[] = {FormatId::kNvfp4,    FormatId::kMxfp4, FormatId::kMxfp8,
                                 FormatId::kFp8Block, FormatId::kNf3,   FormatId::kBf16};

MoeShape shape(int64_t hidden, int64_t inter, int64_t top_k) {
  MoeShape s;
  s.experts = 128;
  s.hidden = hidden;
  s.inter = inter;
  s.top_k = top_k;
  return s;
}
MoeWeights weights(FormatId gate_up, FormatId down, ScaleForm form = ScaleForm::kPlain) {
  MoeWeights w;
  w.gate_up.format = gate_up;
  w.down.format = down;
  w.gate_up.scale_form = w.down.scale_form = form;
  return w;
}

TEST(MoeDevice, EveryFormatAndMixRunsWhereThereAreBulkCopies) {
  for (const Gpu& device : {kH200, kRtx5090}) {
    for (const FormatId up : kFormats) {
      for (const FormatId down : kFormats) {
        const std::vector<MoeWeights> groups = {weights(up, down), weights(down, up)};
        const Result<void> runs = moe_runs_on(device, shape(4096, 2048, 8), groups);
        EXPECT_TRUE(runs) << device.major << ": " << runs.error().message();
      }
      if (!has_csf(up)) continue;
      const MoeWeights csf[] = {weights(up, up, ScaleForm::kCsf)};
      EXPECT_TRUE(moe_runs_on(device, shape(4096, 2048, 8), csf));
    }
  }
}

TEST(MoeDevice, WithoutBulkCopiesOneGroupPackedAlikeThatFits) {
  for (const Gpu& device : {kRtx4090, kA100}) {
    for (const FormatId f : kFormats) {
      const MoeWeights one[] = {weights(f, f)};
      const bool fits = f != FormatId::kBf16 || device.shared_bytes == kA100.shared_bytes;
      EXPECT_EQ(static_cast<bool>(moe_runs_on(device, shape(2048, 768, 8), one)), fits)
          << device.shared_bytes << " " << static_cast<int>(f);
    }
    const MoeWeights mixed[] = {weights(FormatId::kNvfp4, FormatId::kMxfp8)};
    const MoeWeights two[] = {weights(FormatId::kNvfp4, FormatId::kNvfp4),
                              weights(FormatId::kNf3, FormatId::kNf3)};
    for (const std::span<const MoeWeights> groups :
         {std::span<const MoeWeights>(mixed), std::span<const MoeWeights>(two)}) {
      const Result<void> runs = moe_runs_on(device, shape(2048, 768, 8), groups);
      ASSERT_FALSE(runs);
      EXPECT_EQ(runs.error().code(), Code::kUnsupported);
      EXPECT_THAT(runs.error().message(), HasSubstr("compute capability 8.x"));
    }
  }
}

TEST(MoeDevice, ATokenThatDoesNotFitIsRefused) {
  const MoeWeights one[] = {weights(FormatId::kNvfp4, FormatId::kNvfp4)};
  EXPECT_TRUE(moe_runs_on(kRtx4090, shape(4096, 2048, 8), one));
  const Result<void> runs = moe_runs_on(kRtx4090, shape(6144, 16384, 8), one);
  ASSERT_FALSE(runs);
  EXPECT_THAT(runs.error().message(), HasSubstr("intermediate 16384"));
}

TEST(MoeDevice, AFormatWithoutAKernelIsNamed) {
  const MoeWeights one[] = {weights(FormatId::kF16, FormatId::kNvfp4)};
  const Result<void> runs = moe_runs_on(kH200, shape(2048, 768, 8), one);
  ASSERT_FALSE(runs);
  EXPECT_THAT(runs.error().message(), HasSubstr("f16"));
}

TEST(NormRoute, TakesTwoKernelsWhereItsWeightsDoNotFit) {
  for (const int64_t hidden : {2048, 4096}) {
    EXPECT_LE(norm_route_bytes(FormatId::kBf16, hidden, 128), kRtx5090.shared_bytes) << hidden;
    EXPECT_GT(norm_route_bytes(FormatId::kF32, hidden, 128), kRtx5090.shared_bytes) << hidden;
    for (const FormatId f : {FormatId::kBf16, FormatId::kF32}) {
      EXPECT_LE(norm_route_bytes(f, hidden, 1024), kH200.shared_bytes) << hidden;
    }
  }
  EXPECT_GT(norm_route_bytes(FormatId::kBf16, 4096, 512), kRtx5090.shared_bytes);
}

// Products number the pieces of their activations in 32 bits.
TEST(Limits, MoreActivationsThanCanBeNumberedAreRefused) {
  std::byte packed{};
  float y{};
  const LinearWeight weight{.format = FormatId::kBf16, .out = 64, .cols = 2048, .packed = &packed};
  const LinearArgs rows{.x = &packed, .rows = int64_t{1} << 24, .y = &y};
  const Result<void> linears = linear(weight, rows, nullptr, nullptr);
  ASSERT_FALSE(linears);
  EXPECT_EQ(linears.error().code(), Code::kInvalidArgument);
  EXPECT_THAT(linears.error().message(), HasSubstr("rows times columns at most 17179869184"));

  MoeWeights experts = weights(FormatId::kNvfp4, FormatId::kNvfp4);
  experts.experts = 128;
  const Result<void> layer = moe_layer(shape(2048, 768, 8), {{&experts, 1}, nullptr},
                                       {.tokens = (int64_t{1} << 20) + 1}, nullptr, nullptr);
  ASSERT_FALSE(layer);
  EXPECT_THAT(layer.error().message(), HasSubstr("MoE tokens: 1048577"));
}

TEST(CsfGroup, EveryCodeComesBackFromItsPlace) {
  std::mt19937 random(7);
  for (const FormatId f : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8}) {
    const uint32_t all = ((1u << csf_bits(f)) - 1) * 0x10001u << csf_shift(f);
    for (int round = 0; round < 100; ++round) {
      uint32_t codes[kCsfChunks];
      CsfWords words;
      for (int c = 0; c < kCsfChunks; ++c) {
        codes[c] = random() & all;
        const CsfWords bits = csf_place(f, codes[c], c);
        EXPECT_EQ(words.own & bits.own, 0u);
        EXPECT_EQ(words.pair & bits.pair, 0u);
        words.own |= bits.own;
        words.pair |= bits.pair;
      }
      for (int c = 0; c < kCsfChunks; ++c) EXPECT_EQ(csf_codes(f, words, c), codes[c]);
    }
  }
}

TEST(CsfGroup, TwoLanesShareAWordWithoutMeeting) {
  const FormatId f = FormatId::kNvfp4;
  uint32_t bits[2] = {0, 0};
  for (int lane = 0; lane < 2; ++lane) {
    for (int c = 0; c < kCsfChunks; ++c) bits[lane] |= csf_place(f, 0x03F003F0u, c).pair;
    bits[lane] = turn_right(bits[lane], 32 - csf_turn(f, lane));
  }
  EXPECT_EQ(bits[0] & bits[1], 0u);
  EXPECT_EQ(bits[0] | bits[1], ~0u);
}

TEST(CsfGroup, ChunksOfARowBlockFollowEachOther) {
  for (const FormatId f : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8}) {
    for (int64_t count = 1; count < 20; ++count) {
      int64_t at = kCsfLead;
      for (int64_t chunk = 0; chunk < count; ++chunk) {
        if (chunk % kCsfChunks == 0) {
          EXPECT_EQ(csf_group_at(f, chunk), at);
          at += csf_group_bytes(f);
        }
        EXPECT_EQ(tile_at(f, ScaleForm::kCsf, chunk), at);
        at += tile_code_bytes(f);
      }
      EXPECT_EQ(row_block_bytes(f, ScaleForm::kCsf, count), at);
      EXPECT_EQ(at % 256, 0);
    }
  }
}

TEST(Divisor, DividesWhatItSaysItDoes) {
  std::mt19937_64 rng(7);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(rng() % static_cast<uint64_t>(n));
  };
  for (int64_t i = 0; i < 3000; ++i) {
    const int64_t d = i < 1000 ? i + 1 : 1 + below(int64_t{1} << (5 + i % 20));
    const int64_t end = std::min(((int64_t{1} << 32) - 1) / d, int64_t{INT32_MAX});
    ASSERT_TRUE(Divisor::divides(end, d));
    const Divisor divisor(d);
    std::vector<int64_t> numbers = {0, 1, d - 1, d, d + 1, end / d * d - 1, end / d * d, end};
    for (int n = 0; n < 50; ++n) numbers.push_back(below(end + 1));
    for (const int64_t n : numbers) {
      if (n < 0 || n > end) continue;
      ASSERT_EQ(divisor.of(static_cast<int>(n)), n / d) << n << " / " << d;
    }
  }
  EXPECT_FALSE(Divisor::divides(int64_t{1} << 31, 2));
}

}  // namespace
}  // namespace nibble::kernels::cuda
