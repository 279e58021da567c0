// norm_linear against add_rms_norm and linear: y, the sum and everything around them, bit for bit;
// whether it was one kernel; repeats, and chains in which a step's y is the next one's delta.
#include <algorithm>
#include <utility>

#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_case.h"

namespace nibble::kernels::cuda {
namespace {

using test::Checks;

struct Shape {
  int64_t out, hidden;
  bool extras;      // factor, bias, y before and a stride of y
  bool one_kernel;  // on Hopper and Blackwell
};
constexpr int64_t kMaxRows = 3;

class NormLinearCase {
 public:
  NormLinearCase(Checks& checks, const Shape& shape)
      : checks_(checks),
        shape_(shape),
        y_stride_(shape.out + (shape.extras ? 3 : 0)),
        random_(static_cast<uint64_t>(shape.out * 5 + shape.hidden)),
        packed_(linear_packed_bytes(FormatId::kBf16, shape.out, shape.hidden)),
        factor_(random_.normals(shape.out)),
        bias_(random_.normals(shape.out)),
        norm_weight_(random_.normals(shape.hidden)),
        host_residual_(random_.normals(kMaxRows * shape.hidden)),
        host_y_(random_.normals(kMaxRows * y_stride_)),
        delta_(random_.normals(kMaxRows * shape.hidden)),
        residual_(kMaxRows * shape.hidden),
        sum_(kMaxRows * shape.hidden),
        y_(kMaxRows * y_stride_),
        other_y_(kMaxRows * y_stride_),
        normed_(kMaxRows * shape.hidden),
        scratch_(linear_scratch_bytes(kMaxRows, shape.hidden)) {
    std::vector<uint16_t> codes(static_cast<size_t>(shape.out * shape.hidden));
    for (uint16_t& c : codes) c = bf16_bits(0.05f * random_.normal());
    const test::Device<uint16_t> rows(codes);
    const test::Device<int> flags(std::vector<int>{0});
    LinearPiece piece{FormatId::kBf16, shape.out, shape.hidden, 0, shape.out};
    piece.codes = reinterpret_cast<uint8_t*>(rows.get());
    must(pack_linear(piece, packed_.data(), flags.get(), nullptr), "pack");
    must(cudaDeviceSynchronize(), "pack");
    int device = 0, major = 0;
    must(cudaGetDevice(&device), "device");
    must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
    holds_ = major == 9 || major == 10;
  }

  struct Outcome {
    std::vector<float> y, sum;
    bool operator==(const Outcome& o) const { return same(y, o.y) && same(sum, o.sum); }
    static bool same(const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    }
  };

  Outcome two_calls(int64_t rows, bool with_delta) {
    start();
    const AddRmsNormArgs norm = norm_args(rows, with_delta, nullptr);
    must(add_rms_norm(norm, nullptr), "add_rms_norm");
    must(linear(weight(), linear_args(rows), scratch_.data(), nullptr, LinearPath::kFewRows),
         "linear");
    return {y_.download(), first_rows(residual_, rows)};
  }

  /// apart: with a residual_out.
  Outcome together(int64_t rows, bool with_delta, bool apart) {
    start();
    const AddRmsNormArgs norm = norm_args(rows, with_delta, apart ? sum_.get() : nullptr);
    must(norm_linear(norm, weight(), linear_args(rows), scratch_.data(), nullptr), "norm_linear");
    const bool one =
        holds_ && shape_.one_kernel && rows <= kNormLinearRows && (apart || !with_delta);
    const std::vector<uint16_t> untouched(static_cast<size_t>(kMaxRows * shape_.hidden), 0xFFFF);
    checks_.expect((normed_.download() == untouched) == one,
                   cat(name(), " rows ", rows, ": one kernel where that can be, else two"));
    const int64_t written = apart ? rows : 0;
    const std::vector<float> sum = sum_.download();
    checks_.expect(std::all_of(sum.begin() + written * shape_.hidden, sum.end(),
                               [](float v) { return v != v; }),
                   cat(name(), " rows ", rows, ": sums of other rows"));
    if (apart) {
      checks_.expect(Outcome::same(residual_.download(), host_residual_),
                     cat(name(), " rows ", rows, ": the residual is left as it was"));
    }
    return {y_.download(), first_rows(apart ? sum_ : residual_, rows)};
  }

