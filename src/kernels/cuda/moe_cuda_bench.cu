// Times whole MoE layers as CUDA graph replays and prints one row per token count.
//   moe_cuda_bench [--shape qwen|glm|tp8|gptoss|30b|E,H,I,K] [--format nvfp4|...|gate_up+down]
//                  [--rows 1,2,4,...] [--geometry auto|fewest|few|narrow|wide] [--scales
//                  plain|both]
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
  std::string shape = "glm", format = "nvfp4", rows = "1,8,64,256,1024,4096", scales = "plain";
  Geometry geometry = Geometry::kAuto;
};
using WeightSets = std::vector<std::unique_ptr<LayerWeights>>;

/// A captured graph of layers, each with its own input and the next weight set in turn.
class LayerGraph {
 public:
  LayerGraph(const MoeShape& s, const WeightSets& sets,
             const std::vector<std::unique_ptr<LayerInput>>& inputs, DeviceBuffer& workspace,
             DeviceBuffer& y, cudaStream_t stream, Geometry geometry)
      : stream_(stream), layers_(static_cast<double>(inputs.size())) {
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (size_t l = 0; l < inputs.size(); ++l) {
      const MoeWeights w = sets[l % sets.size()]->view();
      must(moe_layer(s, {{&w, 1}, nullptr}, inputs[l]->args(y), workspace.data(), stream, geometry),
           "layer");
    }
    must(cudaStreamEndCapture(stream, &graph_), "capture");
    must(cudaGraphInstantiate(&exec_, graph_, 0), "instantiate");
    must(cudaEventCreate(&begin_), "event");
    must(cudaEventCreate(&end_), "event");
  }
  LayerGraph(const LayerGraph&) = delete;
  LayerGraph& operator=(const LayerGraph&) = delete;
  ~LayerGraph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  /// Microseconds a layer of one replay.
  double replay() {
    must(cudaEventRecord(begin_, stream_), "event");
    must(cudaGraphLaunch(exec_, stream_), "replay");
    must(cudaEventRecord(end_, stream_), "event");
    must(cudaEventSynchronize(end_), "replay");
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin_, end_), "event");
    return 1e3 * static_cast<double>(ms) / layers_;
  }

 private:
  cudaStream_t stream_;
  double layers_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t begin_, end_;
};

double check_result(const MoeShape& s, const LayerWeights& w, const LayerWeights& reference,
                    const LayerInput& input, DeviceBuffer& workspace, DeviceBuffer& y,
                    cudaStream_t stream, Geometry geometry) {
  must(cudaMemset(y.data(), 0xFF, static_cast<size_t>(y.bytes())), "poison");
  const MoeWeights view = w.view();
  must(moe_layer(s, {{&view, 1}, nullptr}, input.args(y), workspace.data(), stream, geometry),
       "layer");
  must(cudaStreamSynchronize(stream), "layer");
  const auto result = download_floats(y, input.tokens * s.hidden);
  double worst = 0;
  for (const int64_t t : {int64_t{0}, input.tokens - 1}) {
    worst = std::max(
        worst, relative_error(result.data() + t * s.hidden, reference_token(reference, input, t)));
  }
  if (!(worst < 6e-3)) {
    std::printf("M %lld: WRONG, relative error %g\n", static_cast<long long>(input.tokens), worst);
    std::exit(1);
  }
  return worst;
}

