#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "kernels/cuda/moe_case.h"

namespace nibble::kernels::cuda {
namespace {

__host__ __device__ uint64_t mix(uint64_t v) {
  v += 0x9E3779B97F4A7C15ull;
  v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ v >> 27) * 0x94D049BB133111EBull;
  return v ^ v >> 31;
}

enum class Fill { kBytes, kBf16, kE4m3, kFloats };

/// Random words; BF16 values around 2, E4M3 codes around 1, FP32 in [0.5, 1).
__global__ void fill_kernel(uint64_t* data, int64_t words, Fill fill, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t v = mix(seed + static_cast<uint64_t>(i));
    if (fill == Fill::kBf16) v = (v & 0x80FF80FF80FF80FFull) | 0x3F003F003F003F00ull;
    if (fill == Fill::kE4m3) v = (v & 0x8F8F8F8F8F8F8F8Full) | 0x3030303030303030ull;
    if (fill == Fill::kFloats) v = (v & 0x007FFFFF007FFFFFull) | 0x3F0000003F000000ull;
    data[i] = v;
  }
}

/// Scale bytes near 1.0: E4M3 with a spread of 3.4 codes in a row and of some between rows; E8M0 of
/// two neighbouring values a row and rare others.
__global__ void fill_scales_kernel(uint8_t* data, int64_t rows, int64_t cols, bool e8m0, bool spiky,
                                   uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * cols;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t v = mix(seed + static_cast<uint64_t>(i));
    const uint64_t of_row = mix(seed ^ (0x1234567ull + static_cast<uint64_t>(i / cols) * 977));
    if (spiky && (v >> 44) % 12 == 0) {
      data[i] = static_cast<uint8_t>(e8m0 ? 90 + (v >> 32) % 38 : 1 + (v >> 32) % 0x60);
    } else if (e8m0) {
      int value = 125 + static_cast<int>(of_row % 2) + static_cast<int>(v & 1);
      if ((v >> 8) % 200 == 0) value -= 1 + static_cast<int>((v >> 32) % 4);
      data[i] = static_cast<uint8_t>(value);
    } else {
      int sum = 0;
      for (int b = 0; b < 4; ++b) sum += static_cast<int>(v >> 8 * b & 0xFF);
      const int value = 0x37 + static_cast<int>(of_row % 3) + (sum - 510) * 10 / 435;
      data[i] = (v >> 40) % 4096 == 0 ? 0 : static_cast<uint8_t>(value);
    }
  }
}

int64_t plane_row_bytes(FormatId f, int64_t cols) { return formats::code_row_bytes(f, cols); }
/// Scale bytes of one matrix.
int64_t plane_scale_bytes(FormatId f, int64_t rows, int64_t cols) {
  if (f == FormatId::kBf16) return 0;
  if (f == FormatId::kFp8Block) return (rows + 127) / 128 * ((cols + 127) / 128) * 4;
  return rows * (cols / group_cols(f));
}

/// Random checkpoint planes of one projection: gate and up, or down alone.
struct Planes {
  Planes(FormatId f, Product product, const MoeShape& s, bool spiky, uint64_t seed)
      : down(product == Product::kDown),
        rows(down ? s.hidden : s.inter),
        cols(down ? s.inter : s.hidden),
        code_bytes(s.experts * rows * plane_row_bytes(f, cols)),
        scale_bytes((s.experts * plane_scale_bytes(f, rows, cols) + 15) / 16 * 16),
        matrices(down ? 1 : 2),
        codes(matrices * code_bytes + 16),
        scales(matrices * scale_bytes + 16) {
    const Fill fill = f == FormatId::kBf16                                ? Fill::kBf16
                      : f == FormatId::kMxfp8 || f == FormatId::kFp8Block ? Fill::kE4m3
                                                                          : Fill::kBytes;
    fill_kernel<<<2048, 256>>>(codes.as<uint64_t>(), codes.bytes() / 8, fill, seed);
    if (f == FormatId::kFp8Block) {
      fill_kernel<<<64, 256>>>(scales.as<uint64_t>(), scales.bytes() / 8, Fill::kFloats, seed + 1);
    } else if (scale_bytes > 0) {
      const bool e8m0 = f == FormatId::kMxfp4 || f == FormatId::kMxfp8;
      for (int i = 0; i < matrices; ++i) {
        fill_scales_kernel<<<2048, 256>>>(scale_plane(i), s.experts * rows, cols / group_cols(f),
                                          e8m0, spiky, mix(seed + 2 + static_cast<uint64_t>(i)));
      }
    }
    must(cudaGetLastError(), "fill");
  }
  uint8_t* code_plane(int i) const { return codes.as<uint8_t>() + i * code_bytes; }
  uint8_t* scale_plane(int i) const { return scales.as<uint8_t>() + i * scale_bytes; }
  RowPlanes row_planes(int i) const {
    return i < matrices ? RowPlanes{code_plane(i), scale_plane(i)} : RowPlanes{};
  }
  bool down;
  int64_t rows, cols, code_bytes, scale_bytes;
  int matrices;
  DeviceBuffer codes, scales;
};

