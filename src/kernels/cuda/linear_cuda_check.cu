// The dense linear layer: for every format and shape unpack(pack(x)) is x; results within the
// stated bound of a double reference; the same bits for both kernels, every number of rows, a row
// alone and repeated runs.
#include <algorithm>
#include <cmath>
#include <random>

#include "formats/block_format.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_case.h"

namespace nibble::kernels::cuda {
namespace {

using test::Checks;

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
DeviceBuffer pack_checked(Checks& checks, const Planes& p, bool must_be_clean) {
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
  if (must_be_clean) checks.expect(found == 0, cat("pack flags ", found));
  must(cudaMemset(codes.data(), 0xEE, static_cast<size_t>(codes.bytes())), "memset");
  must(cudaMemset(scales.data(), 0xEE, static_cast<size_t>(scales.bytes())), "memset");
  LinearPiece whole{p.format, p.out, p.columns, 0, p.out};
  whole.codes = codes.as<uint8_t>();
  whole.scales = p.scales.empty() ? nullptr : scales.as<uint8_t>();
  must(unpack_linear(whole, packed.data(), nullptr), "unpack");
  must(cudaDeviceSynchronize(), "unpack");
  checks.expect(
      download<uint8_t>(codes, static_cast<int64_t>(p.codes.size())) == p.codes &&
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
  LinearCase(Checks& checks, FormatId f, int64_t out, int64_t cols, const Variant& v)
      : checks_(checks),
        planes_(f, out, cols, false, static_cast<uint64_t>(out * 7 + cols)),
        packed_(pack_checked(checks, planes_, true)),
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
    checks_.expect(untouched, cat(name(), " wrote outside its rows, rows ", rows));
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
                           bf16_to_float(host_x_[static_cast<size_t>(r * x_stride_ + c)]);
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
  Checks& checks_;
  Planes planes_;
  DeviceBuffer packed_;
  Variant variant_;
  int64_t x_stride_, y_stride_;
  DeviceBuffer x_, y_, before_, factor_, bias_, scratch_;
  std::vector<uint16_t> host_x_;
  std::vector<float> host_before_, host_factor_, host_bias_;
};

void check_matrix(Checks& checks, FormatId f, int64_t out, int64_t cols, const Variant& v) {
  const bool quick = checks.quick();
  LinearCase c(checks, f, out, cols, v);
  const auto all = c.run(0, kMaxRows, LinearPath::kManyRows);
  const double worst = c.worst_error(all);
  checks.within(worst, 1.0, cat("reference ", c.name(), ", share of the bound"));
  const auto same = [&](const std::vector<float>& part, int64_t first) {
    return std::memcmp(part.data(), all.data() + first * c.out(), part.size() * 4) == 0;
  };
  std::vector<int64_t> counts = {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 65, 100, 256, 300};
  if (quick) counts = {1, 9, 70};
  for (const int64_t rows : counts) {
    const bool few = same(c.run(0, rows, LinearPath::kFewRows), 0);
    const bool many = same(c.run(0, rows, LinearPath::kManyRows), 0);
    const bool held = same(c.run(0, rows, LinearPath::kHeld), 0);
    const bool chosen = same(c.run(0, rows, LinearPath::kAuto), 0);
    checks.expect(few, cat("few = whole ", c.name(), " rows ", rows));
    checks.expect(many, cat("many = whole ", c.name(), " rows ", rows));
    checks.expect(held, cat("held = whole ", c.name(), " rows ", rows));
    checks.expect(chosen, cat("auto = whole ", c.name(), " rows ", rows));
  }
  for (int64_t r = 0; r < kMaxRows; r += quick ? 150 : r < 20 ? 3 : 29) {
    checks.expect(same(c.run(r, 1, LinearPath::kAuto), r), cat("row alone ", c.name(), " row ", r));
  }
  int different = 0;
  for (int i = 0; i < (quick ? 1 : checks.full() ? 100 : 10); ++i) {
    different += same(c.run(0, 5, LinearPath::kFewRows), 0) ? 0 : 1;
    different += same(c.run(0, 11, LinearPath::kHeld), 0) ? 0 : 1;
    if (i % 4 == 0) different += same(c.run(0, 130, LinearPath::kManyRows), 0) ? 0 : 1;
  }
  checks.expect(different == 0, cat("repeats ", c.name(), ": ", different, " differ"));
  checks.line(cat("linear ", c.name(), ": worst error ", worst, " of the bound"));
}

void check_format(Checks& checks, FormatId f) {
  if (checks.quick()) {
    check_matrix(checks, f, 136, f == FormatId::kMxfp4 || f == FormatId::kMxfp8 ? 352 : 336,
                 {true, true, 8, 1});
    return;
  }
  for (const int64_t out : {64, 200}) {
    for (const int64_t cols : {96, 2880})
      pack_checked(checks, Planes(f, out, cols, true, 5), false);
  }
  check_matrix(checks, f, 328, 2048, {false, false, 0, 0});
  if (!checks.full()) {
    check_matrix(checks, f, 200, 2880, {true, true, 0, 0});
    return;
  }
  check_matrix(checks, f, 64, 64, {false, false, 0, 0});
  check_matrix(checks, f, 200, 4096, {true, true, 0, 0});
  check_matrix(checks, f, 100, 12288, {false, true, 16, 4});
  const int64_t odd = f == FormatId::kBf16                             ? 72
                      : f == FormatId::kMxfp4 || f == FormatId::kMxfp8 ? 96
                                                                       : 80;
  check_matrix(checks, f, 17, odd, {true, false, 8, 3});
  check_matrix(checks, f, 391, 1024 + odd, {true, true, 24, 1});
  check_matrix(checks, f, 5000, 512 + odd, {false, false, 0, 0});
}

}  // namespace

CheckSummary check_linear(const CheckOptions& options, std::ostream& out) {
  return test::run_checks(options, out, [&](Checks& checks) {
    for (const FormatId f : {FormatId::kBf16, FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8,
                             FormatId::kFp8Block, FormatId::kFp8Channel}) {
      if (formats::block_format(f).name == options.format) check_format(checks, f);
    }
  });
}

}  // namespace nibble::kernels::cuda
