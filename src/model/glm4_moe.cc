#include "model/glm4_moe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/embed/embed.h"
#include "kernels/matmul/matmul.h"
#include "kernels/moe/moe.h"
#include "kernels/norm/norm.h"
#include "kernels/router/router.h"
#include "plan/plan.h"

namespace nibble::model {
namespace {

using kernels::Exec;
using kernels::ExpertRef;
using kernels::MatmulJob;
using kernels::WorkspaceScope;
using recipe::Role;
using tensor::TensorRef;

struct Attention {
  TensorRef q, k, v, o;
  const float *q_bias, *k_bias, *v_bias, *o_bias;
  const float *q_norm, *k_norm;
};

struct Layer {
  const float *input_norm, *post_norm;
  Attention attention;
  bool routed = false;
  ExpertRef dense;  // if not routed
  TensorRef router;
  const float* router_bias = nullptr;
  std::vector<ExpertRef> experts;
  bool has_shared = false;
  ExpertRef shared;
};

class Glm4Moe final : public Model {
 public:
  Glm4Moe(const recipe::ModelConfig& config, std::shared_ptr<const load::WeightStore> weights)
      : config_(config), weights_(std::move(weights)) {
    embedding_ = weights_->matrix({-1, Role::kEmbedding, -1}).view;
    head_ = weights_->matrix({-1, Role::kHead, -1});
    final_norm_ = weights_->vector({-1, Role::kFinalNorm, -1});
    for (int32_t i = 0; i < config_.layers; ++i) layers_.push_back(bind_layer(i));
    inv_freq_ = glm4_moe_inv_freq(config_);
  }

  const recipe::ModelConfig& config() const override { return config_; }
  kernels::KvGeometry kv_geometry(kernels::Activations activations) const override {
    return plan::kv_geometry(config_, activations);
  }
  int64_t workspace_bytes(int64_t max_rows, int64_t max_logit_rows, int threads) const override {
    return glm4_moe_workspace_bytes(config_, max_rows, max_logit_rows, threads);
  }
  Result<void> forward(const Exec& exec, const StepInput& input, const kernels::KvPages& pages,
                       const StepOutput& output) override;

 private:
  Layer bind_layer(int32_t index) const;
  ExpertRef bind_expert(int32_t layer, Role gate, Role up, Role down, int32_t expert) const {
    ExpertRef ref;
    ref.gate = weights_->matrix({layer, gate, expert});
    ref.up = weights_->matrix({layer, up, expert});
    ref.down = weights_->matrix({layer, down, expert});
    return ref;
  }
  void attention_block(const Exec& exec, const Layer& layer, int64_t index, const StepInput& input,
                       const kernels::KvPages& pages, const float* rope, const float* x,
                       float* out) const;
  void feed_forward(const Exec& exec, const Layer& layer, int64_t index, int64_t rows,
                    const float* x, float* out, const StepTaps& taps) const;
  void head(const Exec& exec, const StepInput& input, const float* residual, const float* delta,
            const StepOutput& output) const;
  kernels::RopeParams rope() const {
    kernels::RopeParams params;
    params.rotary_dim = config_.rotary_dim;
    params.inv_freq = inv_freq_.data();
    return params;
  }

