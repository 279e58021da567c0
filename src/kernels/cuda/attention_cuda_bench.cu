// Speed of attention, prepare, norm and sampling on the GPU at hand: graph replays, microseconds
// per call (median, lowest, highest of the replays), GB/s of the bytes that must be read.
#include "device/cuda.h"
#include "kernels/cuda/attention_case.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/sample.h"

namespace nibble::kernels::cuda {
namespace {

using namespace test;

double copy_rate = 0;

void print(const std::string& name, const Times& t, double bytes, double flops = 0) {
  std::printf("%-44s %9.2f us  (%.2f..%.2f)", name.c_str(), t.median, t.low, t.high);
  if (bytes > 0) {
    const double rate = bytes / t.median * 1e-3;
    std::printf("  %6.0f GB/s  %3.0f %% of copy", rate, 100 * rate / copy_rate);
  }
  if (flops > 0) std::printf("  %5.0f TFLOP/s", flops / t.median * 1e-6);
  std::printf("\n");
}

constexpr int64_t kFillCycles = 4000;
constexpr int kFillBytes = 200 * 1024;

/// Takes every SM's shared memory for a while, as a product does: the kernel after cannot start.
__global__ void fill_kernel() {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t start = clock64();
  while (clock64() - start < kFillCycles) {
  }
}

void queue_fill(cudaStream_t stream) {
  static const int processors = [] {
    int n = 0;
    must(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "processors");
    return n;
  }();
  must(launch_overlapped(fill_kernel, processors, 32, kFillBytes, stream), "fill kernel");
}

/// Calls walk the layers, so that keys and values come from memory and not from the L2. after_fill:
/// each follows a fill_kernel, whose time is part of the result.
void bench_attention(const HeadShape& shape, const std::vector<Span>& spans,
                     const std::string& label, AttentionPath path, bool with_prepare,
                     bool after_fill = false) {
  Random random(1);
  std::vector<int64_t> tokens;
  int64_t page_count = 0, max_context = 0, max_rows = 1;
  double kv_positions = 0, scores = 0;
  for (const Span& s : spans) {
    tokens.push_back(s.context + s.rows);
    page_count += (tokens.back() + kKvPageTokens - 1) / kKvPageTokens;
    max_context = std::max(max_context, tokens.back());
    max_rows = std::max(max_rows, s.rows);
    kv_positions += static_cast<double>(tokens.back());
    scores += static_cast<double>(s.rows) *
              (static_cast<double>(s.context) + 0.5 * static_cast<double>(s.rows + 1));
  }
  KvCache cache;
  cache.pages = page_count;
  cache.kv_heads = shape.kv_heads;
  cache.head_dim = shape.head_dim;
  cache.format = shape.format;
  const int64_t layer_bytes = page_count * cache.page_bytes();
  const int64_t target = int64_t{256} << 20;
  cache.layers = std::clamp<int64_t>(target / layer_bytes, 2, 64);
  Device<std::byte> memory(cache.bytes());
  memory.fill(0x3C);
  cache.data = memory.get();
  const Step step(spans, deal_pages(random, tokens, 0, page_count));
  const int64_t width = shape.heads * shape.head_dim;
  const int64_t qkv_width = width + 2 * shape.kv_heads * shape.head_dim;
  Device<uint16_t> q(step.view.rows * width), out(step.view.rows * width);
  q.fill(0x3C);
  Device<float> qkv(random.normals(step.view.rows * qkv_width));
  Device<float> vector(random.normals(256));
  Device<std::byte> scratch(
      attention_scratch_bytes(cache, shape.heads, step.view.rows, max_context));
  scratch.fill(0);
  const Times t = time_graph(static_cast<int>(cache.layers), 15, [&](cudaStream_t s, int i) {
    AttentionArgs args;
    args.q = q.get();
    args.out = out.get();
    args.heads = shape.heads;
    args.layer = i;
    args.scale = shape.scale();
    const AttentionHint hint = {max_context, max_rows, path};
    if (after_fill) queue_fill(s);
    if (!with_prepare) {
      must(attention(args, cache, step.view, hint, scratch.get(), scratch.bytes(), s), "attention");
      return;
    }
    AttentionPrepareArgs prepare;
    prepare.qkv = qkv.get();
    prepare.row_stride = qkv_width;
    prepare.heads = shape.heads;
    prepare.layer = i;
    prepare.q_norm = prepare.k_norm = prepare.inv_freq = vector.get();
    prepare.rotary_dim = shape.head_dim;
    prepare.q = q.get();
    must(attention_step(prepare, args, cache, step.view, hint, scratch.get(), scratch.bytes(), s),
         "attention_step");
  });
  const double bytes = kv_positions * 2 * static_cast<double>(shape.kv_heads * shape.head_dim) *
                       kv_format_bytes(shape.format);
  const bool prefill = max_rows > 1;
  print(cat(shape.name(), " ", label), t, prefill ? 0 : bytes,
        prefill ? 4 * scores * static_cast<double>(width) : 0);
}

void bench_prepare(const HeadShape& shape, int64_t rows) {
  KvCache cache;
  cache.layers = 1;
  cache.pages = rows / kKvPageTokens + 2;
  cache.kv_heads = shape.kv_heads;
  cache.head_dim = shape.head_dim;
  cache.format = shape.format;
  Device<std::byte> memory(cache.bytes());
  cache.data = memory.get();
  Random random(2);
  const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  const Step step({{50, rows}}, deal_pages(random, {50 + rows}, 0, cache.pages));
  const Device<float> qkv(random.normals(rows * width)), vector(random.normals(256));
  Device<uint16_t> q(rows * shape.heads * shape.head_dim);
  AttentionPrepareArgs args;
  args.qkv = qkv.get();
  args.row_stride = width;
  args.heads = shape.heads;
  args.q_norm = args.k_norm = args.inv_freq = vector.get();
  args.rotary_dim = shape.head_dim;
  args.q = q.get();
  print(cat("prepare ", shape.name(), " rows ", rows),
        time_graph(48, 15,
                   [&](cudaStream_t s, int) {
                     must(attention_prepare(args, cache, step.view, s), "prepare");
                   }),
        0);
}

void bench_norm(int64_t rows, int64_t hidden) {
  Random random(3);
  Device<float> residual(random.normals(rows * hidden)), delta(rows * hidden);
  delta.fill(0);
  const Device<float> weight(random.normals(hidden));
  Device<uint16_t> normed(rows * hidden);
  Device<float> fine(rows * hidden);
  AddRmsNormArgs args;
  args.residual = residual.get();
  args.delta = delta.get();
  args.rows = rows;
  args.hidden = hidden;
  args.weight = weight.get();
  args.normed = normed.get();
  args.normed_f32 = fine.get();
  print(cat("add_rms_norm rows ", rows, " hidden ", hidden),
        time_graph(48, 15, [&](cudaStream_t s, int) { must(add_rms_norm(args, s), "norm"); }), 0);
}

void bench_sample(int64_t rows, const RowSampling& params, const char* name, float spread,
                  bool greedy_only) {
  const int64_t vocab = 151552;
  Random random(4);
  const Device<float> logits(random.normals(rows * vocab, spread));
  const Device<RowSampling> device(std::vector<RowSampling>(static_cast<size_t>(rows), params));
  Device<std::byte> scratch(sample_scratch_bytes(rows, vocab));
  scratch.fill(0);
  Device<int32_t> tokens(rows);
  Device<float> logprobs(rows);
  SampleArgs args;
  args.logits = logits.get();
  args.rows = rows;
  args.vocab = args.row_stride = vocab;
  args.params = device.get();
  args.greedy_only = greedy_only;
  args.tokens = tokens.get();
  args.logprobs = logprobs.get();
  print(cat("sample ", name, " rows ", rows),
        time_graph(20, 15,
                   [&](cudaStream_t s, int) {
                     must(sample(args, scratch.get(), scratch.bytes(), s), "sample");
                   }),
        0);
}

int run() {
  copy_rate = must(device::cuda_copy_bandwidth(), "copy bandwidth") * 1e-9;
  std::printf("copy: %.0f GB/s\n", copy_rate);
  const HeadShape a3b = {32, 4, 128, KvFormat::kBf16}, a3b8 = {32, 4, 128, KvFormat::kFp8E4m3};
  const HeadShape glm = {96, 8, 128, KvFormat::kBf16};
  const AttentionPath automatic = AttentionPath::kAuto;
  for (const HeadShape& shape : {a3b, a3b8}) {
    for (const int64_t context : {100, 512, 1024, 2047, 4096, 8192, 32768, 131072}) {
      bench_attention(shape, {{context, 1}}, cat("decode 1 x ", context), automatic, false);
      bench_attention(shape, {{context, 1}}, cat("step 1 x ", context), automatic, true);
    }
    for (const int64_t rows : {4, 16, 32, 128}) {
      bench_attention(shape, std::vector<Span>(static_cast<size_t>(rows), {1024, 1}),
                      cat("decode ", rows, " x 1024"), automatic, false);
      bench_attention(shape, std::vector<Span>(static_cast<size_t>(rows), {1024, 1}),
                      cat("step ", rows, " x 1024"), automatic, true);
    }
    bench_attention(shape, std::vector<Span>(32, {8192, 1}), "decode 32 x 8192", automatic, false);
    bench_attention(shape, {{0, 2048}}, "prefill 2048", automatic, false);
    bench_attention(shape, {{14336, 2048}}, "prefill 2048 after 14336", automatic, false);
  }
  print("a kernel that fills the SMs, alone",
        time_graph(48, 15, [](cudaStream_t s, int) { queue_fill(s); }), 0);
  for (const HeadShape& shape : {a3b, a3b8}) {
    for (const int64_t context : {500, 1060, 2040, 4000}) {
      bench_attention(shape, {{context, 1}}, cat("fill and step 1 x ", context),
                      AttentionPath::kRowsByCluster, true, true);
    }
  }
  bench_attention(a3b, {{1024, 1}}, "decode 1 x 1024 by block", AttentionPath::kRowsByBlock, false);
  bench_attention(a3b, {{1024, 1}}, "decode 1 x 1024 by group", AttentionPath::kRowsByGroup, false);
  bench_attention(a3b, {{1024, 1}}, "decode 1 x 1024 whole", AttentionPath::kRowsWhole, false);
  bench_attention(glm, {{1024, 1}}, "step 1 x 1024", automatic, true);
  bench_attention(glm, {{0, 2048}}, "prefill 2048", automatic, false);
  for (const int64_t rows : {1, 32, 2048}) bench_prepare(a3b, rows);
  bench_norm(1, 2048);
  bench_norm(1, 5120);
  bench_norm(32, 2048);
  bench_norm(2048, 2048);
  for (const int64_t rows : {1, 32}) {
    bench_sample(rows, {}, "greedy only", 2.0f, true);
    bench_sample(rows, {}, "greedy", 2.0f, false);
    bench_sample(rows, {0.8f, 1.0f, 0.0f, 0, 1, 2}, "plain", 2.0f, false);
    bench_sample(rows, {0.7f, 0.95f, 0.0f, 20, 1, 2}, "top-k 20 top-p 0.95", 2.0f, false);
    bench_sample(rows, {0.7f, 0.95f, 0.0f, 0, 1, 2}, "top-p 0.95, steep", 6.0f, false);
    bench_sample(rows, {1.0f, 0.95f, 0.0f, 0, 1, 2}, "top-p 0.95, flat", 1.0f, false);
  }
  return 0;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main() { return nibble::kernels::cuda::run(); }
