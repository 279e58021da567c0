// Embedding rows and RMSNorm rows against exact references; rows alone and gathered have the same
// bits. A step's words arrive, and no others change.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/cuda/rows.h"
#include "kernels/cuda/step_copy.h"
#include "kernels/cuda/test_device.h"

namespace nibble::kernels::cuda {
namespace {

using namespace test;
using formats::FormatId;

void check_table(Checks& checks, FormatId format, int64_t hidden, bool with_drawn) {
  const int64_t vocab = 1000;
  const std::vector<int32_t> tokens = {0, 999, 5, 5, 1000, -1, 17, 3, -3, -2};
  const std::vector<int32_t> positions = {0, 1, 2, 3, 4, 5, -1, 7, 0, 4};
  const std::vector<int32_t> drawn = {321, -1, 4};
  Random random(static_cast<uint64_t>(hidden));
  const std::vector<float> values = random.normals(vocab * hidden);
  std::vector<float> exact = values;
  std::vector<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (format == FormatId::kBf16) {
      const __nv_bfloat16 h = __float2bfloat16(values[i]);
      std::memcpy(&halves[i], &h, 2);
      exact[i] = __bfloat162float(h);
    } else if (format == FormatId::kF16) {
      const __half h = __float2half(values[i]);
      std::memcpy(&halves[i], &h, 2);
      exact[i] = __half2float(h);
    }
  }
  const Device<float> wide(values);
  const Device<uint16_t> narrow(halves);
  const Device<int32_t> device_tokens(tokens), device_positions(positions), device_drawn(drawn);
  EmbedTable table;
  table.data = format == FormatId::kF32 ? static_cast<const void*>(wide.get()) : narrow.get();
  table.format = format;
  table.vocab = vocab;
  table.hidden = hidden;
  StepView step;
  step.tokens = device_tokens.get();
  step.positions = device_positions.get();
  step.rows = static_cast<int32_t>(tokens.size());
  Device<float> out(step.rows * hidden);
  out.fill(0xFF);
  must(embed(table, step, with_drawn ? device_drawn.get() : nullptr, out.get(), nullptr), "embed");
  const std::vector<float> got = out.download();
  for (size_t t = 0; t < tokens.size(); ++t) {
    int32_t token = tokens[t];
    if (token < 0 && with_drawn) token = drawn[static_cast<size_t>(-1 - token)];
    const bool real = token >= 0 && token < vocab && positions[t] >= 0;
    bool same = true;
    for (int64_t i = 0; i < hidden; ++i) {
      const float want = real ? exact[static_cast<size_t>(token * hidden + i)] : 0.0f;
      same = same && got[t * static_cast<size_t>(hidden) + static_cast<size_t>(i)] == want;
    }
    checks.expect(same, cat("embed format ", static_cast<int>(format), " row ", t));
  }
}

void check_rows(Checks& checks, int64_t hidden, int64_t rows, bool with_delta) {
  const float eps = 1e-5f;
  Random random(static_cast<uint64_t>(hidden * 1000 + rows));
  const std::vector<float> x = random.normals(rows * hidden), d = random.normals(rows * hidden);
  const std::vector<float> w = random.normals(hidden);
  const Device<float> delta(d), weight(w);
  Device<float> residual(x), normed_f32(rows * hidden);
  Device<uint16_t> normed(rows * hidden);
  AddRmsNormArgs args;
  args.residual = residual.get();
  args.delta = with_delta ? delta.get() : nullptr;
  args.rows = rows;
  args.hidden = hidden;
  args.weight = weight.get();
  args.eps = eps;
  args.normed = normed.get();
  args.normed_f32 = normed_f32.get();
  must(add_rms_norm(args, nullptr), "add_rms_norm");
  const auto sum = residual.download(), fine = normed_f32.download();
  const auto coarse = normed.download();
  const std::string name = cat("norm hidden ", hidden, " rows ", rows, with_delta ? " delta" : "");

  double worst = 0;
  bool sums = true, rounded = true;
  for (int64_t t = 0; t < rows; ++t) {
    double squares = 0;
    const auto at = [&](int64_t i) { return static_cast<size_t>(t * hidden + i); };
    for (int64_t i = 0; i < hidden; ++i) {
      const float s = with_delta ? x[at(i)] + d[at(i)] : x[at(i)];
      sums = sums && s == sum[at(i)];
      squares += static_cast<double>(s) * s;
    }
    const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(hidden) + eps);
    for (int64_t i = 0; i < hidden; ++i) {
      const double want = sum[at(i)] * inverse * w[static_cast<size_t>(i)];
      worst = std::max(worst, std::fabs(fine[at(i)] - want) / (std::fabs(want) + 1e-30));
      const __nv_bfloat16 h = __float2bfloat16(fine[at(i)]);
      rounded = rounded && std::memcmp(&h, &coarse[at(i)], 2) == 0;
    }
  }
  checks.expect(sums, name + ": residual");
  checks.expect(rounded, name + ": BF16 is the rounded FP32");
  checks.within(worst, 2e-6, name + ", relative error");

