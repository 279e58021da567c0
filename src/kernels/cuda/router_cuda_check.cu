// The router: logits within the stated bound of a double reference; ids and weights as the contract
// says from the kernel's own logits, ties and NaN included; the same bits for every number of rows,
// a row alone and repeated runs.
#include <algorithm>
#include <cmath>
#include <random>

#include "formats/block_format.h"
#include "kernels/cuda/linear_case.h"
#include "kernels/cuda/router.h"

namespace nibble::kernels::cuda {
namespace {

using formats::FormatId;
using test::Checks;

/// The choice of one row, straight from the contract. Scores in float, as the kernel's.
void reference_choice(const RouterParams& p, const float* bias, const float* logits,
                      std::vector<int32_t>& ids, std::vector<double>& weights) {
  const auto n = static_cast<size_t>(p.experts);
  std::vector<float> score(n), biased(n);
  auto softmax = [](const std::vector<float>& in) {
    float peak = -INFINITY;
    for (const float v : in) peak = std::fmax(peak, v);
    double sum = 0;
    for (const float v : in) sum += v == v ? std::exp(static_cast<double>(v - peak)) : 0.0;
    std::vector<float> out;
    for (const float v : in) {
      out.push_back(static_cast<float>(std::exp(static_cast<double>(v - peak)) / sum));
    }
    return out;
  };
  const std::vector<float> row(logits, logits + n);
  if (p.score == RouterScore::kSoftmax) score = softmax(row);
  if (p.score == RouterScore::kSoftmaxSelected) score = row;
  for (size_t e = 0; e < n; ++e) {
    if (p.score == RouterScore::kSigmoid) {
      score[e] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(row[e]))));
    }
    biased[e] = bias == nullptr ? score[e] : score[e] + bias[e];
  }
  const auto groups = static_cast<size_t>(p.groups), size = n / groups;
  std::vector<float> group_score;
  for (size_t g = 0; g < groups; ++g) {
    std::vector<float> v;
    for (size_t e = g * size; e < (g + 1) * size; ++e) {
      v.push_back(biased[e] == biased[e] ? biased[e] : -INFINITY);
    }
    std::sort(v.rbegin(), v.rend());
    group_score.push_back(size == 1 ? v[0] : v[0] + v[1]);
  }
  std::vector<size_t> order(groups);
  for (size_t g = 0; g < groups; ++g) order[g] = g;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return group_score[a] > group_score[b]; });
  std::vector<int> rank(n, 1);
  for (size_t i = 0; i < static_cast<size_t>(p.top_groups); ++i) {
    for (size_t e = order[i] * size; e < (order[i] + 1) * size; ++e) rank[e] = 2;
  }
  for (size_t e = 0; e < n; ++e) rank[e] = biased[e] == biased[e] ? rank[e] : 0;
  ids.resize(n);
  for (size_t e = 0; e < n; ++e) ids[e] = static_cast<int32_t>(e);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
    if (rank[i] != rank[j]) return rank[i] > rank[j];
    return rank[i] > 0 && biased[i] > biased[j];
  });
  ids.resize(static_cast<size_t>(p.top_k));
  std::sort(ids.begin(), ids.end());
  std::vector<float> chosen;
  for (const int32_t e : ids) chosen.push_back(score[static_cast<size_t>(e)]);
  if (p.score == RouterScore::kSoftmaxSelected) chosen = softmax(chosen);
  double sum = 0;
  for (const float v : chosen) sum += static_cast<double>(v);
  if (p.score == RouterScore::kSoftmaxSelected || !p.normalize) sum = 1;
  weights.clear();
  for (const float v : chosen) weights.push_back(static_cast<double>(v) / sum * p.scaling);
}

struct RouterRun {
  std::vector<float> logits, weights;
  std::vector<int32_t> ids;
};

