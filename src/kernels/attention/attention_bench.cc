// Attention of one thread: prefill of 512 rows and decode of one row, 8 heads on 2 KV heads of 64
// dims. Arguments: ISA (device::Isa), bytes of a KV element, context. FLOP count 2 for every
// multiply-add of the unmasked triangle; bytes are the K and V that are read.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"

namespace nibble::kernels {
namespace {

constexpr int64_t kHeads = 8;

/// One sequence of `context` positions in memory, the last `rows` of them in the step.
struct Step {
  Step(KvType type, int64_t context, int64_t rows, device::Isa isa)
      : pool(1), q(static_cast<size_t>(rows * kHeads * 64)), out(q.size()) {
    pages.geometry = {.layers = 1, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .type = type};
    pages.pages = (context + 63) / 64;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& x : q) x = normal(random);
    const size_t kv_elems = static_cast<size_t>(pages.pages * 64 * 2 * 128);
    memory.resize(kv_elems * static_cast<size_t>(kv_type_bytes(type)));
    for (size_t i = 0; i < kv_elems; ++i) {
      const float x = normal(random);
      const auto* bits = reinterpret_cast<const std::byte*>(&x);
      if (type == KvType::kF32) {
        std::copy(bits, bits + 4, memory.data() + 4 * i);
      } else {
        std::copy(bits + 2, bits + 4, memory.data() + 2 * i);
      }
    }
    pages.data = memory.data();
    for (int32_t p = 0; p < pages.pages; ++p) table.push_back(p);
    sequence.rows = static_cast<int32_t>(rows);
    sequence.position_begin = static_cast<int32_t>(context - rows);
    sequence.pages = table.data();
    scratch.resize(static_cast<size_t>(attention_workspace_bytes(rows, kHeads, pages.geometry, 1)));
    exec = {.pool = &pool, .isa = isa, .activations = Activations::kF32, .workspace = &workspace};
    workspace = Workspace(scratch);
  }

  void run() {
    AttentionArgs args;
    args.q = q.data();
    args.out = out.data();
    args.q_stride = args.out_stride = kHeads * 64;
    args.heads = kHeads;
    args.scale = 0.125f;
    args.sequences = std::span(&sequence, 1);
    attention(exec, args, pages);
  }

  ThreadPool pool;
  std::vector<float> q, out;
  std::vector<std::byte> memory, scratch;
  std::vector<int32_t> table;
  KvPages pages;
  SequenceRows sequence;
  Workspace workspace{std::span<std::byte>()};
  Exec exec;
};

/// The two runs must agree before either is timed.
bool same_as_scalar(Step& step, KvType type, int64_t context, int64_t rows) {
  Step reference(type, context, rows, device::Isa::kScalar);
  reference.run();
  step.run();
  return reference.out == step.out;
}

void bench(benchmark::State& state, int64_t rows) {
  const auto isa = static_cast<device::Isa>(state.range(0));
  const KvType type = state.range(1) == 4 ? KvType::kF32 : KvType::kBf16;
  const int64_t context = state.range(2);
  Step step(type, context, rows, isa);
  if (!same_as_scalar(step, type, context, rows)) {
    state.SkipWithError("differs from scalar");
    return;
  }
  for (auto _ : state) step.run();
  const double past = static_cast<double>(context - rows);
  const double n = static_cast<double>(rows);
  const double pairs = n * past + n * (n + 1) / 2;
  const double iterations = static_cast<double>(state.iterations());
  state.SetLabel(std::string(device::isa_name(isa)));
  state.counters["GFLOP/s"] =
      benchmark::Counter(pairs * kHeads * 128 * 2 * 1e-9 * iterations, benchmark::Counter::kIsRate);
  state.counters["GB/s"] = benchmark::Counter(
      static_cast<double>(context * 2 * 128 * kv_type_bytes(type)) * 1e-9 * iterations,
      benchmark::Counter::kIsRate);
}

void prefill(benchmark::State& state) { bench(state, state.range(2)); }
void decode(benchmark::State& state) { bench(state, 1); }

void each_isa(benchmark::internal::Benchmark* b, std::initializer_list<int64_t> contexts) {
  for (const device::Isa isa : device::available_isas()) {
    if (isa == device::Isa::kScalar || isa == device::Isa::kAvx512Bf16) continue;
    for (const int64_t bytes : {4, 2}) {
      for (const int64_t context : contexts) b->Args({static_cast<int64_t>(isa), bytes, context});
    }
  }
}
BENCHMARK(prefill)->Unit(benchmark::kMicrosecond)->Apply([](auto* b) { each_isa(b, {512}); });
BENCHMARK(decode)->Unit(benchmark::kMicrosecond)->Apply([](auto* b) { each_isa(b, {512, 4096}); });

}  // namespace
}  // namespace nibble::kernels

BENCHMARK_MAIN();
