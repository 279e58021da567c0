// Correctness of the dense linear layer and the router on the GPU at hand; exit code 0: all passed.
//   linear_cuda_check [bf16|nvfp4|mxfp4|mxfp8|fp8_block|fp8_channel|router|quick ...]
// For every format and shape: unpack(pack(x)) is x; results within the stated bound of a double
// reference; the same bits for both kernels, every number of rows, a row alone and repeated runs.
// "quick": one small shape of each, for the sanitizers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "formats/block_format.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_case.h"
#include "kernels/cuda/router.h"

namespace nibble::kernels::cuda {
namespace {

int failures = 0, checks = 0;
void expect(bool ok, const std::string& what) {
  ++checks;
  if (ok) return;
  if (++failures <= 40) std::printf("FAILED %s\n", what.c_str());
}

/// A matrix as a checkpoint has it. Without `any`: no NaN, scales of ordinary size.
struct Planes {
  Planes(FormatId f, int64_t rows, int64_t cols, bool any, uint64_t seed)
      : format(f), out(rows), columns(cols) {
    std::mt19937_64 rng(seed);
    codes.resize(static_cast<size_t>(rows * formats::code_row_bytes(f, cols)));
    for (uint8_t& c : codes) c = static_cast<uint8_t>(rng());
    const bool e4m3 = f != FormatId::kBf16 && f != FormatId::kNvfp4 && f != FormatId::kMxfp4;
    if (f == FormatId::kBf16 && !any) {
      std::normal_distribution<float> normal;
      for (size_t i = 0; i < codes.size(); i += 2) {
        const uint16_t v = bf16_bits(normal(rng) * 0.05f);
        std::memcpy(codes.data() + i, &v, 2);
      }
    }
    if (e4m3 && !any) {
      for (uint8_t& c : codes) c = (c & 0x7F) == 0x7F ? static_cast<uint8_t>(c ^ 1) : c;
    }
    if (f == FormatId::kFp8Block) {
      const int64_t count = (rows + 127) / 128 * ((cols + 127) / 128);
      scales.resize(static_cast<size_t>(count * 4));
      for (int64_t i = 0; i < count; ++i) {
        const float s = 0.001f + 0.0001f * static_cast<float>(rng() % 100);
        std::memcpy(scales.data() + 4 * i, &s, 4);
      }
    } else if (f == FormatId::kNvfp4 || f == FormatId::kMxfp4 || f == FormatId::kMxfp8) {
      scales.resize(static_cast<size_t>(rows * (cols / group_cols(f))));
      for (uint8_t& s : scales) {
        const uint64_t v = rng();
        s = static_cast<uint8_t>(any                     ? v
                                 : f == FormatId::kNvfp4 ? (0x28 + v % 24) | (v >> 40 & 0x80)
                                                         : 112 + v % 12);
      }
    }
  }
  formats::MatrixView view() const {
    formats::MatrixView v;
    v.format = format;
    v.scale_kind = format == FormatId::kNvfp4 ? formats::ScaleKind::kE4M3
                   : format == FormatId::kMxfp4 || format == FormatId::kMxfp8
                       ? formats::ScaleKind::kE8M0
                   : format == FormatId::kBf16 ? formats::ScaleKind::kNone
                                               : formats::ScaleKind::kF32;
    v.rows = out;
    v.cols = columns;
    v.codes = reinterpret_cast<const std::byte*>(codes.data());
    v.scales = reinterpret_cast<const std::byte*>(scales.data());
    v.block_rows = v.block_cols = 128;
    return v;
  }
  FormatId format;
  int64_t out, columns;
  std::vector<uint8_t> codes, scales;
};

/// The matrix on the device, packed in two pieces where it is tall enough; unpacks and compares.
DeviceBuffer pack_checked(const Planes& p, bool must_be_clean) {
  DeviceBuffer codes(static_cast<int64_t>(p.codes.size()) + 16);
  DeviceBuffer scales(static_cast<int64_t>(p.scales.size()) + 16);
  DeviceBuffer packed(linear_packed_bytes(p.format, p.out, p.columns)), flags(4);
  upload(codes, p.codes);
  upload(scales, p.scales);
  must(cudaMemset(flags.data(), 0, 4), "memset");
  must(cudaMemset(packed.data(), 0xEE, static_cast<size_t>(packed.bytes())), "memset");
  const int64_t row_codes = formats::code_row_bytes(p.format, p.columns);
  const int64_t cut = p.out > 128 ? 128 : p.out;
  for (int64_t begin = 0; begin < p.out; begin += cut == p.out || begin > 0 ? p.out : cut) {
    LinearPiece piece{p.format, p.out, p.columns, begin, begin == 0 ? cut : p.out - cut};
    piece.codes = codes.as<uint8_t>() + begin * row_codes;
    const int64_t row_scales = p.format == FormatId::kFp8Block ? (p.columns + 127) / 128 * 4 / 128
                               : p.scales.empty()              ? 0
                                                               : p.columns / group_cols(p.format);
    piece.scales = p.scales.empty() ? nullptr
                   : p.format == FormatId::kFp8Block
                       ? scales.as<uint8_t>() + begin / 128 * ((p.columns + 127) / 128) * 4
                       : scales.as<uint8_t>() + begin * row_scales;
    must(pack_linear(piece, packed.data(), flags.as<int>(), nullptr), "pack");
  }
  must(cudaDeviceSynchronize(), "pack");
  const int found = download<int>(flags, 1)[0];
  if (must_be_clean) expect(found == 0, cat("pack flags ", found));
  must(cudaMemset(codes.data(), 0xEE, static_cast<size_t>(codes.bytes())), "memset");
  must(cudaMemset(scales.data(), 0xEE, static_cast<size_t>(scales.bytes())), "memset");
  LinearPiece whole{p.format, p.out, p.columns, 0, p.out};
  whole.codes = codes.as<uint8_t>();
  whole.scales = p.scales.empty() ? nullptr : scales.as<uint8_t>();
  must(unpack_linear(whole, packed.data(), nullptr), "unpack");
  must(cudaDeviceSynchronize(), "unpack");
  expect(download<uint8_t>(codes, static_cast<int64_t>(p.codes.size())) == p.codes &&
             download<uint8_t>(scales, static_cast<int64_t>(p.scales.size())) == p.scales,
         cat("unpack(pack) ", formats::block_format(p.format).name, " ", p.out, " x ", p.columns));
  return packed;
}

struct Variant {
  bool bias, accumulate;
  int64_t x_extra, y_extra;  // added to the strides
};

constexpr int64_t kMaxRows = 300;

class LinearCase {
 public:
  LinearCase(FormatId f, int64_t out, int64_t cols, const Variant& v)
      : planes_(f, out, cols, false, static_cast<uint64_t>(out * 7 + cols)),
        packed_(pack_checked(planes_, true)),
        variant_(v),
        x_stride_(cols + v.x_extra),
        y_stride_(out + v.y_extra),
        x_(kMaxRows * x_stride_ * 2),
        y_(kMaxRows * y_stride_ * 4),
        before_(kMaxRows * y_stride_ * 4),
        factor_(out * 4),
        bias_(out * 4),
        scratch_(linear_scratch_bytes(kMaxRows, cols)) {
    std::mt19937_64 rng(3);
    std::normal_distribution<float> normal;
    host_x_.resize(static_cast<size_t>(kMaxRows * x_stride_));
    for (auto& x : host_x_) x = bf16_bits(normal(rng));
    host_before_.resize(static_cast<size_t>(kMaxRows * y_stride_));
    for (auto& y : host_before_) y = normal(rng);
    for (int64_t r = 0; r < out; ++r) {
      host_factor_.push_back((0.5f + 0.01f * static_cast<float>(rng() % 100)) * register_unit(f) *
                             (f == FormatId::kFp8Channel ? 0.01f : 1.0f));
      host_bias_.push_back(normal(rng));
    }
    upload(x_, host_x_);
    upload(before_, host_before_);
    upload(factor_, host_factor_);
    upload(bias_, host_bias_);
    must(cudaMemset(scratch_.data(), 0xFF, static_cast<size_t>(scratch_.bytes())), "poison");
  }
  bool has_factor() const {
    return planes_.format == FormatId::kNvfp4 || planes_.format == FormatId::kFp8Channel ||
           variant_.bias;
  }
  /// y of rows [first, first + rows) without the padding of its stride, which must stay untouched.
  std::vector<float> run(int64_t first, int64_t rows, LinearPath path) {
    must(cudaMemcpy(y_.data(), before_.data(), static_cast<size_t>(y_.bytes()),
                    cudaMemcpyDeviceToDevice),
         "copy");
    LinearWeight w{planes_.format, planes_.out, planes_.columns, packed_.data()};
    if (has_factor()) w.factor = factor_.as<float>();
    if (variant_.bias) w.bias = bias_.as<float>();
    LinearArgs a;
    a.x = x_.data() + first * x_stride_ * 2;
    a.x_stride = x_stride_;
    a.rows = rows;
    a.y = y_.as<float>() + first * y_stride_;
    a.y_stride = y_stride_;
    a.accumulate = variant_.accumulate;
    must(linear(w, a, scratch_.data(), nullptr, path), "linear");
    must(cudaDeviceSynchronize(), "linear run");
    const auto all = download<float>(y_, kMaxRows * y_stride_);
    std::vector<float> result;
    bool untouched = true;
    for (int64_t r = 0; r < kMaxRows; ++r) {
      for (int64_t c = 0; c < y_stride_; ++c) {
        const auto i = static_cast<size_t>(r * y_stride_ + c);
        if (r >= first && r < first + rows && c < planes_.out) {
          result.push_back(all[i]);
        } else if (all[i] != host_before_[i]) {
          untouched = false;
        }
      }
    }
    expect(untouched, cat(name(), " wrote outside its rows, rows ", rows));
    return result;
  }
  /// Largest error over the bound.
  double worst_error(const std::vector<float>& y) const {
    std::vector<float> w(static_cast<size_t>(planes_.columns));
    double worst = 0;
    for (int64_t o = 0; o < planes_.out; ++o) {
      const auto at = static_cast<size_t>(o);
      formats::MatrixView view = planes_.view();
      std::vector<float> ones;
      if (planes_.format == FormatId::kFp8Channel) {
        ones.assign(static_cast<size_t>(planes_.out), 1.0f);
        view.scales = reinterpret_cast<const std::byte*>(ones.data());
      }
      formats::decode_rows(view, o, 1, w.data());
      const double factor =
          has_factor() ? static_cast<double>(host_factor_[at]) / register_unit(planes_.format)
                       : 1.0;
      for (int64_t r = 0; r < kMaxRows; r += r < 20 ? 1 : 37) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < planes_.columns; ++c) {
          const double p = static_cast<double>(w[static_cast<size_t>(c)]) *
                           bf16_value(host_x_[static_cast<size_t>(r * x_stride_ + c)]);
          sum += p;
          size += std::fabs(p);
        }
        sum *= factor;
        size *= std::fabs(factor);
        if (variant_.bias) {
          sum += host_bias_[at];
          size += std::fabs(host_bias_[at]);
        }
        if (variant_.accumulate) {
          const double before = host_before_[static_cast<size_t>(r * y_stride_ + o)];
          sum += before;
          size += std::fabs(before);
        }
        const double bound = (static_cast<double>(planes_.columns) / 16 + 20) * 0x1p-23 * size;
        const double error =
            std::fabs(static_cast<double>(y[static_cast<size_t>(r * planes_.out + o)]) - sum);
        const double ratio = error == 0 ? 0 : error / bound;
        if (!(ratio <= worst)) worst = ratio;
      }
    }
    return worst;
  }
  std::string name() const {
    return cat(formats::block_format(planes_.format).name, " ", planes_.out, " x ", planes_.columns,
               variant_.bias ? " bias" : "", variant_.accumulate ? " add" : "");
  }
  int64_t out() const { return planes_.out; }

