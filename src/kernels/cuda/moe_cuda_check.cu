// Correctness of the MoE layer on the GPU at hand; exit code 0 means all checks passed.
//   moe_cuda_check [nvfp4|mxfp4|mxfp8|bf16 ...]
// For every format and shape: unpack(pack(x)) is x; results against the double reference; equal
// bits for both geometries, for every token alone, and over repeated runs.
#include <cstdio>
#include <cstring>
#include <random>

#include "kernels/cuda/moe_case.h"

namespace nibble::kernels::cuda {
namespace {

int failures = 0;
int checks = 0;
void expect(bool ok, const std::string& what) {
  ++checks;
  if (ok) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

std::string name_of(const MoeShape& s) {
  return cat(formats::block_format(s.format).name, " E", s.experts, " H", s.hidden, " I", s.inter,
             " k", s.top_k);
}

/// Random checkpoint planes -> pack -> unpack: the same bytes, negative scales included.
void check_packing(const MoeShape& s) {
  for (const Product product : {Product::kGateUp, Product::kDown}) {
    const bool down = product == Product::kDown;
    const int64_t rows = down ? s.hidden : s.inter, cols = down ? s.inter : s.hidden;
    const int64_t code_bytes = s.experts * rows *
                               (s.format == FormatId::kBf16    ? cols * 2
                                : s.format == FormatId::kMxfp8 ? cols
                                                               : cols / 2);
    const int64_t scale_bytes =
        s.format == FormatId::kBf16 ? 0 : s.experts * rows * (cols / group_cols(s.format));
    const int64_t total = (2 * (code_bytes + scale_bytes) + 7) / 8 * 8;
    DeviceBuffer before(total), after(total), flags(4);
    DeviceBuffer packed(s.experts * packed_bytes(s.format, product, s.hidden, s.inter));
    fill_random(before.as<uint8_t>(), total, 77);
    must(cudaMemset(after.data(), 0xEE, static_cast<size_t>(total)), "memset");
    must(cudaMemset(flags.data(), 0, 4), "memset");
    auto planes = [&](const DeviceBuffer& b, int64_t i) {
      return RowPlanes{b.as<uint8_t>() + i * code_bytes,
                       b.as<uint8_t>() + 2 * code_bytes + i * scale_bytes};
    };
    PackArgs args{s.format, product,           s.experts,         s.hidden,
                  s.inter,  planes(before, 0), planes(before, 1), packed.as<uint8_t>()};
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
    expect(std::memcmp(a.data(), b.data(), half) == 0 &&
               std::memcmp(a.data() + at, b.data() + at, scales) == 0,
           cat("unpack(pack) ", name_of(s), down ? " down" : " gate_up"));
  }
}

struct Runner {
  explicit Runner(const LayerWeights& l, int64_t max_tokens)
      : layer(l),
        workspace(moe_workspace_bytes(l.shape, max_tokens)),
        y(max_tokens * l.shape.hidden * 2) {
    must(cudaMemset(workspace.data(), 0xFF, static_cast<size_t>(workspace.bytes())), "poison");
  }
  std::vector<uint16_t> run(const LayerInput& input, Geometry geometry) {
    must(cudaMemset(y.data(), 0xFF, static_cast<size_t>(input.tokens * layer.shape.hidden * 2)),
         "poison");
    must(moe_layer(layer.shape, layer.view(), input.args(y), workspace.data(), nullptr, geometry),
         "moe_layer");
    must(cudaDeviceSynchronize(), "moe_layer run");
    return download_bf16(y, input.tokens * layer.shape.hidden);
  }
  const LayerWeights& layer;
  DeviceBuffer workspace, y;
};

void check_layer(const MoeShape& s, const std::vector<int64_t>& token_counts, double bound) {
  const LayerWeights layer(s, 5);
  Runner runner(layer, token_counts.back());
  double worst = 0;
  for (const int64_t tokens : token_counts) {
    const LayerInput input(s, tokens, static_cast<uint64_t>(tokens));
    const auto narrow = runner.run(input, Geometry::kNarrow);
    const auto wide = runner.run(input, Geometry::kWide);
    expect(narrow == wide, cat("narrow = wide ", name_of(s), " M", tokens));
    for (const int64_t t : {int64_t{0}, tokens / 2, tokens - 1}) {
      const double error =
          relative_error(narrow.data() + t * s.hidden, reference_token(layer, input, t));
      worst = error > worst || error != error ? error : worst;
      expect(error < bound, cat("reference ", name_of(s), " M", tokens, " token ", t, ": ", error));
    }
    // A token alone: the same bits.
    for (int64_t t = 0; t < tokens; t += tokens < 20 ? 1 : 13) {
      MoeArgs one = input.args(runner.y);
      DeviceBuffer y(s.hidden * 2);
      one.x = static_cast<const uint8_t*>(one.x) + t * s.hidden * 2;
      one.ids += t * s.top_k;
      one.weights += t * s.top_k;
      one.tokens = 1;
      one.y = y.data();
      must(moe_layer(s, layer.view(), one, runner.workspace.data(), nullptr), "one token");
      must(cudaDeviceSynchronize(), "one token run");
      const auto alone = download_bf16(y, s.hidden);
      expect(std::memcmp(alone.data(), narrow.data() + t * s.hidden, alone.size() * 2) == 0,
             cat("alone = batch ", name_of(s), " M", tokens, " token ", t));
    }
  }
  const LayerInput input(s, token_counts.back(), 99);
  const auto first = runner.run(input, Geometry::kAuto);
  int different = 0;
  for (int i = 0; i < 100; ++i) different += runner.run(input, Geometry::kAuto) == first ? 0 : 1;
  expect(different == 0, cat("100 repeats ", name_of(s), ": ", different, " differ"));
  std::printf("%-40s worst relative error %.2e\n", name_of(s).c_str(), worst);
}

int run(int argc, char** argv) {
  std::vector<std::string> formats(argv + 1, argv + argc);
  if (formats.empty()) formats = {"nvfp4", "mxfp4", "mxfp8", "bf16"};
  for (const std::string& format : formats) {
    for (const char* shape : {"16,256,128,4", "8,320,96,3", "5,2880,2880,4"}) {
      check_packing(parse_shape(shape, format));
    }
    check_layer(parse_shape("16,256,128,4", format), {1, 2, 3, 7, 8, 9, 17, 33, 64, 129, 300},
                6e-3);
    check_layer(parse_shape("8,320,96,3", format), {1, 5, 31, 300}, 6e-3);
    MoeShape clamped = parse_shape("16,256,192,4", format);
    clamped.activation = Activation::kSiluLimit;
    clamped.limit = 0.8f;
    check_layer(clamped, {1, 20, 300}, 6e-3);
    clamped.activation = Activation::kGptOss;  // with biases
    clamped.alpha = 1.702f;
    check_layer(clamped, {1, 20, 300}, 6e-3);
    if (format == "nvfp4" || format == "mxfp4") {
      check_layer(parse_shape("16,4096,2048,8", format), {1, 7, 64, 300}, 6e-3);
      check_layer(parse_shape("16,2560,640,10", format), {1, 7, 300}, 6e-3);
      check_layer(parse_shape("16,6144,256,8", format), {1, 7, 300}, 6e-3);
      check_layer(parse_shape("16,2880,2880,4", format), {1, 7, 300}, 6e-3);
    }
  }
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main(int argc, char** argv) { return nibble::kernels::cuda::run(argc, argv); }