  // Each row alone, and gathered in another order, without a residual update: the same bits.
  std::vector<int32_t> wanted;
  for (int64_t t = rows - 1; t >= 0; t -= rows < 8 ? 1 : 7) wanted.push_back(static_cast<int>(t));
  wanted.push_back(-1);
  const Device<int32_t> list(wanted);
  const Device<float> before(x);
  const auto count = static_cast<int64_t>(wanted.size());
  Device<uint16_t> picked(count * hidden), alone(hidden);
  Device<float> picked_f32(count * hidden);
  GatherRmsNormArgs gather;
  gather.residual = before.get();
  gather.delta = args.delta;
  gather.rows = list.get();
  gather.count = count;
  gather.hidden = hidden;
  gather.weight = weight.get();
  gather.eps = eps;
  gather.normed = picked.get();
  gather.normed_f32 = picked_f32.get();
  must(gather_rms_norm(gather, nullptr), "gather_rms_norm");
  const auto got = picked.download();
  const auto got_f32 = picked_f32.download();
  checks.expect(before.download() == x, name + ": gather leaves the residual");
  for (int64_t i = 0; i + 1 < count; ++i) {
    const int64_t t = wanted[static_cast<size_t>(i)];
    checks.expect(
        std::memcmp(&got[static_cast<size_t>(i * hidden)], &coarse[static_cast<size_t>(t * hidden)],
                    static_cast<size_t>(hidden) * 2) == 0 &&
            std::memcmp(&got_f32[static_cast<size_t>(i * hidden)],
                        &fine[static_cast<size_t>(t * hidden)],
                        static_cast<size_t>(hidden) * 4) == 0,
        cat(name, ": gathered row ", t));
    Device<float> one(std::vector<float>(x.begin() + t * hidden, x.begin() + (t + 1) * hidden));
    AddRmsNormArgs single = args;
    single.residual = one.get();
    single.delta = with_delta ? delta.get() + t * hidden : nullptr;
    single.rows = 1;
    single.normed = alone.get();
    single.normed_f32 = nullptr;
    must(add_rms_norm(single, nullptr), "one row");
    checks.expect(std::memcmp(alone.download().data(), &coarse[static_cast<size_t>(t * hidden)],
                              static_cast<size_t>(hidden) * 2) == 0,
                  cat(name, ": row ", t, " alone"));
  }
  bool zeros = true;
  for (int64_t i = 0; i < hidden; ++i) {
    zeros = zeros && got[static_cast<size_t>((count - 1) * hidden + i)] == 0;
  }
  checks.expect(zeros, name + ": row -1 is zeros");
}

/// Runs of random sizes, one of rows with words between them, in one page-locked block.
void check_copy(Checks& checks, int seed) {
  std::mt19937 rng(static_cast<unsigned>(seed));
  const auto below = [&](int n) { return static_cast<int32_t>(rng() % static_cast<unsigned>(n)); };
  constexpr int kGap = 3;
  StepCopy copy;
  std::vector<int64_t> begin;
  int64_t all = 0;
  for (WordRows& r : copy) {
    r.words = seed == 0 ? 1 : below(seed < 3 ? 40 : 3000);
    begin.push_back(all);
    all += r.words + kGap;
  }
  copy.back().rows = 1 + below(20);
  copy.back().stride = copy.back().words + kGap;
  all += int64_t{copy.back().stride} * copy.back().rows;
  int32_t* host = nullptr;
  must(cudaMallocHost(&host, static_cast<size_t>(all) * 4), "page-locked");
  Device<int32_t> device(all);
  device.fill(0xFF);
  std::vector<int32_t> want(static_cast<size_t>(all), -1);
  for (int64_t i = 0; i < all; ++i) host[i] = below(1 << 30);
  for (size_t n = 0; n < copy.size(); ++n) {
    WordRows& r = copy[n];
    r.from = host + begin[n];
    r.to = device.get() + begin[n];
    for (int row = 0; row < r.rows; ++row) {
      const int64_t at = begin[n] + int64_t{row} * r.stride;
      std::copy_n(host + at, r.words, want.begin() + at);
    }
  }
  must(copy_step(copy, nullptr), "copy_step");
  checks.expect(device.download() == want, cat("step of ", all, " words"));
  must(cudaFreeHost(host), "page-locked");
}

}  // namespace

CheckSummary check_step(const CheckOptions& options, std::ostream& out) {
  return run_checks(options, out, [](Checks& checks) {
    for (int seed = 0; seed < 12; ++seed) check_copy(checks, seed);
  });
}

CheckSummary check_embed(const CheckOptions& options, std::ostream& out) {
  const FormatId format = options.format == "f32"   ? FormatId::kF32
                          : options.format == "f16" ? FormatId::kF16
                                                    : FormatId::kBf16;
  return run_checks(options, out, [&](Checks& checks) {
    for (const int64_t hidden : {8, 128, 2048, 2880}) {
      check_table(checks, format, hidden, false);
      check_table(checks, format, hidden, true);
    }
  });
}

CheckSummary check_norm(const CheckOptions& options, std::ostream& out) {
  return run_checks(options, out, [](Checks& checks) {
    for (const int64_t hidden : {4, 36, 128, 2048, 2880, 4096, 5120, 16384}) {
      for (const int64_t rows : {1, 3, 33, 256, 300}) {
        if (rows > 3 && checks.quick()) continue;
        if (rows == 300 && !checks.full()) continue;
        check_rows(checks, hidden, rows, true);
        check_rows(checks, hidden, rows, false);
      }
    }
  });
}

}  // namespace nibble::kernels::cuda