void bench_rows(const MoeShape& s, const WeightSets& plain, const WeightSets& csf, int64_t tokens,
                Geometry geometry, double copy) {
  const int layers = tokens <= 64 ? 24 : tokens <= 256 ? 12 : tokens <= 1024 ? 8 : 4;
  std::vector<std::unique_ptr<LayerInput>> inputs;
  double active = 0;
  for (int l = 0; l < layers; ++l) {
    inputs.push_back(std::make_unique<LayerInput>(s, tokens, 1000 + static_cast<uint64_t>(l)));
    active += static_cast<double>(inputs.back()->active_experts()) / layers;
  }
  DeviceBuffer workspace(moe_workspace_bytes(s, tokens)), y(tokens * s.hidden * 4);
  must(cudaMemset(workspace.data(), 0, kMoeZeroedBytes), "zero");
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  double worst = 0;
  std::vector<std::unique_ptr<LayerGraph>> graphs;
  for (const WeightSets* sets : {&plain, &csf}) {
    if (sets->empty()) continue;
    worst = std::max(worst, check_result(s, *sets->front(), *plain.front(), *inputs.front(),
                                         workspace, y, stream, geometry));
    graphs.push_back(
        std::make_unique<LayerGraph>(s, *sets, inputs, workspace, y, stream, geometry));
  }
  // Plain and compressed scales take turns, so that both see the same clocks.
  std::vector<float> times[2];
  const int replays = tokens > 1024 ? 9 : 15;
  for (int i = 0; i < replays + 2; ++i) {
    for (size_t g = 0; g < graphs.size(); ++g) {
      const double us = graphs[g]->replay();
      if (i >= 2) times[g].push_back(static_cast<float>(us));
    }
  }
  const double us = median(times[0]);
  const double spread = (*std::max_element(times[0].begin(), times[0].end()) -
                         *std::min_element(times[0].begin(), times[0].end())) /
                        us;
  const LayerWeights& w = *plain.front();
  const double expert_bytes =
      static_cast<double>(w.gate_up.bytes() + w.down.bytes()) / static_cast<double>(s.experts);
  const double rate = active * expert_bytes / (us * 1e-6);
  const double flops =
      2.0 * static_cast<double>(tokens * s.top_k * 3 * s.hidden * s.inter) / (us * 1e-6);
  std::printf("| %lld | %.1f | %.1f | %.1f | %.2f | %.0f | %.1f | %.1e |",
              static_cast<long long>(tokens), active, us, 100 * spread, rate * 1e-12,
              100 * rate / copy, flops * 1e-12, worst);
  if (graphs.size() > 1) {
    const double other = median(times[1]);
    std::printf(" %.1f | %.3f |", other, us / other);
  }
  std::printf("\n");
  std::fflush(stdout);
  graphs.clear();
  must(cudaStreamDestroy(stream), "stream");
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--shape") o.shape = value;
    if (key == "--format") o.format = value;
    if (key == "--rows") o.rows = value;
    if (key == "--scales") o.scales = value;
    if (key == "--geometry" && value == "fewest") o.geometry = Geometry::kFewest;
    if (key == "--geometry" && value == "few") o.geometry = Geometry::kFew;
    if (key == "--geometry" && value == "narrow") o.geometry = Geometry::kNarrow;
    if (key == "--geometry" && value == "wide") o.geometry = Geometry::kWide;
  }
  const MoeShape s = parse_shape(o.shape);
  LayerFormats f = parse_formats(o.format);
  const double copy = copy_bandwidth();
  const int64_t layer_bytes =
      s.experts * (packed_bytes(f.gate_up, Product::kGateUp, s.hidden, s.inter) +
                   packed_bytes(f.down, Product::kDown, s.hidden, s.inter));
  const int count = layer_bytes < (int64_t{1} << 30) ? 3 : 2;
  WeightSets plain, csf;
  for (int i = 0; i < count; ++i) {
    const uint64_t seed = 10 + static_cast<uint64_t>(i);
    f.scales = ScaleForm::kPlain;
    plain.push_back(std::make_unique<LayerWeights>(s, f, seed));
    if (o.scales != "both") continue;
    f.scales = ScaleForm::kCsf;
    csf.push_back(std::make_unique<LayerWeights>(s, f, seed));
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "device");
  std::printf("%s, %s %s E %lld hidden %lld inter %lld top-k %lld; copy %.2f TB/s\n", device.name,
              o.shape.c_str(), o.format.c_str(), static_cast<long long>(s.experts),
              static_cast<long long>(s.hidden), static_cast<long long>(s.inter),
              static_cast<long long>(s.top_k), copy * 1e-12);
  if (!csf.empty()) {
    std::printf("compressed scales: %.4f of the plain layer's bytes\n",
                static_cast<double>(csf[0]->gate_up.bytes() + csf[0]->down.bytes()) /
                    static_cast<double>(plain[0]->gate_up.bytes() + plain[0]->down.bytes()));
  }
  std::printf("| M | active | layer us | spread %% | TB/s | %% copy | TFLOP/s | error |%s\n",
              csf.empty() ? "" : " CSF us | plain / CSF |");
  std::istringstream rows(o.rows);
  std::string item;
  while (std::getline(rows, item, ','))
    bench_rows(s, plain, csf, std::atoll(item.c_str()), o.geometry, copy);
  return 0;
}

}  // namespace
}  // namespace nibble::kernels::cuda

int main(int argc, char** argv) { return nibble::kernels::cuda::run(argc, argv); }