 private:
  Planes planes_;
  DeviceBuffer packed_;
  Variant variant_;
  int64_t x_stride_, y_stride_;
  DeviceBuffer x_, y_, before_, factor_, bias_, scratch_;
  std::vector<uint16_t> host_x_;
  std::vector<float> host_before_, host_factor_, host_bias_;
};

void check_linear(FormatId f, int64_t out, int64_t cols, const Variant& v, bool quick) {
  LinearCase c(f, out, cols, v);
  const auto all = c.run(0, kMaxRows, LinearPath::kManyRows);
  const double worst = c.worst_error(all);
  expect(worst <= 1.0, cat("reference ", c.name(), ": ", worst, " of the bound"));
  const auto same = [&](const std::vector<float>& part, int64_t first) {
    return std::memcmp(part.data(), all.data() + first * c.out(), part.size() * 4) == 0;
  };
  std::vector<int64_t> counts = {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 65, 100, 255, 300};
  if (quick) counts = {1, 9, 70};
  for (const int64_t rows : counts) {
    const bool few = same(c.run(0, rows, LinearPath::kFewRows), 0);
    const bool many = same(c.run(0, rows, LinearPath::kManyRows), 0);
    const bool chosen = same(c.run(0, rows, LinearPath::kAuto), 0);
    expect(few, cat("few = whole ", c.name(), " rows ", rows));
    expect(many, cat("many = whole ", c.name(), " rows ", rows));
    expect(chosen, cat("auto = whole ", c.name(), " rows ", rows));
  }
  for (int64_t r = 0; r < kMaxRows; r += quick ? 150 : r < 20 ? 3 : 29) {
    expect(same(c.run(r, 1, LinearPath::kAuto), r), cat("row alone ", c.name(), " row ", r));
  }
  int different = 0;
  for (int i = 0; i < (quick ? 1 : 100); ++i) {
    different += same(c.run(0, 5, LinearPath::kFewRows), 0) ? 0 : 1;
    if (i % 4 == 0) different += same(c.run(0, 130, LinearPath::kManyRows), 0) ? 0 : 1;
  }
  expect(different == 0, cat("repeats ", c.name(), ": ", different, " differ"));
  std::printf("%-36s worst error %.3f of the bound\n", c.name().c_str(), worst);
}