  recipe::ModelConfig config_;
  std::shared_ptr<const load::WeightStore> weights_;
  formats::MatrixView embedding_;
  TensorRef head_;
  const float* final_norm_ = nullptr;
  std::vector<Layer> layers_;
  std::vector<float> inv_freq_;
};

Layer Glm4Moe::bind_layer(int32_t index) const {
  const auto vector = [&](Role role) { return weights_->vector({index, role, -1}); };
  Layer layer;
  layer.input_norm = vector(Role::kInputNorm);
  layer.post_norm = vector(Role::kPostAttentionNorm);
  layer.attention = {weights_->matrix({index, Role::kQ, -1}),
                     weights_->matrix({index, Role::kK, -1}),
                     weights_->matrix({index, Role::kV, -1}),
                     weights_->matrix({index, Role::kO, -1}),
                     vector(Role::kQBias),
                     vector(Role::kKBias),
                     vector(Role::kVBias),
                     vector(Role::kOBias),
                     vector(Role::kQNorm),
                     vector(Role::kKNorm)};
  layer.routed = weights_->has({index, Role::kRouter, -1});
  if (!layer.routed) {
    layer.dense = bind_expert(index, Role::kDenseGate, Role::kDenseUp, Role::kDenseDown, -1);
    return layer;
  }
  layer.router = weights_->matrix({index, Role::kRouter, -1});
  layer.router_bias = vector(Role::kRouterBias);
  for (int32_t e = 0; e < config_.experts; ++e) {
    layer.experts.push_back(
        bind_expert(index, Role::kExpertGate, Role::kExpertUp, Role::kExpertDown, e));
  }
  layer.has_shared = weights_->has({index, Role::kSharedGate, -1});
  if (layer.has_shared) {
    layer.shared = bind_expert(index, Role::kSharedGate, Role::kSharedUp, Role::kSharedDown, -1);
  }
  return layer;
}

void Glm4Moe::attention_block(const Exec& exec, const Layer& layer, int64_t index,
                              const StepInput& input, const kernels::KvPages& pages,
                              const float* rope_table, const float* x, float* out) const {
  const int64_t rows = static_cast<int64_t>(input.tokens.size());
  const int64_t q_dim = config_.heads * config_.head_dim;
  const int64_t kv_dim = config_.kv_heads * config_.head_dim;
  WorkspaceScope scope(*exec.workspace);
  float* q = exec.workspace->take<float>(rows * q_dim);
  float* k = exec.workspace->take<float>(rows * kv_dim);
  float* v = exec.workspace->take<float>(rows * kv_dim);
  const Attention& a = layer.attention;
  const MatmulJob jobs[] = {
      {a.q, a.q_bias, q, q_dim}, {a.k, a.k_bias, k, kv_dim}, {a.v, a.v_bias, v, kv_dim}};
  kernels::matmul(exec, x, config_.hidden_size, rows, jobs);

  kernels::AttentionPrepareArgs prepare;
  prepare.q = q;
  prepare.k = k;
  prepare.v = v;
  prepare.q_stride = q_dim;
  prepare.k_stride = prepare.v_stride = kv_dim;
  prepare.heads = config_.heads;
  prepare.layer = index;
  prepare.q_norm = a.q_norm;
  prepare.k_norm = a.k_norm;
  prepare.norm_eps = config_.rms_eps;
  prepare.rope = rope();
  prepare.cos_sin = rope_table;
  prepare.sequences = input.sequences;
  kernels::attention_prepare(exec, prepare, pages);

  float* mixed = exec.workspace->take<float>(rows * q_dim);
  kernels::AttentionArgs args;
  args.q = q;
  args.q_stride = args.out_stride = q_dim;
  args.out = mixed;
  args.heads = config_.heads;
  args.layer = index;
  args.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  args.sequences = input.sequences;
  kernels::attention(exec, args, pages);

  const MatmulJob project[] = {{a.o, a.o_bias, out, config_.hidden_size}};
  kernels::matmul(exec, mixed, q_dim, rows, project);
}

void Glm4Moe::feed_forward(const Exec& exec, const Layer& layer, int64_t index, int64_t rows,
                           const float* x, float* out, const StepTaps& taps) const {
  const int64_t hidden = config_.hidden_size;
  if (!layer.routed) {
    kernels::mlp(exec, x, rows, hidden, layer.dense, {}, out);
    return;
  }
  WorkspaceScope scope(*exec.workspace);
  float* logits = exec.workspace->take<float>(rows * config_.experts);
  Exec exact = exec;  // routing is FP32 whatever the activations are
  exact.activations = kernels::Activations::kF32;
  const MatmulJob route_job[] = {{layer.router, nullptr, logits, config_.experts}};
  kernels::matmul(exact, x, hidden, rows, route_job);

  int32_t* ids = exec.workspace->take<int32_t>(rows * config_.top_k);
  float* weights = exec.workspace->take<float>(rows * config_.top_k);
  kernels::RouterParams params = glm4_moe_router(config_);
  params.correction_bias = layer.router_bias;
  kernels::route(exec, logits, rows, params, ids, weights);
  const int64_t chosen = rows * config_.top_k;
  if (taps.topk_ids != nullptr) std::copy_n(ids, chosen, taps.topk_ids + index * chosen);
  if (taps.topk_weights != nullptr)
    std::copy_n(weights, chosen, taps.topk_weights + index * chosen);

  kernels::MoeArgs args;
  args.x = x;
  args.tokens = rows;
  args.hidden = hidden;
  args.experts = layer.experts;
  args.top_k = config_.top_k;
  args.ids = ids;
  args.weights = weights;
  args.shared = layer.has_shared ? &layer.shared : nullptr;
  args.y = out;
  kernels::moe(exec, args);
}

void Glm4Moe::head(const Exec& exec, const StepInput& input, const float* residual,
                   const float* delta, const StepOutput& output) const {
  const int64_t hidden = config_.hidden_size;
  const int64_t wanted = static_cast<int64_t>(input.logit_rows.size());
  if (wanted == 0) return;
  WorkspaceScope scope(*exec.workspace);
  float* x = exec.workspace->take<float>(wanted * hidden);
  float* d = exec.workspace->take<float>(wanted * hidden);
  float* normed = exec.workspace->take<float>(wanted * hidden);
  for (int64_t i = 0; i < wanted; ++i) {
    const int64_t row = input.logit_rows[static_cast<size_t>(i)];
    std::copy_n(residual + row * hidden, hidden, x + i * hidden);
    std::copy_n(delta + row * hidden, hidden, d + i * hidden);
  }
  kernels::add_rms_norm(exec, x, d, wanted, hidden, final_norm_, config_.rms_eps, normed);
  if (output.final_hidden != nullptr) std::copy_n(normed, wanted * hidden, output.final_hidden);
  if (output.logits == nullptr) return;
  const MatmulJob job[] = {{head_, nullptr, output.logits, config_.vocab_size}};
  kernels::matmul(exec, normed, hidden, wanted, job);
}

Result<void> Glm4Moe::forward(const Exec& exec, const StepInput& input,
                              const kernels::KvPages& pages, const StepOutput& output) {
  const int64_t rows = static_cast<int64_t>(input.tokens.size());
  const int64_t hidden = config_.hidden_size;
  const int64_t layers = static_cast<int64_t>(layers_.size());
  WorkspaceScope scope(*exec.workspace);
  float* residual = exec.workspace->take<float>(rows * hidden);
  float* delta = exec.workspace->take<float>(rows * hidden);
  float* normed = exec.workspace->take<float>(rows * hidden);
  float* rope_table = exec.workspace->take<float>(rows * config_.rotary_dim);
  kernels::rope_table(exec, rope(), input.sequences, rope_table);
  kernels::embed(exec, embedding_, input.tokens.data(), rows, residual);

  const auto tap = [&](int64_t index) {  // residual + delta of the layer before
    if (output.taps.hidden == nullptr) return;
    float* to = output.taps.hidden + index * rows * hidden;
    std::copy_n(residual, rows * hidden, to);
    if (index > 0) kernels::add(exec, to, delta, rows * hidden);
  };
  for (int64_t i = 0; i < layers; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    tap(i);
    if (i == 0) {
      kernels::rms_norm(exec, residual, rows, hidden, layer.input_norm, config_.rms_eps, normed);
    } else {
      kernels::add_rms_norm(exec, residual, delta, rows, hidden, layer.input_norm, config_.rms_eps,
                            normed);
    }
    attention_block(exec, layer, i, input, pages, rope_table, normed, delta);
    kernels::add_rms_norm(exec, residual, delta, rows, hidden, layer.post_norm, config_.rms_eps,
                          normed);
    feed_forward(exec, layer, i, rows, normed, delta, output.taps);
  }
  tap(layers);
  head(exec, input, residual, delta, output);
  return {};
}

}  // namespace

kernels::RouterParams glm4_moe_router(const recipe::ModelConfig& config) {
  kernels::RouterParams params;
  params.score = kernels::RouterScore::kSigmoid;
  params.experts = config.experts;
  params.top_k = config.top_k;
  params.groups = config.groups;
  params.top_groups = config.top_groups;
  params.normalize = config.normalize_top_k;
  params.scaling = config.routed_scaling;
  return params;
}

std::vector<float> glm4_moe_inv_freq(const recipe::ModelConfig& config) {
  std::vector<float> inv_freq;
  for (int64_t i = 0; i < config.rotary_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rotary_dim);
    inv_freq.push_back(1.0f / std::pow(static_cast<float>(config.rope_theta), exponent));
  }
  return inv_freq;
}

