#include "model/glm4_moe_cuda.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <tuple>
#include <vector>

#include "device/cuda.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/sample.h"
#include "load/cuda_ring.h"
#include "model/cuda_step.h"
#include "model/glm4_moe.h"
#include "plan/plan.h"

namespace nibble::model {
namespace {

namespace cuda = kernels::cuda;
using cuda::KvCache;
using kernels::Workspace;
using load::cuda_ok;
using load::CudaLayer;

// Decode steps of up to this many rows are captured; padding goes to the next power of two.
constexpr int64_t kMaxCapturedRows = 64;
// Shortest context that a captured graph's grids are sized for; then the next powers of two.
constexpr int64_t kMinCapturedContext = 1024;

int64_t next_power(int64_t value, int64_t from) {
  while (from < value) from *= 2;
  return from;
}

/// Device pointers of one step; the sizes are the largest step's.
struct Buffers {
  float* residual = nullptr;    // [rows, hidden]
  float* delta = nullptr;       // [rows, hidden]
  float* mlp = nullptr;         // [rows, hidden], the shared expert's
  float* normed_f32 = nullptr;  // [rows, hidden], norm_route's
  uint16_t* normed = nullptr;   // [rows, hidden] BF16
  float* qkv = nullptr;         // [rows, q + 2 kv]
  uint16_t* q = nullptr;        // [rows, q] BF16
  uint16_t* mixed = nullptr;    // [rows, q] BF16
  int32_t* ids = nullptr;       // [rows, top_k]
  float* weights = nullptr;     // [rows, top_k]
  uint16_t* last = nullptr;     // [logit rows, hidden] BF16
  float* last_f32 = nullptr;    // the same unrounded
  float* logits = nullptr;      // [logit rows, vocab]
  int32_t* drawn = nullptr;     // [logit rows] tokens, for the next step
  // Scratch of the ops, zero at first.
  std::byte *linear = nullptr, *attention = nullptr, *router = nullptr, *moe = nullptr,
            *sample = nullptr;
  int64_t attention_bytes = 0, sample_bytes = 0;
};

class Glm4MoeCuda final : public Model {
 public:
  Glm4MoeCuda(const recipe::ModelConfig& config, std::shared_ptr<const load::CudaWeights> weights,
              kernels::KvType kv)
      : config_(config), weights_(std::move(weights)), kv_(kv) {}
  ~Glm4MoeCuda() override;

  const recipe::ModelConfig& config() const override { return config_; }
  Place place() const override { return Place::kCuda; }
  kernels::KvGeometry kv_geometry(kernels::Activations) const override {
    kernels::KvGeometry kv = plan::kv_geometry(config_, kernels::Activations::kBf16);
    kv.page_tokens = cuda::kKvPageTokens;
    kv.type = kv_;
    return kv;
  }
  Result<device::Memory> allocate_pages(int64_t bytes) override;
  int64_t workspace_bytes(int64_t, int64_t, int) const override { return 0; }
  Result<void> prepare(const StepLimits& limits) override;
  bool samples() const override { return true; }
  Result<void> forward(const kernels::Exec& exec, const StepInput& input,
                       const kernels::KvPages& pages, const StepOutput& output) override;
  Result<void> start(const kernels::Exec& exec, const StepInput& input,
                     std::span<const RowSampling> sampling, const kernels::KvPages& pages) override;
  Result<Draws> finish() override;

 private:
  // Steps take turns with two places for their facts and draws: one is filled while the other's
  // step is under way.
  struct Turn {
    CudaStep step;
    cudaEvent_t done = nullptr;
    // Of captured decode steps: rows, context, greedy. All with the same pages.
    std::map<std::tuple<int64_t, int64_t, bool>, cudaGraphExec_t> graphs;
  };

  int64_t q_dim() const { return config_.heads * config_.head_dim; }
  int64_t kv_dim() const { return config_.kv_heads * config_.head_dim; }
  cuda::MoeShape mlp_shape(const CudaLayer& layer) const {
    return {.experts = 1, .hidden = config_.hidden_size, .inter = layer.mlp_inter, .top_k = 1};
  }
  cuda::MoeShape moe_shape() const {
    return {.experts = config_.experts,
            .hidden = config_.hidden_size,
            .inter = config_.moe_intermediate_size,
            .top_k = config_.top_k};
  }
  void carve(Workspace& space, const StepLimits& limits, const KvCache& cache);
  KvCache cache_of(const kernels::KvPages& pages) const;

