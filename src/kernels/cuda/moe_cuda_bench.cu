// Times whole MoE layers as CUDA graph replays and prints one row per token count.
//   moe_cuda_bench [--shape qwen|glm|tp8|gptoss|E,H,I,K] [--format nvfp4|mxfp4|mxfp8|bf16]
//                  [--rows 1,2,4,...] [--geometry auto|narrow|wide]
// Every layer of a graph has its own routing, its own x and the next weight set in turn, so that
// weights come from memory and not from the L2. TB/s counts the active experts' codes and scales
// once; % is of a device-to-device copy (read + write) measured in the same run. Two tokens of
// every size are checked against the reference before timing.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "kernels/cuda/moe_case.h"

namespace nibble::kernels::cuda {
namespace {

double median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

double copy_bandwidth() {
  const int64_t bytes = int64_t{4} << 30;
  DeviceBuffer a(bytes), b(bytes);
  fill_random(a.as<uint8_t>(), bytes, 1);
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    must(cudaEventRecord(begin), "event");
    must(cudaMemcpyAsync(b.data(), a.data(), static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice),
         "copy");
    must(cudaEventRecord(end), "event");
    must(cudaEventSynchronize(end), "event");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 2) times.push_back(ms);
  }
  return 2.0 * static_cast<double>(bytes) / (median(times) * 1e-3);
}

struct Options {
  std::string shape = "glm", format = "nvfp4", rows = "1,8,64,256,1024,4096";
  Geometry geometry = Geometry::kAuto;
};

void bench_rows(const MoeShape& s, const std::vector<std::unique_ptr<LayerWeights>>& sets,
                int64_t tokens, Geometry geometry, double copy) {
  const int layers = tokens <= 64 ? 24 : tokens <= 256 ? 12 : tokens <= 1024 ? 8 : 4;
  std::vector<std::unique_ptr<LayerInput>> inputs;
  double active = 0;
  for (int l = 0; l < layers; ++l) {
    inputs.push_back(std::make_unique<LayerInput>(s, tokens, 1000 + static_cast<uint64_t>(l)));
    active += static_cast<double>(inputs.back()->active_experts()) / layers;
  }
  DeviceBuffer workspace(moe_workspace_bytes(s, tokens)), y(tokens * s.hidden * 2);
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  double worst = 0;
  must(cudaMemset(y.data(), 0xFF, static_cast<size_t>(y.bytes())), "poison");
  must(moe_layer(s, sets[0]->view(), inputs[0]->args(y), workspace.data(), stream, geometry),
       "layer");
  must(cudaStreamSynchronize(stream), "layer");
  const auto result = download_bf16(y, tokens * s.hidden);
  for (const int64_t t : {int64_t{0}, tokens - 1}) {
    worst = std::max(worst, relative_error(result.data() + t * s.hidden,
                                           reference_token(*sets[0], *inputs[0], t)));
  }
  if (!(worst < 6e-3)) {
    std::printf("M %lld: WRONG, relative error %g\n", static_cast<long long>(tokens), worst);
    std::exit(1);
  }
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int l = 0; l < layers; ++l) {
    const LayerWeights& w = *sets[static_cast<size_t>(l) % sets.size()];
    must(moe_layer(s, w.view(), inputs[static_cast<size_t>(l)]->args(y), workspace.data(), stream,
                   geometry),
         "layer");
  }
  must(cudaStreamEndCapture(stream, &graph), "capture");
  must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<float> times;
  const int replays = tokens > 1024 ? 9 : 15;
  for (int i = 0; i < replays + 2; ++i) {
    must(cudaEventRecord(begin, stream), "event");
    must(cudaGraphLaunch(exec, stream), "replay");
    must(cudaEventRecord(end, stream), "event");
    must(cudaEventSynchronize(end), "replay");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end), "event");
    if (i >= 2) times.push_back(ms / static_cast<float>(layers));
  }
  const double us = 1e3 * median(times);
  const double spread = (*std::max_element(times.begin(), times.end()) -
                         *std::min_element(times.begin(), times.end())) *
                        1e3 / us;
  const formats::BlockFormat& f = formats::block_format(s.format);
  const double bits = f.code_bits + (f.group_cols > 0 ? 8.0 / f.group_cols : 0.0);
  const double weights = 3.0 * static_cast<double>(s.hidden * s.inter);
  const double rate = active * weights * bits / 8 / (us * 1e-6);
  const double flops = 2.0 * static_cast<double>(tokens * s.top_k) * weights / (us * 1e-6);
  std::printf("| %lld | %.1f | %.1f | %.1f | %.2f | %.0f | %.1f | %.1e |\n",
              static_cast<long long>(tokens), active, us, 100 * spread, rate * 1e-12,
              100 * rate / copy, flops * 1e-12, worst);
  std::fflush(stdout);
  must(cudaGraphExecDestroy(exec), "graph");
  must(cudaGraphDestroy(graph), "graph");
  must(cudaStreamDestroy(stream), "stream");
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--shape") o.shape = value;
    if (key == "--format") o.format = value;
    if (key == "--rows") o.rows = value;
    if (key == "--geometry" && value == "narrow") o.geometry = Geometry::kNarrow;
    if (key == "--geometry" && value == "wide") o.geometry = Geometry::kWide;
  }
  const MoeShape s = parse_shape(o.shape, o.format);
  const double copy = copy_bandwidth();
  std::vector<std::unique_ptr<LayerWeights>> sets;
  const int64_t layer_bytes =
      s.experts * (packed_bytes(s.format, Product::kGateUp, s.hidden, s.inter) +
                   packed_bytes(s.format, Product::kDown, s.hidden, s.inter));
  const int count = layer_bytes < (int64_t{1} << 30) ? 3 : 2;
  for (int i = 0; i < count; ++i)
    sets.push_back(std::make_unique<LayerWeights>(s, 10 + static_cast<uint64_t>(i)));
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %s %s E %lld hidden %lld inter %lld top-k %lld; copy %.2f TB/s\n", device.name,
              o.shape.c_str(), o.format.c_str(), static_cast<long long>(s.experts),
              static_cast<long long>(s.hidden), static_cast<long long>(s.inter),
              static_cast<long long>(s.top_k), copy * 1e-12);
  std::printf("| M | active | layer us | spread %% | TB/s | %% copy | TFLOP/s | error |\n");
  std::istringstream rows(o.rows);
  std::string item;
  while (std::getline(rows, item, ','))
    bench_rows(s, sets, std::atoll(item.c_str()), o.geometry, copy);
  return 0;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main(int argc, char** argv) { return nibble::kernels::cuda::run(argc, argv); }