/// norm_route against add_rms_norm and route: residual, normed row, ids and weights, bit for bit.
void check_norm_route(Checks& checks, const RouterWeight& weight, const RouterParams& p,
                      const std::string& name) {
  constexpr int64_t kRows = 18;
  const int64_t hidden = weight.hidden, count = kRows * hidden;
  std::mt19937_64 rng(static_cast<uint64_t>(p.experts * 7 + hidden));
  std::normal_distribution<float> normal;
  const auto normals = [&](int64_t n) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = normal(rng);
    return v;
  };
  const std::vector<float> host_residual = normals(count);
  DeviceBuffer residual(count * 4), delta(count * 4), norm_weight(hidden * 4), normed(count * 2);
  DeviceBuffer normed_f32(count * 4), scratch(router_scratch_bytes(kRows, p.experts));
  DeviceBuffer ids(kRows * p.top_k * 4), weights(kRows * p.top_k * 4);
  upload(delta, normals(count));
  upload(norm_weight, normals(hidden));
  must(cudaMemset(scratch.data(), 0, static_cast<size_t>(scratch.bytes())), "zero");
  struct Result {
    std::vector<uint32_t> residual, weights;
    std::vector<uint16_t> normed;
    std::vector<int32_t> ids;
    bool operator==(const Result&) const = default;
  };
  const auto run = [&](int64_t rows, bool with_delta, bool fused) {
    upload(residual, host_residual);
    for (const DeviceBuffer* b : {&normed, &normed_f32, &ids, &weights}) {
      must(cudaMemset(b->data(), 0xFF, static_cast<size_t>(b->bytes())), "poison");
    }
    AddRmsNormArgs norm;
    norm.residual = residual.as<float>();
    norm.delta = with_delta ? delta.as<float>() : nullptr;
    norm.rows = rows;
    norm.hidden = hidden;
    norm.weight = norm_weight.as<float>();
    norm.normed = normed.data();
    norm.normed_f32 = normed_f32.as<float>();
    if (fused) {
      must(norm_route(norm, weight, p, scratch.data(), ids.as<int32_t>(), weights.as<float>(),
                      nullptr, NormRoutePath::kFused),
           "norm_route");
    } else {
      must(add_rms_norm(norm, nullptr), "add_rms_norm");
      must(route(weight, p, normed_f32.as<float>(), 0, rows, scratch.data(), ids.as<int32_t>(),
                 weights.as<float>(), nullptr),
           "route");
    }
    must(cudaDeviceSynchronize(), "norm_route run");
    return Result{download<uint32_t>(residual, count), download<uint32_t>(weights, kRows * p.top_k),
                  download<uint16_t>(normed, count), download<int32_t>(ids, kRows * p.top_k)};
  };
  for (int64_t rows = 1; rows <= kRows; ++rows) {
    if (!checks.full() && rows > 2 && (checks.quick() || rows % 4 != 1)) continue;
    for (const bool with_delta : {true, false}) {
      checks.expect(run(rows, with_delta, true) == run(rows, with_delta, false),
                    cat(name, ": norm_route, rows ", rows, with_delta ? " delta" : ""));
    }
  }
  int different = 0;
  const Result once = run(3, true, true);
  for (int i = 0; i < (checks.full() ? 100 : checks.quick() ? 1 : 10); ++i) {
    different += run(3, true, true) == once ? 0 : 1;
  }
  checks.expect(different == 0, cat(name, ": ", different, " repeats of norm_route differ"));
}

