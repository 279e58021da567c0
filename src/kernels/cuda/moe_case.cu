#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
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

/// Random bytes; scale bytes (after the codes of every tile) get `low` + random below `range`.
/// BF16 tiles get values around 2.
__global__ void fill_kernel(uint64_t* data, int64_t words, int tile_words, int code_words,
                            uint32_t low, uint32_t range, bool bf16, bool e4m3, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t v = mix(seed + static_cast<uint64_t>(i));
    if (tile_words > 0 && i % tile_words >= code_words) {
      uint64_t scales = 0;
      for (int b = 0; b < 8; ++b) scales |= (low + (v >> 8 * b & 0xFF) % range) << 8 * b;
      v = scales;
    } else if (bf16) {
      v = (v & 0x80FF80FF80FF80FFull) | 0x3F003F003F003F00ull;
    } else if (e4m3) {
      v = (v & 0x8F8F8F8F8F8F8F8Full) | 0x3030303030303030ull;
    }
    data[i] = v;
  }
}

void fill_packed(const DeviceBuffer& buffer, FormatId f, uint64_t seed) {
  const uint32_t low = f == FormatId::kNvfp4 ? 0x30 : f == FormatId::kMxfp4 ? 125 : 126;
  const uint32_t range = f == FormatId::kNvfp4 ? 16 : 3;
  fill_kernel<<<2048, 256>>>(buffer.as<uint64_t>(), buffer.bytes() / 8, tile_bytes(f) / 8,
                             tile_code_bytes(f) / 8, low, range, f == FormatId::kBf16,
                             f == FormatId::kMxfp8, seed);
  must(cudaGetLastError(), "fill");
}

/// Unpacks and packs again if the shape is not made of whole tiles.
int64_t plane_row_bytes(FormatId f, int64_t cols);
void clear_padding(DeviceBuffer& packed, const MoeShape& s, Product product) {
  if (s.hidden % kTileCols == 0 && s.inter % kTileCols == 0) return;
  const bool down = product == Product::kDown;
  const int64_t rows = s.experts * (down ? s.hidden : s.inter), cols = down ? s.inter : s.hidden;
  const int64_t codes = rows * plane_row_bytes(s.format, cols);
  const int64_t scales = s.format == FormatId::kBf16 ? 0 : rows * (cols / group_cols(s.format));
  DeviceBuffer planes(2 * (codes + scales)), flags(4);
  auto* base = planes.as<uint8_t>();
  const PackArgs args{s.format,
                      product,
                      s.experts,
                      s.hidden,
                      s.inter,
                      {base, base + 2 * codes},
                      {base + codes, base + 2 * codes + scales},
                      packed.as<uint8_t>()};
  must(launch_unpack(args, nullptr), "unpack");
  must(launch_pack(args, flags.as<int>(), nullptr), "pack");
  must(cudaDeviceSynchronize(), "pack");
}

int64_t plane_row_bytes(FormatId f, int64_t cols) {
  return f == FormatId::kBf16 ? cols * 2 : f == FormatId::kMxfp8 ? cols : cols / 2;
}

/// Decoded rows of one matrix of one expert, without its factor.
std::vector<float> decode_plane(FormatId f, int64_t rows, int64_t cols, const uint8_t* codes,
                                const uint8_t* scales) {
  formats::MatrixView view;
  view.format = f;
  view.scale_kind = formats::block_format(f).scale;
  view.rows = rows;
  view.cols = cols;
  view.codes = reinterpret_cast<const std::byte*>(codes);
  view.scales = reinterpret_cast<const std::byte*>(scales);
  std::vector<float> out(static_cast<size_t>(rows * cols));
  formats::decode_rows(view, 0, rows, out.data());
  return out;
}

struct ExpertFloats {
  std::vector<float> gate, up, down;
};