void check_format(FormatId f, bool quick) {
  if (quick) {
    check_linear(f, 136, f == FormatId::kMxfp4 || f == FormatId::kMxfp8 ? 352 : 336,
                 {true, true, 8, 1}, true);
    return;
  }
  for (const int64_t out : {64, 200}) {
    for (const int64_t cols : {96, 2880}) pack_checked(Planes(f, out, cols, true, 5), false);
  }
  check_linear(f, 64, 64, {false, false, 0, 0}, false);
  check_linear(f, 328, 2048, {false, false, 0, 0}, false);
  check_linear(f, 200, 4096, {true, true, 0, 0}, false);
  check_linear(f, 100, 12288, {false, true, 16, 4}, false);
  const int64_t odd = f == FormatId::kBf16                             ? 72
                      : f == FormatId::kMxfp4 || f == FormatId::kMxfp8 ? 96
                                                                       : 80;
  check_linear(f, 17, odd, {true, false, 8, 3}, false);
  check_linear(f, 391, 1024 + odd, {true, true, 24, 1}, false);
  check_linear(f, 5000, 512 + odd, {false, false, 0, 0}, false);
}

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

void check_router(FormatId f, RouterParams p, int64_t hidden, bool with_bias, bool matrix_bias,
                  const std::vector<int64_t>& counts) {
  const int64_t rows = counts.back(), stride = hidden + 8;
  std::mt19937_64 rng(static_cast<uint64_t>(p.experts + hidden));
  std::normal_distribution<float> normal;
  std::vector<float> w(static_cast<size_t>(p.experts * hidden)),
      x(static_cast<size_t>(rows * stride));
  for (auto& v : w) v = bf16_value(bf16_bits(normal(rng) / std::sqrt(static_cast<float>(hidden))));
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
        expect(got != got, cat(name, ": NaN logit lost"));
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
  expect(worst <= 1.0, cat(name, " logits: ", worst, " of the bound"));
  expect(wrong == 0, cat(name, ": ", wrong, " ids differ"));
  expect(worst_weight < 2e-6, cat(name, " weights: relative error ", worst_weight));
  const auto same = [&](const RouterRun& part, int64_t first, bool own_logits) {
    const auto k = static_cast<size_t>(p.top_k), count = part.ids.size() / k;
    return (!own_logits || std::memcmp(part.logits.data(), all.logits.data() + first * p.experts,
                                       part.logits.size() * 4) == 0) &&
           std::memcmp(part.ids.data(), all.ids.data() + first * p.top_k, count * k * 4) == 0 &&
           std::memcmp(part.weights.data(), all.weights.data() + first * p.top_k, count * k * 4) ==
               0;
  };
  for (const int64_t count : counts) {
    expect(same(run(0, count, true), 0, true), cat(name, " rows ", count));
    expect(same(run(0, count, false), 0, false), cat(name, " rows ", count, " own scratch"));
  }
  for (int64_t r = 0; r < rows; r += r < 10 ? 1 : 23) {
    expect(same(run(r, 1, true), r, true), cat(name, " row alone ", r));
  }
  int different = 0;
  for (int i = 0; i < 100 && counts.size() > 3; ++i) {
    different += same(run(0, i % 2 == 0 ? 1 : rows, true), 0, true) ? 0 : 1;
  }
  expect(different == 0, cat(name, ": ", different, " repeats differ"));
  std::printf("%-64s worst logit error %.3f of the bound, weight error %.1e\n", name.c_str(), worst,
              worst_weight);
}