  /// Steps queued one after another, of one kernel each where that can be; y is the next delta.
  Outcome chain(int64_t rows, int steps, bool one_call) {
    start();
    AddRmsNormArgs norm = norm_args(rows, true, sum_.get());
    LinearArgs product = linear_args(rows);
    float* next_y = other_y_.get();
    for (int i = 0; i < steps; ++i) {
      if (one_call) {
        must(norm_linear(norm, weight(), product, scratch_.data(), nullptr), "norm_linear");
      } else {
        must(add_rms_norm(norm, nullptr), "add_rms_norm");
        must(linear(weight(), product, scratch_.data(), nullptr), "linear");
      }
      std::swap(norm.residual, norm.residual_out);
      norm.delta = product.y;
      std::swap(product.y, next_y);
    }
    return {first_rows(steps % 2 == 0 ? other_y_ : y_, rows),
            first_rows(steps % 2 == 0 ? residual_ : sum_, rows)};
  }
  std::string name() const {
    return cat("norm_linear ", shape_.out, " x ", shape_.hidden, shape_.extras ? " extras" : "");
  }

 private:
  void start() {
    residual_.upload(host_residual_);
    y_.upload(host_y_);
    sum_.fill(0xFF);
    normed_.fill(0xFF);
  }
  LinearWeight weight() const {
    LinearWeight w{FormatId::kBf16, shape_.out, shape_.hidden, packed_.data()};
    if (shape_.extras) {
      w.factor = factor_.get();
      w.bias = bias_.get();
    }
    return w;
  }
  AddRmsNormArgs norm_args(int64_t rows, bool with_delta, float* residual_out) const {
    AddRmsNormArgs a;
    a.residual = residual_.get();
    a.delta = with_delta ? delta_.get() : nullptr;
    a.residual_out = residual_out;
    a.rows = rows;
    a.hidden = shape_.hidden;
    a.weight = norm_weight_.get();
    a.normed = normed_.get();
    return a;
  }
  LinearArgs linear_args(int64_t rows) const {
    LinearArgs a;
    a.x = normed_.get();
    a.rows = rows;
    a.y = y_.get();
    a.y_stride = y_stride_;
    a.accumulate = shape_.extras;
    return a;
  }
  /// The first `rows` of kMaxRows rows.
  static std::vector<float> first_rows(const test::Device<float>& from, int64_t rows) {
    std::vector<float> v = from.download();
    v.resize(static_cast<size_t>(from.count() / kMaxRows * rows));
    return v;
  }

  Checks& checks_;
  Shape shape_;
  int64_t y_stride_;
  bool holds_ = false;
  test::Random random_;
  DeviceBuffer packed_;
  test::Device<float> factor_, bias_, norm_weight_;
  std::vector<float> host_residual_, host_y_;
  test::Device<float> delta_, residual_, sum_, y_, other_y_;
  test::Device<uint16_t> normed_;
  DeviceBuffer scratch_;
};

void check_shape(Checks& checks, const Shape& shape) {
  NormLinearCase c(checks, shape);
  for (int64_t rows = 1; rows <= kMaxRows; ++rows) {
    for (const bool with_delta : {true, false}) {
      const auto want = c.two_calls(rows, with_delta);
      for (const bool apart : {true, false}) {
        checks.expect(c.together(rows, with_delta, apart) == want,
                      cat(c.name(), " rows ", rows, with_delta ? " delta" : "",
                          apart ? " apart" : " in place"));
      }
      int different = 0;
      for (int i = 0; i < (checks.quick() ? 2 : 20); ++i) {
        different += c.together(rows, with_delta, true) == want ? 0 : 1;
      }
      checks.expect(different == 0, cat(c.name(), " rows ", rows, ": ", different, " differ"));
    }
  }
  checks.line(c.name());
}

void check_chain(Checks& checks, int64_t hidden) {
  NormLinearCase c(checks, {hidden, hidden, false, true});
  for (int64_t rows = 1; rows <= kMaxRows; ++rows) {
    for (const int steps : {2, 9, 48}) {
      const auto want = c.chain(rows, steps, false);
      for (int i = 0; i < (checks.quick() ? 1 : 5); ++i) {
        checks.expect(c.chain(rows, steps, true) == want,
                      cat(c.name(), " rows ", rows, ", a chain of ", steps));
      }
    }
  }
}

}  // namespace

CheckSummary check_norm_linear(const CheckOptions& options, std::ostream& out) {
  return test::run_checks(options, out, [](Checks& checks) {
    // The norm kernel has one warp; up to 16, of which a warp plays two; 16 with two float4 a
    // thread. Then shapes that one kernel cannot take.
    constexpr Shape kShapes[] = {
        {40, 64, false, true},     {17, 72, true, true},    {200, 320, true, true},
        {1000, 1024, false, true}, {100, 1800, true, true}, {5120, 2048, false, true},
        {391, 2048, true, true},   {120, 2304, true, true}, {500, 2880, false, true},
        {1500, 4096, false, true}, {200, 4096, true, true}, {6000, 4096, false, false},
        {100, 4104, false, false},
    };
    for (const Shape& shape : kShapes) {
      if (!checks.quick() || shape.out <= 200) check_shape(checks, shape);
    }
    check_chain(checks, 320);
    if (!checks.quick()) check_chain(checks, 2048);
  });
}

}  // namespace nibble::kernels::cuda