/// Decoded rows of one matrix of one expert, without its factor.
std::vector<float> decode_plane(FormatId f, int64_t rows, int64_t cols, const uint8_t* codes,
                                const uint8_t* scales) {
  formats::MatrixView view;
  view.block_rows = view.block_cols = 128;
  view.nf3_levels = formats::kNf3Levels;
  view.format = f;
  view.scale_kind = formats::block_format(f).scale;
  view.rows = rows;
  view.cols = cols;
  view.codes = reinterpret_cast<const std::byte*>(codes);
  view.scales = reinterpret_cast<const std::byte*>(scales);
  std::vector<float> out(static_cast<size_t>(rows * cols));
  formats::decode_rows(view, 0, rows, out.data());
  if (f == FormatId::kNf3) {  // the kernels' weights are BF16, rounded once
    for (float& v : out) v = __bfloat162float(__float2bfloat16(v));
  }
  return out;
}

struct ExpertFloats {
  std::vector<float> gate, up, down;
};

ExpertFloats decode_expert(const LayerWeights& layer, int64_t expert) {
  const MoeShape& s = layer.shape;
  ExpertFloats out;
  for (const Product product : {Product::kGateUp, Product::kDown}) {
    const bool down = product == Product::kDown;
    const FormatId f = down ? layer.formats.down : layer.formats.gate_up;
    const int64_t rows = down ? s.hidden : s.inter, cols = down ? s.inter : s.hidden;
    const int64_t codes = (rows * plane_row_bytes(f, cols) + 15) / 16 * 16;
    const int64_t scales = (plane_scale_bytes(f, rows, cols) + 15) / 16 * 16;
    DeviceBuffer planes(2 * (codes + scales + 16));
    PackArgs args;
    args.format = f;
    args.product = product;
    args.experts = 1;
    args.hidden = s.hidden;
    args.inter = s.inter;
    auto* base = planes.as<uint8_t>();
    args.first = {base, base + 2 * codes};
    args.second = {base + codes, base + 2 * codes + scales};
    args.packed = (down ? layer.down : layer.gate_up).tiles.as<uint8_t>() +
                  expert * packed_bytes(f, product, s.hidden, s.inter);
    must(launch_unpack(args, nullptr), "unpack");
    std::vector<uint8_t> host(static_cast<size_t>(2 * (codes + scales)));
    must(cudaMemcpy(host.data(), base, host.size(), cudaMemcpyDeviceToHost), "download planes");
    const uint8_t* p = host.data();
    if (down) {
      out.down = decode_plane(f, rows, cols, p, p + 2 * codes);
    } else {
      out.gate = decode_plane(f, rows, cols, p, p + 2 * codes);
      out.up = decode_plane(f, rows, cols, p + codes, p + 2 * codes + scales);
    }
  }
  return out;
}