void check_routers(bool quick) {
  RouterParams p;
  p.experts = 128;
  p.top_k = 8;
  if (quick) {
    p.score = RouterScore::kSigmoid;
    p.groups = 8;
    p.top_groups = 4;
    check_router(FormatId::kBf16, p, 260, true, true, {1, 5, 40});
    return;
  }
  const std::vector<int64_t> counts = {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 100, 255, 300};
  check_router(FormatId::kBf16, p, 2048, false, false, counts);
  p.score = RouterScore::kSigmoid;
  p.scaling = 2.5f;
  check_router(FormatId::kF32, p, 2048, true, false, counts);
  check_router(FormatId::kBf16, p, 4096, true, false, counts);
  p.experts = 160;
  check_router(FormatId::kF32, p, 5120, true, false, {1, 4, 33});
  p.experts = 256;
  p.groups = 8;
  p.top_groups = 4;
  check_router(FormatId::kBf16, p, 1028, true, false, counts);
  p.experts = 512;
  p.top_k = 64;
  p.groups = 64;
  p.top_groups = 5;  // 40 experts: the rest from dropped groups
  p.normalize = false;
  check_router(FormatId::kF32, p, 96, true, true, counts);
  p = RouterParams();
  p.experts = 1024;
  p.top_k = 10;
  check_router(FormatId::kBf16, p, 2560, false, false, {1, 8, 40, 300});
  p.experts = 33;
  p.top_k = 33;
  p.groups = 33;
  p.top_groups = 7;
  check_router(FormatId::kF32, p, 4, false, false, counts);
  p.experts = 32;
  p.top_k = 4;
  p.groups = p.top_groups = 1;
  p.score = RouterScore::kSoftmaxSelected;
  check_router(FormatId::kBf16, p, 2880, false, true, counts);
}

int run(int argc, char** argv) {
  std::vector<std::string> wanted(argv + 1, argv + argc);
  const bool quick = std::find(wanted.begin(), wanted.end(), "quick") != wanted.end();
  std::erase(wanted, "quick");
  if (wanted.empty()) {
    wanted = {"bf16", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_channel", "router"};
  }
  const std::pair<const char*, FormatId> formats[] = {
      {"bf16", FormatId::kBf16},          {"nvfp4", FormatId::kNvfp4},
      {"mxfp4", FormatId::kMxfp4},        {"mxfp8", FormatId::kMxfp8},
      {"fp8_block", FormatId::kFp8Block}, {"fp8_channel", FormatId::kFp8Channel}};
  for (const std::string& w : wanted) {
    if (w == "router") check_routers(quick);
    for (const auto& [name, format] : formats) {
      if (w == name) check_format(format, quick);
    }
  }
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main(int argc, char** argv) { return nibble::kernels::cuda::run(argc, argv); }
