#include <algorithm>
#include <cmath>
#include <memory>

#include "device/cuda.h"
#include "kernels/cuda/moe_bench.h"
#include "kernels/cuda/moe_case.h"

namespace nibble::kernels::cuda {
namespace {

double median(std::vector<float> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

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

constexpr double kErrorBound = 6e-3;

/// Largest relative error of the first and the last token.
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
    const double error =
        relative_error(result.data() + t * s.hidden, reference_token(reference, input, t));
    if (!(error < kErrorBound)) {
      throw test::CheckAborted(
          cat("wrong result for ", input.tokens, " rows: relative error ", error));
    }
    worst = std::max(worst, error);
  }
  return worst;
}

/// The weight sets of one form of the scales, taken in turn.
struct ScaleSets {
  std::string scales;
  WeightSets sets;
};

/// Times one row count; forms of the scales take turns, so that all see the same clocks.
std::vector<MoeTiming> bench_rows(const MoeShape& s, const std::vector<ScaleSets>& forms,
                                  const LayerWeights& reference, int64_t tokens,
                                  Geometry geometry) {
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
  std::vector<MoeTiming> timings;
  std::vector<std::unique_ptr<LayerGraph>> graphs;
  for (const ScaleSets& form : forms) {
    MoeTiming t;
    t.scales = form.scales;
    t.rows = tokens;
    t.active_experts = active;
    t.error = check_result(s, *form.sets.front(), reference, *inputs.front(), workspace, y, stream,
                           geometry);
    timings.push_back(t);
    graphs.push_back(
        std::make_unique<LayerGraph>(s, form.sets, inputs, workspace, y, stream, geometry));
  }
  std::vector<std::vector<float>> times(forms.size());
  const int replays = tokens > 1024 ? 9 : 15;
  for (int i = 0; i < replays + 2; ++i) {
    for (size_t g = 0; g < graphs.size(); ++g) {
      const double us = graphs[g]->replay();
      if (i >= 2) times[g].push_back(static_cast<float>(us));
    }
  }
  for (size_t g = 0; g < graphs.size(); ++g) {
    MoeTiming& t = timings[g];
    t.microseconds = median(times[g]);
    const auto [low, high] = std::minmax_element(times[g].begin(), times[g].end());
    t.spread = (*high - *low) / t.microseconds;
    const LayerWeights& w = *forms[g].sets.front();
    const double layer_bytes = static_cast<double>(w.gate_up.bytes() + w.down.bytes());
    t.bytes_per_second =
        active * layer_bytes / static_cast<double>(s.experts) / (t.microseconds * 1e-6);
    t.flops = 2.0 * static_cast<double>(tokens * s.top_k * 3 * s.hidden * s.inter) /
              (t.microseconds * 1e-6);
  }
  graphs.clear();
  must(cudaStreamDestroy(stream), "stream");
  return timings;
}

Result<Geometry> parse_geometry(const std::string& name) {
  if (name == "auto") return Geometry::kAuto;
  if (name == "few") return Geometry::kFew;
  if (name == "slices") return Geometry::kSlices;
  if (name == "small") return Geometry::kSmall;
  if (name == "narrow") return Geometry::kNarrow;
  if (name == "wide") return Geometry::kWide;
  return Error(Code::kInvalidArgument, cat("geometry '", name, "' is unknown"));
}

Result<void> check_options(const MoeShape& s, const LayerFormats& f,
                           const MoeBenchOptions& options) {
  for (const FormatId format : {f.gate_up, f.down}) {
    const int64_t group = group_cols(format);
    if (s.experts > 1024 || s.hidden % 4 != 0 || s.hidden % group != 0 || s.inter % group != 0) {
      return Error(
          Code::kInvalidArgument,
          cat("shape '", options.shape, "': at most 1024 experts; hidden and inter must be ",
              "multiples of ", group, " for ", formats::block_format(format).name));
    }
    for (const std::string& scales : options.scales) {
      if (scales != "plain" && (scales != "csf" || !has_csf(format))) {
        return Error(Code::kInvalidArgument,
                     cat("scales '", scales, "' of format ", formats::block_format(format).name));
      }
    }
  }
  for (const int64_t rows : options.rows) {
    if (rows < 1 || rows > (int64_t{1} << 28) / s.top_k) {
      return Error(Code::kInvalidArgument, cat("rows ", rows));
    }
  }
  return {};
}

MoeBenchReport run(const MoeShape& s, LayerFormats f, Geometry geometry,
                   const MoeBenchOptions& options,
                   const std::function<void(const MoeBenchReport&)>& progress) {
  MoeBenchReport report;
  int index = 0;
  cudaDeviceProp device;
  must(cudaGetDevice(&index), "device");
  must(cudaGetDeviceProperties(&device, index), "device");
  report.device = device.name;
  report.experts = s.experts;
  report.hidden = s.hidden;
  report.inter = s.inter;
  report.top_k = s.top_k;
  report.copy_bandwidth = must(device::cuda_copy_bandwidth(), "copy bandwidth");
  const int64_t layer_bytes =
      s.experts * (packed_bytes(f.gate_up, Product::kGateUp, s.hidden, s.inter) +
                   packed_bytes(f.down, Product::kDown, s.hidden, s.inter));
  // More than the L2 (the active experts' share of a set may be small, so layers differ too).
  const int count = layer_bytes < (int64_t{1} << 30) ? 3 : 2;
  constexpr uint64_t kSeed = 10;
  std::vector<ScaleSets> forms;
  for (const std::string& scales : options.scales) {
    f.scales = scales == "csf" ? ScaleForm::kCsf : ScaleForm::kPlain;
    forms.push_back({scales, {}});
    for (int i = 0; i < count; ++i) {
      forms.back().sets.push_back(
          std::make_unique<LayerWeights>(s, f, kSeed + static_cast<uint64_t>(i)));
    }
  }
  // Results are checked against the plain weights of the first set.
  std::unique_ptr<LayerWeights> own;
  const LayerWeights* reference = nullptr;
  for (const ScaleSets& form : forms) {
    if (form.scales == "plain") reference = form.sets.front().get();
  }
  if (reference == nullptr) {
    f.scales = ScaleForm::kPlain;
    own = std::make_unique<LayerWeights>(s, f, kSeed);
    reference = own.get();
  }
  for (const ScaleSets& form : forms) {
    const LayerWeights& w = *form.sets.front();
    if (form.scales != "csf") continue;
    report.csf_share = static_cast<double>(w.gate_up.bytes() + w.down.bytes()) /
                       static_cast<double>(reference->gate_up.bytes() + reference->down.bytes());
  }
  progress(report);
  for (const int64_t rows : options.rows) {
    for (MoeTiming& t : bench_rows(s, forms, *reference, rows, geometry)) {
      report.timings.push_back(std::move(t));
    }
    progress(report);
  }
  return report;
}

}  // namespace

Result<MoeBenchReport> bench_moe(const MoeBenchOptions& options,
                                 const std::function<void(const MoeBenchReport&)>& progress) {
  NIBBLE_TRY(const MoeShape shape, parse_shape(options.shape));
  NIBBLE_TRY(const LayerFormats formats, parse_formats(options.format));
  NIBBLE_TRY(const Geometry geometry, parse_geometry(options.geometry));
  NIBBLE_TRY(check_options(shape, formats, options));
  try {
    return run(shape, formats, geometry, options, progress);
  } catch (const test::CheckAborted& e) {  // CUDA errors of the check material
    return Error(Code::kInternal, e.what());
  }
}

}  // namespace nibble::kernels::cuda