double dot(const float* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

double act(const MoeShape& s, double gate, double up) {
  if (s.activation == Activation::kSilu) return gate / (1 + std::exp(-gate)) * up;
  gate = std::fmin(gate, s.limit);
  up = std::fmax(std::fmin(up, s.limit), -s.limit);
  if (s.activation == Activation::kSiluLimit) return gate / (1 + std::exp(-gate)) * up;
  return gate / (1 + std::exp(-static_cast<double>(s.alpha) * gate)) * (up + 1);
}

template <typename F>
void parallel_rows(int64_t rows, const F& f) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 16; ++t) {
    threads.emplace_back([=, &f] {
      for (int64_t r = t; r < rows; r += 16) f(r);
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace

void fill_random(uint8_t* data, int64_t bytes, uint64_t seed) {
  fill_kernel<<<1024, 256>>>(reinterpret_cast<uint64_t*>(data), bytes / 8, Fill::kBytes, seed);
  must(cudaGetLastError(), "fill");
}
void fill_scales(uint8_t* data, int64_t rows, int64_t cols, bool e8m0, uint64_t seed) {
  fill_scales_kernel<<<2048, 256>>>(data, rows, cols, e8m0, false, seed);
  must(cudaGetLastError(), "fill");
}

PackedProjection::PackedProjection(FormatId f, const LayerFormats& formats, Product product,
                                   const MoeShape& s, uint64_t seed)
    : format(f),
      tiles(s.experts * packed_bytes(f, product, s.hidden, s.inter, formats.scales)),
      form_(formats.scales),
      exceptions_(form_ == ScaleForm::kCsf
                      ? s.experts * s.hidden * s.inter / (formats.spiky ? 8 : 64) + 1024
                      : 0) {
  const Planes planes(f, product, s, formats.spiky, seed);
  DeviceBuffer flags(4);
  must(cudaMemset(flags.data(), 0, 4), "flags");
  const PackArgs pack{f,
                      product,
                      s.experts,
                      s.hidden,
                      s.inter,
                      planes.row_planes(0),
                      planes.row_planes(1),
                      tiles.as<uint8_t>(),
                      form_};
  must(launch_pack(pack, flags.as<int>(), nullptr), "pack");
  int found = 0;
  must(cudaMemcpy(&found, flags.data(), 4, cudaMemcpyDeviceToHost), "flags");
  if (found != 0) must(cudaErrorInvalidValue, "random weights with pack flags");
  if (form_ != ScaleForm::kCsf) return;
  const CsfStack stack{csf_kind_of(f), s.experts, planes.rows, planes.cols / group_cols(f)};
  CsfIndexArgs index{f,
                     product,
                     s.experts,
                     s.hidden,
                     s.inter,
                     {},
                     {},
                     tiles.as<uint8_t>(),
                     exceptions_.as<uint32_t>()};
  const int64_t fixed = s.experts * codec::csf_fixed_bytes(stack.kind, stack.rows, stack.cols);
  const int64_t cells = s.experts * stack.rows * stack.cols;
  const int64_t capacity = cells / 8 + 1024;
  std::vector<DeviceBuffer> keep;
  for (int i = 0; i < planes.matrices; ++i) {
    DeviceBuffer& fixed_bytes = keep.emplace_back((fixed + 15) / 16 * 16);
    auto* fixed_data = fixed_bytes.as<uint8_t>();
    auto* words = keep.emplace_back(capacity * 4).as<uint32_t>();
    auto* begins = keep.emplace_back((s.experts * stack.rows + 1) * 4).as<uint32_t>();
    void* scratch = keep.emplace_back(csf_encode_scratch_bytes(stack)).data();
    CsfSource& source = i == 0 ? index.first : index.second;
    source = {{fixed_data, words, begins, capacity}, stack.rows, 0};
    must(csf_encode(stack, planes.scale_plane(i), source.streams, scratch, nullptr), "csf_encode");
    uint32_t count = 0;
    must(cudaMemcpy(&count, begins + s.experts * stack.rows, 4, cudaMemcpyDeviceToHost), "count");
    exception_count_ += count;
    if (count > capacity || exception_count_ * 4 > exceptions_.bytes()) {
      must(cudaErrorInvalidValue, "more CSF exceptions than expected");
    }
  }
  must(csf_index(index, nullptr), "csf_index");
  must(cudaDeviceSynchronize(), "csf");
}

ExpertMatrices PackedProjection::view() const {
  ExpertMatrices m;
  m.format = format;
  m.scale_form = form_;
  m.tiles = tiles.data();
  m.exceptions = exceptions_.as<uint32_t>();
  for (size_t i = 0; i < 8; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &formats::kNf3Levels[i], 4);
    m.levels[i] = static_cast<uint16_t>(bits >> 16);
  }
  return m;
}
int64_t PackedProjection::bytes() const { return tiles.bytes() + 4 * exception_count_; }

LayerWeights::LayerWeights(const MoeShape& s, const LayerFormats& f, uint64_t seed)
    : shape(s),
      formats(f),
      gate_up(f.gate_up, f, Product::kGateUp, s, mix(seed)),
      down(f.down, f, Product::kDown, s, mix(seed + 1)),
      factors(3 * s.experts * 4),
      biases(s.experts * (2 * s.inter + s.hidden) * 4),
      host_factors(static_cast<size_t>(3 * s.experts)),
      host_biases(static_cast<size_t>(s.experts * (2 * s.inter + s.hidden))) {
  for (size_t i = 0; i < host_biases.size(); ++i) {
    host_biases[i] = static_cast<float>(mix(i) % 1000) / 500.0f - 1.0f;
  }
  must(
      cudaMemcpy(biases.data(), host_biases.data(), host_biases.size() * 4, cudaMemcpyHostToDevice),
      "upload biases");
  auto rms = [](FormatId id) {
    return id == FormatId::kBf16                                 ? 0.9
           : id == FormatId::kMxfp8 || id == FormatId::kFp8Block ? 1.2
           : id == FormatId::kNf3                                ? 0.7
                                                                 : 3.2;
  };
  // Gate and up get different factors, as two independent global scales would.
  for (int64_t e = 0; e < s.experts; ++e) {
    const double jitter = 1.0 + 0.01 * static_cast<double>(e % 17);
    const double up_unit = register_unit(f.gate_up) / (rms(f.gate_up) * std::sqrt(s.hidden));
    const double down_unit = register_unit(f.down) / (rms(f.down) * std::sqrt(s.inter));
    const auto i = static_cast<size_t>(e), n = static_cast<size_t>(s.experts);
    host_factors[i] = static_cast<float>(up_unit * jitter);
    host_factors[n + i] = static_cast<float>(up_unit * 1.3 / jitter);
    host_factors[2 * n + i] = static_cast<float>(down_unit * jitter);
  }
  must(cudaMemcpy(factors.data(), host_factors.data(), host_factors.size() * 4,
                  cudaMemcpyHostToDevice),
       "upload factors");
}

MoeWeights LayerWeights::view() const {
  MoeWeights w;
  w.experts = shape.experts;
  w.gate_up = gate_up.view();
  w.down = down.view();
  w.gate_factor = factors.as<float>();
  w.up_factor = factors.as<float>() + shape.experts;
  w.down_factor = factors.as<float>() + 2 * shape.experts;
  if (shape.activation == Activation::kGptOss) {
    w.gate_bias = biases.as<float>();
    w.up_bias = w.gate_bias + shape.experts * shape.inter;
    w.down_bias = w.up_bias + shape.experts * shape.inter;
  }
  return w;
}

LayerInput::LayerInput(const MoeShape& s, int64_t n, uint64_t seed)
    : tokens(n),
      dense(s.experts == 1 && s.top_k == 1),
      host_x(static_cast<size_t>(n * s.hidden)),
      x(n * s.hidden * 2),
      ids(n * s.top_k * 4),
      weights(n * s.top_k * 4) {
  std::mt19937_64 random(seed);
  // Sum of four uniform values: near enough to a normal one, and fast.
  for (uint16_t& v : host_x) {
    const uint64_t r = random();
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(r >> 16 * i & 0xFFFF) / 65536.0f - 0.5f;
    const __nv_bfloat16 b = __float2bfloat16(sum * 1.7f);
    v = *reinterpret_cast<const uint16_t*>(&b);
  }
  for (int64_t t = 0; t < n; ++t) {
    std::vector<int32_t> chosen;
    while (static_cast<int64_t>(chosen.size()) < s.top_k) {
      const auto e = static_cast<int32_t>(random() % static_cast<uint64_t>(s.experts));
      bool seen = false;
      for (const int32_t c : chosen) seen = seen || c == e;
      if (!seen) chosen.push_back(e);
    }
    double total = 0;
    std::vector<double> w;
    for (int64_t k = 0; k < s.top_k; ++k) {
      w.push_back(0.2 + static_cast<double>(random() % 1000) / 1000);
      total += w.back();
    }
    for (int64_t k = 0; k < s.top_k; ++k) {
      host_ids.push_back(chosen[static_cast<size_t>(k)]);
      host_weights.push_back(static_cast<float>(w[static_cast<size_t>(k)] / total));
    }
  }
  must(cudaMemcpy(x.data(), host_x.data(), host_x.size() * 2, cudaMemcpyHostToDevice), "x");
  must(cudaMemcpy(ids.data(), host_ids.data(), host_ids.size() * 4, cudaMemcpyHostToDevice), "ids");
  must(cudaMemcpy(weights.data(), host_weights.data(), host_weights.size() * 4,
                  cudaMemcpyHostToDevice),
       "router weights");
}

int64_t LayerInput::active_experts() const {
  return static_cast<int64_t>(std::set<int32_t>(host_ids.begin(), host_ids.end()).size());
}

MoeArgs LayerInput::args(DeviceBuffer& y) const {
  MoeArgs a;
  a.x = x.data();
  a.tokens = tokens;
  if (!dense) {
    a.ids = ids.as<int32_t>();
    a.weights = weights.as<float>();
  }
  a.y = y.as<float>();
  return a;
}

std::vector<double> reference_token(const LayerWeights& layer, const LayerInput& input,
                                    int64_t token) {
  const MoeShape& s = layer.shape;
  std::vector<double> x(static_cast<size_t>(s.hidden)), h(static_cast<size_t>(s.inter)),
      y(static_cast<size_t>(s.hidden));
  for (int64_t i = 0; i < s.hidden; ++i) {
    x[static_cast<size_t>(i)] =
        bf16_to_float(input.host_x[static_cast<size_t>(token * s.hidden + i)]);
  }
  const double unit = register_unit(layer.formats.gate_up);
  const double down_unit = register_unit(layer.formats.down);
  for (int64_t k = 0; k < s.top_k; ++k) {
    const auto slot = static_cast<size_t>(token * s.top_k + k);
    const auto e = static_cast<size_t>(input.host_ids[slot]), n = static_cast<size_t>(s.experts);
    const ExpertFloats w = decode_expert(layer, static_cast<int64_t>(e));
    const double on = s.activation == Activation::kGptOss ? 1.0 : 0.0;
    const float* gate_bias = layer.host_biases.data() + static_cast<int64_t>(e) * s.inter;
    const float* up_bias = gate_bias + s.experts * s.inter;
    const float* down_bias =
        layer.host_biases.data() + 2 * s.experts * s.inter + static_cast<int64_t>(e) * s.hidden;
    parallel_rows(s.inter, [&](int64_t r) {
      const double gate = dot(w.gate.data() + r * s.hidden, x.data(), s.hidden);
      const double up = dot(w.up.data() + r * s.hidden, x.data(), s.hidden);
      h[static_cast<size_t>(r)] = act(s, gate * layer.host_factors[e] / unit + on * gate_bias[r],
                                      up * layer.host_factors[n + e] / unit + on * up_bias[r]);
    });
    parallel_rows(s.hidden, [&](int64_t r) {
      const double v = dot(w.down.data() + r * s.inter, h.data(), s.inter);
      y[static_cast<size_t>(r)] +=
          static_cast<double>(input.host_weights[slot]) *
          (v * layer.host_factors[2 * n + e] / down_unit + on * down_bias[r]);
    });
  }
  return y;
}

std::vector<float> download_floats(const DeviceBuffer& buffer, int64_t count) {
  std::vector<float> host(static_cast<size_t>(count));
  must(cudaMemcpy(host.data(), buffer.data(), host.size() * 4, cudaMemcpyDeviceToHost), "download");
  return host;
}

double relative_error(const float* y, const std::vector<double>& reference) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double d = static_cast<double>(y[i]) - reference[i];
    difference += d * d;
    norm += reference[i] * reference[i];
  }
  return std::sqrt(difference / norm);
}