void check_params(Checks& checks, FormatId f, RouterParams p, int64_t hidden, bool with_bias,
                  bool matrix_bias, const std::vector<int64_t>& counts) {
  const int64_t rows = counts.back(), stride = hidden + 8;
  std::mt19937_64 rng(static_cast<uint64_t>(p.experts + hidden));
  std::normal_distribution<float> normal;
  std::vector<float> w(static_cast<size_t>(p.experts * hidden)),
      x(static_cast<size_t>(rows * stride));
  for (auto& v : w)
    v = bf16_to_float(bf16_bits(normal(rng) / std::sqrt(static_cast<float>(hidden))));
  for (auto& v : x) v = normal(rng);
  // Equal experts (ties) and one of NaN.
  std::copy_n(w.begin() + 3 * hidden, hidden, w.begin() + 5 * hidden);
  std::copy_n(w.begin() + 3 * hidden, hidden, w.begin() + (p.experts - 1) * hidden);
  w[static_cast<size_t>(4 * hidden)] = NAN;
  std::vector<float> correction, bias;
  for (int64_t e = 0; e < p.experts; ++e) {
    correction.push_back(e == 5 || e == p.experts - 1 ? correction[3] : 0.1f * normal(rng));
    bias.push_back(e == 5 || e == p.experts - 1 ? bias[3] : normal(rng));
  }
  DeviceBuffer matrix(static_cast<int64_t>(w.size()) * 4), input(rows * stride * 4);
  if (f == FormatId::kBf16) {
    std::vector<uint16_t> half;
    for (const float v : w) half.push_back(v != v ? 0x7FC0 : bf16_bits(v));
    upload(matrix, half);
  } else {
    upload(matrix, w);
  }
  upload(input, x);
  DeviceBuffer correction_device(p.experts * 4), bias_device(p.experts * 4);
  upload(correction_device, correction);
  upload(bias_device, bias);
  DeviceBuffer scratch(router_scratch_bytes(rows, p.experts)), logits(rows * p.experts * 4);
  DeviceBuffer ids(rows * p.top_k * 4), weights(rows * p.top_k * 4);
  must(cudaMemset(scratch.data(), 0, static_cast<size_t>(scratch.bytes())), "zero");
  if (with_bias) p.correction_bias = correction_device.as<float>();
  RouterWeight weight{f, p.experts, hidden, matrix.data()};
  if (matrix_bias) weight.bias = bias_device.as<float>();
  const std::string name =
      cat("router ", formats::block_format(f).name, " E", p.experts, " H", hidden, " k", p.top_k,
          " groups ", p.top_groups, "/", p.groups, " score ", static_cast<int>(p.score));
  const auto run = [&](int64_t first, int64_t count, bool own_logits) {
    must(route(weight, p, input.as<float>() + first * stride, stride, count, scratch.data(),
               ids.as<int32_t>(), weights.as<float>(), nullptr,
               own_logits ? logits.as<float>() : nullptr),
         "route");
    must(cudaDeviceSynchronize(), "route run");
    return RouterRun{download<float>(logits, count * p.experts),
                     download<float>(weights, count * p.top_k),
                     download<int32_t>(ids, count * p.top_k)};
  };
  const RouterRun all = run(0, rows, true);
  double worst = 0, worst_weight = 0;
  int wrong = 0;
  std::vector<int32_t> expected_ids;
  std::vector<double> expected;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = 0; e < p.experts && r % 16 == 0; ++e) {
      double sum = matrix_bias ? bias[static_cast<size_t>(e)] : 0, size = std::fabs(sum);
      for (int64_t c = 0; c < hidden; ++c) {
        const double v = static_cast<double>(w[static_cast<size_t>(e * hidden + c)]) *
                         x[static_cast<size_t>(r * stride + c)];
        sum += v;
        size += std::fabs(v);
      }
      const float got = all.logits[static_cast<size_t>(r * p.experts + e)];
      if (sum != sum) {
        checks.expect(got != got, cat(name, ": NaN logit lost"));
        continue;
      }
      const double bound = (static_cast<double>(hidden) / 128 + 12) * 0x1p-24 * size;
      const double ratio = std::fabs(static_cast<double>(got) - sum) / bound;
      if (!(ratio <= worst)) worst = ratio;
    }
    reference_choice(p, with_bias ? correction.data() : nullptr, all.logits.data() + r * p.experts,
                     expected_ids, expected);
    for (size_t k = 0; k < expected.size(); ++k) {
      const auto at = static_cast<size_t>(r * p.top_k) + k;
      if (all.ids[at] != expected_ids[k]) ++wrong;
      const double got = all.weights[at];
      if (expected[k] != expected[k] && got != got) continue;
      const double error = std::fabs(got - expected[k]) / (std::fabs(expected[k]) + 1e-30);
      if (!(error <= worst_weight)) worst_weight = error;
    }
  }
  checks.within(worst, 1.0, name + " logits, share of the bound");
  checks.expect(wrong == 0, cat(name, ": ", wrong, " ids differ"));
  checks.within(worst_weight, 2e-6, name + " weights, relative error");
  const auto same = [&](const RouterRun& part, int64_t first, bool own_logits) {
    const auto k = static_cast<size_t>(p.top_k), count = part.ids.size() / k;
    return (!own_logits || std::memcmp(part.logits.data(), all.logits.data() + first * p.experts,
                                       part.logits.size() * 4) == 0) &&
           std::memcmp(part.ids.data(), all.ids.data() + first * p.top_k, count * k * 4) == 0 &&
           std::memcmp(part.weights.data(), all.weights.data() + first * p.top_k, count * k * 4) ==
               0;
  };
  for (const int64_t count : counts) {
    checks.expect(same(run(0, count, true), 0, true), cat(name, " rows ", count));
    checks.expect(same(run(0, count, false), 0, false), cat(name, " rows ", count, " own scratch"));
  }
  for (int64_t r = 0; r < rows; r += r < 10 ? 1 : 23) {
    checks.expect(same(run(r, 1, true), r, true), cat(name, " row alone ", r));
  }
  check_norm_route(checks, weight, p, name);
  const int repeats = checks.full() ? 100 : 10;
  int different = 0;
  for (int i = 0; i < repeats && counts.size() > 3; ++i) {
    different += same(run(0, i % 2 == 0 ? 1 : rows, true), 0, true) ? 0 : 1;
  }
  checks.expect(different == 0, cat(name, ": ", different, " repeats differ"));
  checks.line(
      cat(name, ": worst logit error ", worst, " of the bound, weight error ", worst_weight));
}

