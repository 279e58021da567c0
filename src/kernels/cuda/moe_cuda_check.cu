// The MoE layer: for every format and shape unpack(pack(x)) is x; results against the double
// reference; equal bits for all geometries, for every token alone, for compressed scales and over
// repeated runs.
#include <cstring>
#include <memory>
#include <random>

#include "kernels/cuda/moe_case.h"

namespace nibble::kernels::cuda {
namespace {

using test::Checks;

MoeShape shape_of(const char* text) { return must(parse_shape(text), "shape"); }
LayerFormats formats_of(std::string_view text) {
  return must(parse_formats(std::string(text)), "formats");
}

std::string name_of(const MoeShape& s, const LayerFormats& f) {
  const std::string up(formats::block_format(f.gate_up).name);
  const std::string down(formats::block_format(f.down).name);
  return cat(up == down ? up : cat(up, "+", down), " E", s.experts, " H", s.hidden, " I", s.inter,
             " k", s.top_k);
}

/// Random checkpoint planes -> pack -> unpack: the same bytes, negative scales included.
void check_packing(Checks& checks, const MoeShape& s, FormatId f) {
  for (const Product product : {Product::kGateUp, Product::kDown}) {
    const bool down = product == Product::kDown;
    const int64_t rows = down ? s.hidden : s.inter, cols = down ? s.inter : s.hidden;
    const int64_t code_bytes = s.experts * rows * formats::code_row_bytes(f, cols);
    const int64_t scale_bytes = f == FormatId::kBf16 ? 0
                                : f == FormatId::kFp8Block
                                    ? s.experts * ((rows + 127) / 128) * ((cols + 127) / 128) * 4
                                    : s.experts * rows * (cols / group_cols(f));
    const int64_t total = (2 * (code_bytes + scale_bytes) + 7) / 8 * 8;
    DeviceBuffer before(total), after(total), flags(4);
    DeviceBuffer packed(s.experts * packed_bytes(f, product, s.hidden, s.inter));
    fill_random(before.as<uint8_t>(), total, 77);
    must(cudaMemset(after.data(), 0xEE, static_cast<size_t>(total)), "memset");
    must(cudaMemset(flags.data(), 0, 4), "memset");
    auto planes = [&](const DeviceBuffer& b, int64_t i) {
      return RowPlanes{b.as<uint8_t>() + i * code_bytes,
                       b.as<uint8_t>() + 2 * code_bytes + i * scale_bytes};
    };
    PackArgs args{f,       product,           s.experts,         s.hidden,
                  s.inter, planes(before, 0), planes(before, 1), packed.as<uint8_t>()};
    must(launch_pack(args, flags.as<int>(), nullptr), "pack");
    args.first = planes(after, 0);
    args.second = planes(after, 1);
    must(launch_unpack(args, nullptr), "unpack");
    std::vector<uint8_t> a(static_cast<size_t>(total)), b(static_cast<size_t>(total));
    must(cudaMemcpy(a.data(), before.data(), a.size(), cudaMemcpyDeviceToHost), "download");
    must(cudaMemcpy(b.data(), after.data(), b.size(), cudaMemcpyDeviceToHost), "download");
    const auto half = static_cast<size_t>(down ? code_bytes : 2 * code_bytes);
    const auto scales = static_cast<size_t>(down ? scale_bytes : 2 * scale_bytes);
    const auto at = static_cast<size_t>(2 * code_bytes);
    checks.expect(std::memcmp(a.data(), b.data(), half) == 0 &&
                      std::memcmp(a.data() + at, b.data() + at, scales) == 0,
                  cat("unpack(pack) ", name_of(s, {f, f}), down ? " down" : " gate_up"));
  }
}

struct Runner {
  Runner(const MoeShape& s, int64_t max_tokens)
      : shape(s), workspace(moe_workspace_bytes(s, max_tokens)), y(max_tokens * s.hidden * 4) {
    must(cudaMemset(workspace.data(), 0xFF, static_cast<size_t>(workspace.bytes())), "poison");
    must(cudaMemset(workspace.data(), 0, kMoeZeroedBytes), "zero");
  }
  std::vector<float> run(const MoeGroups& weights, MoeArgs args, Geometry geometry) {
    const auto bytes = static_cast<size_t>(args.tokens * shape.hidden * 4);
    args.y = y.as<float>();
    must(cudaMemset(y.data(), 0xFF, bytes), "poison");
    must(moe_layer(shape, weights, args, workspace.data(), nullptr, geometry), "moe_layer");
    must(cudaDeviceSynchronize(), "moe_layer run");
    return download_floats(y, args.tokens * shape.hidden);
  }
  MoeShape shape;
  DeviceBuffer workspace, y;
};

bool same(const std::vector<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * 4) == 0;
}
MoeArgs token_of(const MoeShape& s, const LayerInput& input, DeviceBuffer& y, int64_t t) {
  MoeArgs one = input.args(y);
  one.x = static_cast<const uint8_t*>(one.x) + t * s.hidden * 2;
  if (one.ids != nullptr) {
    one.ids += t * s.top_k;
    one.weights += t * s.top_k;
  }
  one.tokens = 1;
  return one;
}

/// Experts 0, 2, 4, ... of one layer and 1, 3, 5, ... of another as two groups.
struct TwoGroups {
  TwoGroups(const LayerWeights& even, const LayerWeights& odd) {
    const int64_t half = even.shape.experts;
    std::vector<int32_t> host;
    for (int64_t e = 0; e < 2 * half; ++e) {
      host.push_back(static_cast<int32_t>(e % 2 == 0 ? e / 2 : half + e / 2));
    }
    rank = std::make_unique<DeviceBuffer>(2 * half * 4);
    must(cudaMemcpy(rank->data(), host.data(), host.size() * 4, cudaMemcpyHostToDevice), "rank");
    weights[0] = even.view();
    weights[1] = odd.view();
  }
  MoeGroups view() const { return {weights, rank->as<int32_t>()}; }
  MoeWeights weights[2];
  std::unique_ptr<DeviceBuffer> rank;
};

constexpr double kBound = 6e-3;

void check_layer(Checks& checks, const MoeShape& s, const LayerFormats& f,
                 std::vector<int64_t> token_counts) {
  const bool small = checks.quick();
  if (small) token_counts = {token_counts.front(), 9};
  const LayerWeights layer(s, f, 5);
  const MoeWeights view = layer.view();
  const MoeGroups weights{{&view, 1}, nullptr};
  const bool csf = has_csf(f.gate_up) && has_csf(f.down);
  std::unique_ptr<LayerWeights> csf_layer;
  if (csf) {
    LayerFormats compressed = f;
    compressed.scales = ScaleForm::kCsf;
    csf_layer = std::make_unique<LayerWeights>(s, compressed, 5);
  }
  Runner runner(s, std::max(token_counts.back(), token_counts.front()));
  const std::string name = name_of(s, f);
  double worst = 0;
  for (const int64_t tokens : token_counts) {
    const LayerInput input(s, tokens, static_cast<uint64_t>(tokens));
    const MoeArgs args = input.args(runner.y);
    const auto narrow = runner.run(weights, args, Geometry::kNarrow);
    checks.expect(same(narrow, runner.run(weights, args, Geometry::kWide).data()),
                  cat("narrow = wide ", name, " M", tokens));
    const bool alike = f.gate_up == f.down;
    for (const Geometry g : {Geometry::kAuto, Geometry::kSmall, Geometry::kSlices}) {
      if (g == Geometry::kSlices && (!alike || tokens > 40)) continue;
      checks.expect(same(narrow, runner.run(weights, args, g).data()),
                    cat("narrow = geometry ", static_cast<int>(g), " ", name, " M", tokens));
    }
    if (csf) {
      const MoeWeights packed = csf_layer->view();
      for (const Geometry g : {Geometry::kAuto, Geometry::kSlices, Geometry::kSmall,
                               Geometry::kNarrow, Geometry::kWide}) {
        if (g == Geometry::kSlices && (!alike || tokens > 40)) continue;
        checks.expect(same(narrow, runner.run({{&packed, 1}, nullptr}, args, g).data()),
                      cat("CSF = plain ", name, " M", tokens, " geometry ", static_cast<int>(g)));
      }
    }
    for (const int64_t t : {int64_t{0}, tokens / 2, tokens - 1}) {
      const double error =
          relative_error(narrow.data() + t * s.hidden, reference_token(layer, input, t));
      worst = error > worst || error != error ? error : worst;
      checks.within(error, kBound,
                    cat("reference ", name, " M", tokens, " token ", t, ", relative error"));
      if (small) break;
    }
    // A token alone: the same bits.
    for (int64_t t = 0; t < tokens; t += tokens < 20 && !small ? 1 : 13) {
      const auto alone = runner.run(weights, token_of(s, input, runner.y, t), Geometry::kAuto);
      checks.expect(same(alone, narrow.data() + t * s.hidden),
                    cat("alone = batch ", name, " M", tokens, " token ", t));
    }
    // Something added last, also in place.
    DeviceBuffer add(tokens * s.hidden * 4);
    std::vector<float> host(narrow.size());
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<float>(i % 37) * 0.25f - 4.0f;
    for (const Geometry g : {Geometry::kAuto, Geometry::kWide}) {
      must(cudaMemcpy(add.data(), host.data(), host.size() * 4, cudaMemcpyHostToDevice), "add");
      MoeArgs in_place = args;
      in_place.add = in_place.y = add.as<float>();
      must(moe_layer(s, weights, in_place, runner.workspace.data(), nullptr, g), "in place");
      must(cudaDeviceSynchronize(), "in place");
      const auto sum = download_floats(add, tokens * s.hidden);
      bool equal = true;
      for (size_t i = 0; i < sum.size(); ++i) equal = equal && sum[i] == narrow[i] + host[i];
      checks.expect(equal, cat("y + add ", name, " M", tokens));
    }
  }
  for (const int64_t tokens : {token_counts.front(), token_counts.back()}) {
    const LayerInput input(s, tokens, 99);
    const MoeArgs args = input.args(runner.y);
    const auto first = runner.run(weights, args, Geometry::kAuto);
    const int repeats = small ? 2 : checks.full() ? 100 : 10;
    int different = 0;
    for (int i = 0; i < repeats; ++i) {
      different += same(first, runner.run(weights, args, Geometry::kAuto).data()) ? 0 : 1;
    }
    checks.expect(different == 0,
                  cat(repeats, " repeats ", name, " M", tokens, ": ", different, " differ"));
  }
  checks.line(cat("moe ", name, ": worst relative error ", worst));
}

/// Two groups of different formats against one launch of each alone: per-slot sums do not change.
void check_groups(Checks& checks, const MoeShape& half, const char* even_format,
                  const char* odd_format) {
  MoeShape s = half;
  s.experts *= 2;
  const LayerWeights even(half, formats_of(even_format), 5), odd(half, formats_of(odd_format), 6);
  const TwoGroups groups(even, odd);
  for (const int64_t tokens : {1, 5, 33, 200}) {
    LayerInput input(s, tokens, static_cast<uint64_t>(tokens) + 7);
    Runner runner(s, tokens);
    const auto narrow = runner.run(groups.view(), input.args(runner.y), Geometry::kNarrow);
    checks.expect(
        same(narrow, runner.run(groups.view(), input.args(runner.y), Geometry::kWide).data()),
        cat("groups narrow = wide M", tokens));
    // Token 0 by the reference: each group's experts alone, the others' weights zero.
    std::vector<double> sum(static_cast<size_t>(s.hidden), 0.0);
    for (int g = 0; g < 2; ++g) {
      LayerInput part(s, tokens, static_cast<uint64_t>(tokens) + 7);
      for (size_t k = 0; k < static_cast<size_t>(s.top_k); ++k) {
        const int32_t id = part.host_ids[k];
        if (id % 2 != g) part.host_weights[k] = 0.0f;
        part.host_ids[k] = id / 2;
      }
      const auto y = reference_token(g == 0 ? even : odd, part, 0);
      for (size_t i = 0; i < y.size(); ++i) sum[i] += y[i];
    }
    const double error = relative_error(narrow.data(), sum);
    checks.within(error, kBound, cat("groups reference M", tokens, ", relative error"));
    checks.line(cat("groups ", even_format, " and ", odd_format, " M", tokens, ": error ", error));
  }
}

void check_format(Checks& checks, std::string_view format) {
  const bool small = checks.quick();
  const LayerFormats f = formats_of(format);
  const bool big = format == "nvfp4" || format == "mxfp4";
  if (f.gate_up == f.down) {
    for (const char* shape : {"16,256,128,4", "8,320,96,3", "5,2880,2880,4"}) {
      if (!small || shape[0] != '5') check_packing(checks, shape_of(shape), f.gate_up);
    }
  }
  if (has_csf(f.gate_up)) {
    LayerFormats spiky = f;
    spiky.spiky = true;
    check_layer(checks, shape_of("8,320,192,3"), spiky, {1, 2, 9, 33});
  }
  if (small) {
    check_layer(checks, shape_of("8,320,96,3"), f, {1, 9});
    check_layer(checks, shape_of("1,512,256,1"), f, {1, 9});
    return;
  }
  if (!checks.full()) {
    check_layer(checks, shape_of("16,256,128,4"), f, {1, 2, 3, 7, 8, 9, 17, 33, 64, 129, 256});
    check_layer(checks, shape_of("1,512,256,1"), f, {1, 4, 9, 17, 256});  // dense
    check_layer(checks, shape_of("16,2048,768,8"), f, {1, 2, 4, 256});
    return;
  }
  check_layer(checks, shape_of("16,256,128,4"), f, {1, 2, 3, 7, 8, 9, 17, 33, 64, 129, 300});
  check_layer(checks, shape_of("8,320,96,3"), f, {1, 5, 31, 300});
  check_layer(checks, shape_of("1,512,256,1"), f, {1, 4, 8, 9, 16, 17, 300});  // dense
  MoeShape clamped = shape_of("16,256,192,4");
  clamped.activation = Activation::kSiluLimit;
  clamped.limit = 0.8f;
  check_layer(checks, clamped, f, {1, 20, 300});
  clamped.activation = Activation::kGptOss;  // with biases
  clamped.alpha = 1.702f;
  check_layer(checks, clamped, f, {1, 20, 300});
  if (big) {
    check_layer(checks, shape_of("16,4096,2048,8"), f, {1, 3, 7, 64, 300});
    check_layer(checks, shape_of("16,2560,640,10"), f, {1, 3, 7, 300});
    check_layer(checks, shape_of("16,6144,256,8"), f, {1, 7, 300});
    check_layer(checks, shape_of("16,2880,2880,4"), f, {1, 7, 300});
    check_layer(checks, shape_of("32,2048,768,8"), f, {1, 2, 4, 300});
  } else {
    check_layer(checks, shape_of("16,2048,768,8"), f, {1, 4, 300});
  }
}

/// Gate and up of one format, down of another.
void check_mixed(Checks& checks) {
  const int64_t most = checks.full() ? 300 : 256;
  check_layer(checks, shape_of("16,256,128,4"), formats_of("nvfp4+mxfp8"), {1, 9, most});
  check_layer(checks, shape_of("16,512,256,4"), formats_of("mxfp4+bf16"), {1, 9, most});
  check_layer(checks, shape_of("16,512,256,4"), formats_of("nf3+fp8_block"), {1, 9, most});
}

}  // namespace

CheckSummary check_moe(const CheckOptions& options, std::ostream& out) {
  return test::run_checks(options, out, [&](Checks& checks) {
    if (options.format == "mixed") {
      check_mixed(checks);
    } else if (options.format == "groups") {
      check_groups(checks, shape_of("8,512,256,4"), "nvfp4", "mxfp8");
      check_groups(checks, shape_of("8,512,256,4"), "nf3+nvfp4", "fp8_block");
    } else {
      check_format(checks, options.format);
    }
  });
}

}  // namespace nibble::kernels::cuda