Result<MoeShape> parse_shape(const std::string& text) {
  MoeShape s;
  long long e = 0, h = 0, i = 0, k = 0;
  if (text == "qwen") {
    e = 512, h = 2560, i = 640, k = 10;
  } else if (text == "glm") {
    e = 288, h = 4096, i = 2048, k = 8;
  } else if (text == "tp8") {
    e = 256, h = 6144, i = 256, k = 8;
  } else if (text == "gptoss") {
    e = 128, h = 2880, i = 2880, k = 4;
  } else if (text == "a3b") {
    e = 128, h = 2048, i = 768, k = 8;
  } else if (char rest = 0;
             std::sscanf(text.c_str(), "%lld,%lld,%lld,%lld%c", &e, &h, &i, &k, &rest) != 4 ||
             e < 1 || h < 32 || i < 32 || k < 1 || k > e) {
    return Error(Code::kInvalidArgument,
                 cat("shape '", text, "': expected qwen, glm, tp8, gptoss, a3b or E,H,I,K"));
  }
  s.experts = e, s.hidden = h, s.inter = i, s.top_k = k;
  return s;
}

Result<LayerFormats> parse_formats(const std::string& text) {
  const size_t plus = text.find('+');
  auto find = [](const std::string& name) -> Result<FormatId> {
    for (const FormatId f : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8, FormatId::kBf16,
                             FormatId::kFp8Block, FormatId::kNf3}) {
      if (formats::block_format(f).name == name) return f;
    }
    return Error(Code::kInvalidArgument, cat("format '", name, "' has no MoE kernel"));
  };
  LayerFormats f;
  NIBBLE_TRY(f.gate_up, find(text.substr(0, plus)));
  NIBBLE_TRY(f.down, find(plus == std::string::npos ? text : text.substr(plus + 1)));
  return f;
}

}  // namespace nibble::kernels::cuda