  /// Queues a step; `taps` copies synchronously in between (never while capturing).
  Result<void> queue(CudaStep& step, const KvCache& cache, int64_t context, bool draw,
                     const StepTaps& taps);
  Result<void> queue_attention(const CudaStep& step, const CudaLayer& layer, int64_t index,
                               const KvCache& cache, int64_t context);
  Result<void> queue_feed_forward(int64_t rows, const CudaLayer& layer,
                                  const cuda::AddRmsNormArgs& norm);
  Result<void> queue_head(const CudaStep& step, bool draw);
  Result<void> tap(int64_t rows, int64_t index, const StepTaps& taps);
  Result<void> tap_choice(int64_t rows, int64_t index, const StepTaps& taps);
  Result<void> replay(Turn& turn, const KvCache& cache, int64_t context);
  template <typename T>
  Result<void> copy_back(T* to, const void* from, int64_t count) {
    NIBBLE_TRY(cuda_ok(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T),
                                       cudaMemcpyDeviceToHost, stream_),
                       "outputs"));
    return cuda_ok(cudaStreamSynchronize(stream_), "step");
  }

  const recipe::ModelConfig config_;
  const std::shared_ptr<const load::CudaWeights> weights_;
  const kernels::KvType kv_;
  StepLimits limits_;
  cudaStream_t stream_ = nullptr;
  std::array<Turn, 2> turns_;
  int64_t started_ = 0, finished_ = 0;  // step number n takes turn n % 2
  Buffers b_;
  device::Memory memory_, inv_freq_;
  const std::byte* captured_pages_ = nullptr;
};

Glm4MoeCuda::~Glm4MoeCuda() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  for (const Turn& turn : turns_) {
    for (const auto& [key, graph] : turn.graphs) cudaGraphExecDestroy(graph);
    if (turn.done != nullptr) cudaEventDestroy(turn.done);
  }
  cudaStreamDestroy(stream_);
}

Result<device::Memory> Glm4MoeCuda::allocate_pages(int64_t bytes) {
  NIBBLE_TRY(device::cuda_use(weights_->device));
  NIBBLE_TRY(device::Memory memory, device::cuda_memory(bytes), "KV pages");
  NIBBLE_TRY(cuda_ok(cudaMemset(memory.data(), 0, static_cast<size_t>(bytes)), "KV pages"));
  return memory;
}

KvCache Glm4MoeCuda::cache_of(const kernels::KvPages& pages) const {
  KvCache cache;
  cache.data = pages.data;
  cache.layers = config_.layers;
  cache.pages = pages.pages;
  cache.kv_heads = config_.kv_heads;
  cache.head_dim = config_.head_dim;
  cache.format = kv_ == kernels::KvType::kFp8 ? cuda::KvFormat::kFp8E4m3 : cuda::KvFormat::kBf16;
  return cache;
}

void Glm4MoeCuda::carve(Workspace& space, const StepLimits& limits, const KvCache& cache) {
  const int64_t rows = limits.max_rows, hidden = config_.hidden_size;
  const auto bytes = [&space](int64_t count) {
    return space.take<std::byte>((count + 255) / 256 * 256);
  };
  const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(bytes(4 * count)); };
  const auto halves = [&](int64_t count) { return reinterpret_cast<uint16_t*>(bytes(2 * count)); };
  b_.residual = floats(rows * hidden);
  b_.delta = floats(rows * hidden);
  b_.mlp = floats(rows * hidden);
  b_.normed_f32 = floats(rows * hidden);
  b_.normed = halves(rows * hidden);
  b_.qkv = floats(rows * (q_dim() + 2 * kv_dim()));
  b_.q = halves(rows * q_dim());
  b_.mixed = halves(rows * q_dim());
  b_.ids = reinterpret_cast<int32_t*>(bytes(4 * rows * std::max<int64_t>(config_.top_k, 1)));
  b_.weights = floats(rows * std::max<int64_t>(config_.top_k, 1));
  b_.last = halves(limits.max_logit_rows * hidden);
  b_.last_f32 = floats(limits.max_logit_rows * hidden);
  b_.logits = floats(limits.max_logit_rows * config_.vocab_size);
  b_.drawn = reinterpret_cast<int32_t*>(bytes(4 * limits.max_logit_rows));
  b_.linear = bytes(cuda::linear_scratch_bytes(rows, std::max(hidden, q_dim())));
  b_.attention_bytes =
      cuda::attention_scratch_bytes(cache, config_.heads, rows, limits.max_context);
  b_.attention = bytes(b_.attention_bytes);
  int64_t moe = 0;
  for (const CudaLayer& layer : weights_->layers) {
    if (layer.has_mlp) moe = std::max(moe, cuda::moe_workspace_bytes(mlp_shape(layer), rows));
    if (layer.routed) moe = std::max(moe, cuda::moe_workspace_bytes(moe_shape(), rows));
  }
  b_.moe = bytes(moe);
  if (config_.experts > 0) b_.router = bytes(cuda::router_scratch_bytes(rows, config_.experts));
  b_.sample_bytes = cuda::sample_scratch_bytes(limits.max_logit_rows, config_.vocab_size);
  b_.sample = bytes(b_.sample_bytes);
}