/// Every case whose matrix has the format.
void check_format(Checks& checks, FormatId format) {
  const auto check = [&](FormatId f, const RouterParams& p, int64_t hidden, bool with_bias,
                         bool matrix_bias, const std::vector<int64_t>& counts) {
    if (f == format) check_params(checks, f, p, hidden, with_bias, matrix_bias, counts);
  };
  RouterParams p;
  p.experts = 128;
  p.top_k = 8;
  if (checks.quick()) {
    p.score = RouterScore::kSigmoid;
    p.groups = 8;
    p.top_groups = 4;
    check(format, p, 260, true, true, {1, 5, 18});
    return;
  }
  const std::vector<int64_t> counts = {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 100, 256, 300};
  check(FormatId::kBf16, p, 2048, false, false, counts);
  p.score = RouterScore::kSigmoid;
  p.scaling = 2.5f;
  check(FormatId::kF32, p, 2048, true, false, counts);
  check(FormatId::kBf16, p, 4096, true, false, counts);
  if (!checks.full()) return;
  p.experts = 160;
  check(FormatId::kF32, p, 5120, true, false, {1, 4, 33});
  p.experts = 256;
  p.groups = 8;
  p.top_groups = 4;
  check(FormatId::kBf16, p, 1028, true, false, counts);
  p.experts = 512;
  p.top_k = 64;
  p.groups = 64;
  p.top_groups = 5;  // 40 experts: the rest from dropped groups
  p.normalize = false;
  check(FormatId::kF32, p, 96, true, true, counts);
  p = RouterParams();
  p.experts = 1024;
  p.top_k = 10;
  check(FormatId::kBf16, p, 2560, false, false, {1, 8, 40, 300});
  p.experts = 33;
  p.top_k = 33;
  p.groups = 33;
  p.top_groups = 7;
  check(FormatId::kF32, p, 4, false, false, counts);
  p.experts = 32;
  p.top_k = 4;
  p.groups = p.top_groups = 1;
  p.score = RouterScore::kSoftmaxSelected;
  check(FormatId::kBf16, p, 2880, false, true, counts);
}

}  // namespace

CheckSummary check_router(const CheckOptions& options, std::ostream& out) {
  return test::run_checks(options, out, [&](Checks& checks) {
    check_format(checks, options.format == "f32" ? FormatId::kF32 : FormatId::kBf16);
  });
}

}  // namespace nibble::kernels::cuda