Result<std::unique_ptr<Model>> make_glm4_moe(const recipe::ModelConfig& config,
                                             std::shared_ptr<const load::WeightStore> weights) {
  return std::unique_ptr<Model>(std::make_unique<Glm4Moe>(config, std::move(weights)));
}

int64_t glm4_moe_workspace_bytes(const recipe::ModelConfig& config, int64_t max_rows,
                                 int64_t max_logit_rows, int threads) {
  using W = kernels::Workspace;
  const int64_t hidden = config.hidden_size;
  const int64_t q_dim = config.heads * config.head_dim;
  const int64_t kv_dim = config.kv_heads * config.head_dim;
  const int64_t wide = std::max(hidden, q_dim);
  const int64_t products = kernels::matmul_workspace_bytes(max_rows, wide, threads);
  const int64_t common = 3 * W::bytes_for<float>(max_rows * hidden) +
                         W::bytes_for<float>(max_rows * config.rotary_dim);
  const int64_t attention =
      2 * W::bytes_for<float>(max_rows * q_dim) + 2 * W::bytes_for<float>(max_rows * kv_dim) +
      std::max(products, kernels::attention_workspace_bytes(
                             max_rows, config.heads,
                             plan::kv_geometry(config, kernels::Activations::kF32), threads));
  const int64_t intermediate =
      std::max(config.intermediate_size,
               config.moe_intermediate_size * std::max<int64_t>(1, config.shared_experts));
  const int64_t moe =
      W::bytes_for<float>(max_rows * config.experts) +
      W::bytes_for<int32_t>(max_rows * config.top_k) +
      W::bytes_for<float>(max_rows * config.top_k) +
      std::max(products, kernels::moe_workspace_bytes(max_rows, hidden, intermediate, config.top_k,
                                                      config.experts, threads));
  const int64_t head = 3 * W::bytes_for<float>(max_logit_rows * hidden) +
                       kernels::matmul_workspace_bytes(max_logit_rows, hidden, threads);
  return common + std::max({attention, moe, head});
}

}  // namespace nibble::model