ExpertFloats decode_expert(const LayerWeights& layer, int64_t expert) {
  const MoeShape& s = layer.shape;
  const FormatId f = s.format;
  ExpertFloats out;
  for (const Product product : {Product::kGateUp, Product::kDown}) {
    const bool down = product == Product::kDown;
    const int64_t rows = down ? s.hidden : s.inter, cols = down ? s.inter : s.hidden;
    const int64_t codes = rows * plane_row_bytes(f, cols);
    const int64_t scales = f == FormatId::kBf16 ? 0 : rows * (cols / group_cols(f));
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
    args.packed = (down ? layer.down : layer.gate_up).as<uint8_t>() +
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

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
void must(const Result<void>& result, const char* what) {
  if (result) return;
  std::fprintf(stderr, "%s: %s\n", what, result.error().message().c_str());
  std::exit(2);
}

DeviceBuffer::DeviceBuffer(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = nullptr;
  must(cudaMalloc(&p, static_cast<size_t>(bytes)), "cudaMalloc");
  data_ = static_cast<std::byte*>(p);
}
DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

void fill_random(uint8_t* data, int64_t bytes, uint64_t seed) {
  fill_kernel<<<1024, 256>>>(reinterpret_cast<uint64_t*>(data), bytes / 8, 0, 0, 0, 1, false, false,
                             seed);
  must(cudaGetLastError(), "fill");
}

LayerWeights::LayerWeights(const MoeShape& s, uint64_t seed)
    : shape(s),
      gate_up(s.experts * packed_bytes(s.format, Product::kGateUp, s.hidden, s.inter)),
      down(s.experts * packed_bytes(s.format, Product::kDown, s.hidden, s.inter)),
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
  fill_packed(gate_up, s.format, mix(seed));
  fill_packed(down, s.format, mix(seed + 1));
  // Padding must be what packing makes of it: zeros.
  clear_padding(gate_up, s, Product::kGateUp);
  clear_padding(down, s, Product::kDown);
  // Gate and up get different factors, as two independent global scales would.
  const double rms = s.format == FormatId::kBf16 ? 0.9 : s.format == FormatId::kMxfp8 ? 1.4 : 3.2;
  for (int64_t e = 0; e < s.experts; ++e) {
    const double jitter = 1.0 + 0.01 * static_cast<double>(e % 17);
    const double unit = register_unit(s.format);
    const auto i = static_cast<size_t>(e), n = static_cast<size_t>(s.experts);
    host_factors[i] = static_cast<float>(unit * jitter / (rms * std::sqrt(s.hidden)));
    host_factors[n + i] = static_cast<float>(unit * 1.3 / jitter / (rms * std::sqrt(s.hidden)));
    host_factors[2 * n + i] = static_cast<float>(unit * jitter / (rms * std::sqrt(s.inter)));
  }
  must(cudaMemcpy(factors.data(), host_factors.data(), host_factors.size() * 4,
                  cudaMemcpyHostToDevice),
       "upload factors");
}

MoeWeights LayerWeights::view() const {
  MoeWeights w;
  w.gate_up = gate_up.data();
  w.down = down.data();
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
  a.ids = ids.as<int32_t>();
  a.weights = weights.as<float>();
  a.y = y.data();
  return a;
}

float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float v;
  static_assert(sizeof(v) == sizeof(wide));
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}

std::vector<double> reference_token(const LayerWeights& layer, const LayerInput& input,
                                    int64_t token) {
  const MoeShape& s = layer.shape;
  std::vector<double> x(static_cast<size_t>(s.hidden)), h(static_cast<size_t>(s.inter)),
      y(static_cast<size_t>(s.hidden));
  for (int64_t i = 0; i < s.hidden; ++i) {
    x[static_cast<size_t>(i)] = bf16_value(input.host_x[static_cast<size_t>(token * s.hidden + i)]);
  }
  const double unit = register_unit(s.format);
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
      y[static_cast<size_t>(r)] += static_cast<double>(input.host_weights[slot]) *
                                   (v * layer.host_factors[2 * n + e] / unit + on * down_bias[r]);
    });
  }
  return y;
}

std::vector<uint16_t> download_bf16(const DeviceBuffer& buffer, int64_t count) {
  std::vector<uint16_t> host(static_cast<size_t>(count));
  must(cudaMemcpy(host.data(), buffer.data(), host.size() * 2, cudaMemcpyDeviceToHost), "download");
  return host;
}

double relative_error(const uint16_t* y, const std::vector<double>& reference) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double d = static_cast<double>(bf16_value(y[i])) - reference[i];
    difference += d * d;
    norm += reference[i] * reference[i];
  }
  return std::sqrt(difference / norm);
}

MoeShape parse_shape(const std::string& text, const std::string& format) {
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
  } else if (std::sscanf(text.c_str(), "%lld,%lld,%lld,%lld", &e, &h, &i, &k) != 4) {
    std::fprintf(stderr, "shape '%s': qwen, glm, tp8, gptoss or E,H,I,K\n", text.c_str());
    std::exit(2);
  }
  s.experts = e, s.hidden = h, s.inter = i, s.top_k = k;
  for (const FormatId f : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8, FormatId::kBf16}) {
    if (formats::block_format(f).name == format) {
      s.format = f;
      return s;
    }
  }
  std::fprintf(stderr, "format '%s': nvfp4, mxfp4, mxfp8 or bf16\n", format.c_str());
  std::exit(2);
}

}  // namespace nibble::kernels::cuda