Result<void> Glm4MoeCuda::prepare(const StepLimits& limits) {
  NIBBLE_TRY(device::cuda_use(weights_->device));
  limits_ = limits;
  NIBBLE_TRY(cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
  for (Turn& turn : turns_) {
    NIBBLE_TRY(cuda_ok(cudaEventCreateWithFlags(&turn.done, cudaEventDisableTiming), "event"));
    NIBBLE_TRY(turn.step.allocate(limits));
  }
  const std::vector<float> inv_freq = glm4_moe_inv_freq(config_);
  const size_t bytes = inv_freq.size() * sizeof(float);
  NIBBLE_TRY(inv_freq_, device::cuda_memory(static_cast<int64_t>(bytes)));
  NIBBLE_TRY(cuda_ok(cudaMemcpy(inv_freq_.data(), inv_freq.data(), bytes, cudaMemcpyHostToDevice),
                     "rope"));
  const KvCache cache = cache_of({});
  // A first carving over an endless block counts.
  constexpr size_t kEndless = size_t{1} << 46;
  Workspace counting({static_cast<std::byte*>(nullptr), kEndless});
  carve(counting, limits, cache);
  NIBBLE_TRY(memory_, device::cuda_memory(counting.mark() + 256), "workspace");
  NIBBLE_TRY(cuda_ok(cudaMemset(memory_.data(), 0, memory_.bytes().size()), "workspace"));
  Workspace space(memory_.bytes());
  carve(space, limits, cache);
  return cuda_ok(cudaDeviceSynchronize(), "workspace");
}

Result<void> Glm4MoeCuda::queue_attention(const CudaStep& step, const CudaLayer& layer,
                                          int64_t index, const KvCache& cache, int64_t context) {
  const int64_t rows = step.rows(), width = q_dim() + 2 * kv_dim();
  for (const load::CudaQkvPart& part : layer.qkv) {
    cuda::LinearArgs args;
    args.x = b_.normed;
    args.rows = rows;
    args.y = b_.qkv + part.column;
    args.y_stride = width;
    NIBBLE_TRY(cuda::linear(part.weight, args, b_.linear, stream_));
  }
  cuda::AttentionPrepareArgs prepare;
  prepare.qkv = b_.qkv;
  prepare.row_stride = width;
  prepare.heads = config_.heads;
  prepare.layer = index;
  prepare.q_norm = layer.q_norm;
  prepare.k_norm = layer.k_norm;
  prepare.norm_eps = config_.rms_eps;
  prepare.rotary_dim = config_.rotary_dim;
  prepare.inv_freq = reinterpret_cast<const float*>(inv_freq_.data());
  prepare.q = b_.q;
  cuda::AttentionArgs args;
  args.q = b_.q;
  args.out = b_.mixed;
  args.heads = config_.heads;
  args.layer = index;
  args.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  cuda::AttentionHint hint;
  hint.max_context = context;
  hint.max_sequence_rows = step.max_sequence_rows();
  NIBBLE_TRY(cuda::attention_step(prepare, args, cache, step.view(), hint, b_.attention,
                                  b_.attention_bytes, stream_));
  cuda::LinearArgs project;
  project.x = b_.mixed;
  project.rows = rows;
  project.y = b_.delta;
  return cuda::linear(layer.o, project, b_.linear, stream_);
}

Result<void> Glm4MoeCuda::queue_feed_forward(int64_t rows, const CudaLayer& layer,
                                             const cuda::AddRmsNormArgs& norm) {
  cuda::MoeArgs dense;
  dense.x = b_.normed;
  dense.tokens = rows;
  if (!layer.routed) {
    NIBBLE_TRY(cuda::add_rms_norm(norm, stream_));
    dense.y = b_.delta;
    return cuda::moe_layer(mlp_shape(layer), {{&layer.mlp, 1}}, dense, b_.moe, stream_);
  }
  kernels::RouterParams params = glm4_moe_router(config_);
  params.correction_bias = layer.correction_bias;
  NIBBLE_TRY(cuda::norm_route(norm, layer.router, params, b_.router, b_.ids, b_.weights, stream_));
  if (layer.has_mlp) {
    dense.y = b_.mlp;
    NIBBLE_TRY(cuda::moe_layer(mlp_shape(layer), {{&layer.mlp, 1}}, dense, b_.moe, stream_));
  }
  cuda::MoeArgs args;
  args.x = b_.normed;
  args.tokens = rows;
  args.ids = b_.ids;
  args.weights = b_.weights;
  args.add = layer.has_mlp ? b_.mlp : nullptr;
  args.y = b_.delta;
  return cuda::moe_layer(moe_shape(), {layer.groups, layer.rank}, args, b_.moe, stream_);
}

Result<void> Glm4MoeCuda::queue_head(const CudaStep& step, bool draw) {
  const int64_t count = step.logit_count();
  if (count == 0) return {};
  cuda::GatherRmsNormArgs gather;
  gather.residual = b_.residual;
  gather.delta = b_.delta;
  gather.rows = step.logit_rows();
  gather.count = count;
  gather.hidden = config_.hidden_size;
  gather.weight = weights_->final_norm;
  gather.eps = config_.rms_eps;
  gather.normed = b_.last;
  gather.normed_f32 = b_.last_f32;
  NIBBLE_TRY(cuda::gather_rms_norm(gather, stream_));
  cuda::LinearArgs head;
  head.x = b_.last;
  head.rows = count;
  head.y = b_.logits;
  NIBBLE_TRY(cuda::linear(weights_->head, head, b_.linear, stream_));
  if (!draw) return {};
  cuda::SampleArgs sample;
  sample.logits = b_.logits;
  sample.rows = count;
  sample.vocab = sample.row_stride = config_.vocab_size;
  sample.params = static_cast<const cuda::RowSampling*>(step.sampling());
  sample.greedy_only = step.greedy();
  sample.tokens = step.tokens_out();
  sample.again = b_.drawn;
  sample.logprobs = step.logprobs_out();
  return cuda::sample(sample, b_.sample, b_.sample_bytes, stream_);
}

Result<void> Glm4MoeCuda::queue(CudaStep& step, const KvCache& cache, int64_t context, bool draw,
                                const StepTaps& taps) {
  const int64_t rows = step.rows();
  NIBBLE_TRY(step.upload(context, stream_));
  NIBBLE_TRY(cuda::embed(weights_->embedding, step.view(), b_.drawn, b_.residual, stream_));
  cuda::AddRmsNormArgs norm;
  norm.residual = b_.residual;
  norm.rows = rows;
  norm.hidden = config_.hidden_size;
  norm.eps = config_.rms_eps;
  norm.normed = b_.normed;
  int64_t index = 0;
  for (const CudaLayer& layer : weights_->layers) {
    NIBBLE_TRY(tap(rows, index, taps));
    norm.delta = index == 0 ? nullptr : b_.delta;
    norm.weight = layer.input_norm;
    norm.normed_f32 = nullptr;
    NIBBLE_TRY(cuda::add_rms_norm(norm, stream_));
    NIBBLE_TRY(queue_attention(step, layer, index, cache, context));
    norm.delta = b_.delta;
    norm.weight = layer.post_norm;
    norm.normed_f32 = layer.routed ? b_.normed_f32 : nullptr;
    NIBBLE_TRY(queue_feed_forward(rows, layer, norm));
    if (layer.routed) NIBBLE_TRY(tap_choice(rows, index, taps));
    ++index;
  }
  NIBBLE_TRY(tap(rows, index, taps));
  return queue_head(step, draw);
}

// Residual and delta of the layer before, added on the host.
Result<void> Glm4MoeCuda::tap(int64_t rows, int64_t index, const StepTaps& taps) {
  if (taps.hidden == nullptr) return {};
  const int64_t count = rows * config_.hidden_size;
  float* to = taps.hidden + index * count;
  NIBBLE_TRY(copy_back(to, b_.residual, count));
  if (index == 0) return {};
  std::vector<float> delta(static_cast<size_t>(count));
  NIBBLE_TRY(copy_back(delta.data(), b_.delta, count));
  for (int64_t i = 0; i < count; ++i) to[i] += delta[static_cast<size_t>(i)];
  return {};
}

Result<void> Glm4MoeCuda::tap_choice(int64_t rows, int64_t index, const StepTaps& taps) {
  const int64_t count = rows * config_.top_k;
  if (taps.topk_ids != nullptr) NIBBLE_TRY(copy_back(taps.topk_ids + index * count, b_.ids, count));
  if (taps.topk_weights != nullptr) {
    NIBBLE_TRY(copy_back(taps.topk_weights + index * count, b_.weights, count));
  }
  return {};
}

// Captures the turn's decode step on its first use, then replays it.
Result<void> Glm4MoeCuda::replay(Turn& turn, const KvCache& cache, int64_t context) {
  NIBBLE_CHECK(captured_pages_ == nullptr || captured_pages_ == cache.data);
  captured_pages_ = cache.data;
  cudaGraphExec_t& exec = turn.graphs[{turn.step.rows(), context, turn.step.greedy()}];
  if (exec == nullptr) {
    NIBBLE_TRY(
        cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture"));
    const Result<void> queued = queue(turn.step, cache, context, true, {});
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
    NIBBLE_TRY(queued);
    NIBBLE_TRY(cuda_ok(ended, "capture"));
    const cudaError_t made = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    NIBBLE_TRY(cuda_ok(made, "capture"));
  }
  return cuda_ok(cudaGraphLaunch(exec, stream_), "step");
}

Result<void> Glm4MoeCuda::forward(const kernels::Exec&, const StepInput& input,
                                  const kernels::KvPages& pages, const StepOutput& output) {
  NIBBLE_CHECK(started_ == finished_, "a step is under way");
  NIBBLE_TRY(device::cuda_use(weights_->device));
  CudaStep& step = turns_[0].step;
  const auto wanted = static_cast<int64_t>(input.logit_rows.size());
  step.set(input, {}, static_cast<int64_t>(input.tokens.size()), wanted);
  NIBBLE_TRY(queue(step, cache_of(pages), step.max_context(), false, output.taps));
  NIBBLE_TRY(cuda_ok(cudaStreamSynchronize(stream_), "step"));
  if (output.logits != nullptr && wanted > 0) {
    NIBBLE_TRY(copy_back(output.logits, b_.logits, wanted * config_.vocab_size));
  }
  if (output.final_hidden != nullptr && wanted > 0) {
    NIBBLE_TRY(copy_back(output.final_hidden, b_.last_f32, wanted * config_.hidden_size));
  }
  return {};
}

Result<void> Glm4MoeCuda::start(const kernels::Exec&, const StepInput& input,
                                std::span<const RowSampling> sampling,
                                const kernels::KvPages& pages) {
  NIBBLE_CHECK(started_ - finished_ < 2, "two steps are under way");
  NIBBLE_TRY(device::cuda_use(weights_->device));
  Turn& turn = turns_[static_cast<size_t>(started_ % 2)];
  const auto rows = static_cast<int64_t>(input.tokens.size());
  const auto wanted = static_cast<int64_t>(input.logit_rows.size());
  const bool decode = wanted == rows && static_cast<int64_t>(input.sequences.size()) == rows;
  const int64_t padded = decode ? next_power(rows, 1) : rows;
  const bool captured =
      decode && padded <= std::min({kMaxCapturedRows, limits_.max_rows, limits_.max_logit_rows});
  turn.step.set(input, sampling, captured ? padded : rows, captured ? padded : wanted);
  const KvCache cache = cache_of(pages);
  const int64_t context = turn.step.max_context();
  if (captured) {
    NIBBLE_TRY(replay(turn, cache, next_power(context, kMinCapturedContext)));
  } else {
    NIBBLE_TRY(queue(turn.step, cache, context, true, {}));
  }
  NIBBLE_TRY(cuda_ok(cudaEventRecord(turn.done, stream_), "step"));
  ++started_;
  return {};
}

Result<Draws> Glm4MoeCuda::finish() {
  NIBBLE_CHECK(finished_ < started_, "no step is under way");
  const Turn& turn = turns_[static_cast<size_t>(finished_ % 2)];
  ++finished_;
  NIBBLE_TRY(cuda_ok(cudaEventSynchronize(turn.done), "step"));
  const auto wanted = static_cast<size_t>(turn.step.wanted_logits());
  return Draws{{turn.step.tokens_out(), wanted}, {turn.step.logprobs_out(), wanted}};
}

}  // namespace

Result<std::unique_ptr<Model>> make_glm4_moe_cuda(const recipe::ModelConfig& config,
                                                  std::shared_ptr<const load::CudaWeights> weights,
                                                  kernels::KvType kv) {
  NIBBLE_CHECK(kv != kernels::KvType::kF32);
  return std::unique_ptr<Model>(std::make_unique<Glm4MoeCuda>(config, std::move(weights), kv));
}

}  // namespace nibble::model
