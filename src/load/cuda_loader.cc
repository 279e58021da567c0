#include "load/cuda_loader.h"

#include "device/cuda.h"
#include "load/cuda_builder.h"

namespace nibble::load {
namespace {

using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;

// All functions here declare (cuda_builder.h): matrices of `out` are in their place when the
// builder has placed them.

// q, k and v as few packed matrices as their formats and row counts allow, in column order.
Result<void> declare_qkv(CudaBuilder& b, int32_t layer, CudaLayer& out) {
  struct Stack {
    std::vector<std::pair<WeightKey, const Weight*>> matrices;
    std::vector<WeightKey> biases;
    int64_t column = 0;
  };
  std::vector<Stack> stacks;
  int64_t column = 0;
  const std::pair<Role, Role> roles[] = {
      {Role::kQ, Role::kQBias}, {Role::kK, Role::kKBias}, {Role::kV, Role::kVBias}};
  for (const auto& [role, bias] : roles) {
    const WeightKey key{layer, role, -1};
    const Weight* weight = b.recipe().find(key);
    bool joins = false;
    if (!stacks.empty()) {
      const formats::MatrixView& last = stacks.back().matrices.back().second->meta;
      // Pieces begin at whole tiles (and, for block FP8, whole blocks) of rows.
      const int64_t unit = last.format == formats::FormatId::kFp8Block ? 128 : 64;
      joins = last.format == weight->meta.format && last.rows % unit == 0;
    }
    if (!joins) stacks.push_back({{}, {}, column});
    stacks.back().matrices.emplace_back(key, weight);
    stacks.back().biases.push_back({layer, bias, -1});
    column += weight->meta.rows;
  }
  out.qkv.resize(stacks.size());
  for (size_t i = 0; i < stacks.size(); ++i) {
    out.qkv[i].column = stacks[i].column;
    NIBBLE_TRY(b.linear(std::move(stacks[i].matrices), stacks[i].biases, &out.qkv[i].weight));
  }
  return {};
}

Result<void> declare_router(CudaBuilder& b, int32_t layer, CudaLayer& out) {
  const recipe::ModelConfig& config = b.recipe().config();
  const WeightKey key{layer, Role::kRouter, -1};
  const Weight& weight = *b.recipe().find(key);
  out.router.format = weight.meta.format;
  out.router.experts = config.experts;
  out.router.hidden = config.hidden_size;
  b.rows(key, weight, &out.router.rows);
  NIBBLE_TRY(out.correction_bias, b.vector({layer, Role::kRouterBias, -1}));
  return {};
}

Result<void> declare_routed(CudaBuilder& b, int32_t layer,
                            const std::vector<plan::CudaExpertGroup>& groups, CudaLayer& out) {
  NIBBLE_TRY(declare_router(b, layer, out));
  std::vector<int32_t> rank(static_cast<size_t>(b.recipe().config().experts));
  int32_t next = 0;
  out.groups.resize(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::vector<int32_t>& experts = groups[i].experts;
    NIBBLE_TRY(b.experts(layer, Role::kExpertGate, Role::kExpertUp, Role::kExpertDown, experts,
                         &out.groups[i]));
    for (const int32_t e : experts) rank[static_cast<size_t>(e)] = next++;
  }
  if (groups.size() > 1) {
    NIBBLE_TRY(out.rank, b.constant(rank));
  }
  if (b.recipe().find({layer, Role::kSharedGate, -1}) == nullptr) return {};
  out.has_mlp = true;
  out.mlp_inter = b.recipe().find({layer, Role::kSharedGate, -1})->meta.rows;
  return b.experts(layer, Role::kSharedGate, Role::kSharedUp, Role::kSharedDown, {-1}, &out.mlp);
}

Result<void> declare_layer(CudaBuilder& b, int32_t layer,
                           const std::vector<plan::CudaExpertGroup>& groups, CudaLayer& out) {
  NIBBLE_TRY(out.input_norm, b.vector({layer, Role::kInputNorm, -1}));
  NIBBLE_TRY(out.post_norm, b.vector({layer, Role::kPostAttentionNorm, -1}));
  NIBBLE_TRY(out.q_norm, b.vector({layer, Role::kQNorm, -1}));
  NIBBLE_TRY(out.k_norm, b.vector({layer, Role::kKNorm, -1}));
  NIBBLE_TRY(declare_qkv(b, layer, out));
  const WeightKey o{layer, Role::kO, -1};
  NIBBLE_TRY(b.linear({{o, b.recipe().find(o)}}, {{layer, Role::kOBias, -1}}, &out.o));
  out.routed = !groups.empty();
  if (out.routed) return declare_routed(b, layer, groups, out);
  out.has_mlp = true;
  out.mlp_inter = b.recipe().find({layer, Role::kDenseGate, -1})->meta.rows;
  return b.experts(layer, Role::kDenseGate, Role::kDenseUp, Role::kDenseDown, {-1}, &out.mlp);
}

}  // namespace

Result<LoadedCudaWeights> load_cuda_weights(
    const recipe::Recipe& recipe, const plan::CudaPlan& plan, int device, ThreadPool& pool,
    const std::function<void(const LoadProgress&)>& progress) {
  NIBBLE_TRY(device::cuda_use(device));
  const recipe::ModelConfig& config = recipe.config();
  CudaBuilder b(recipe, plan, pool, progress);
  NIBBLE_TRY(b.open());
  CudaWeights& w = *b.weights;
  w.device = device;
  const WeightKey embedding{-1, Role::kEmbedding, -1}, head{-1, Role::kHead, -1};
  const Weight& table = *recipe.find(embedding);
  w.embedding.format = table.meta.format;
  w.embedding.vocab = config.vocab_size;
  w.embedding.hidden = config.hidden_size;
  b.rows(embedding, table, &w.embedding.data);
  w.layers.resize(static_cast<size_t>(config.layers));
  for (size_t i = 0; i < w.layers.size(); ++i) {
    // One layer ahead: the readers never wait for this thread to declare.
    const int64_t before = b.declared();
    NIBBLE_TRY(declare_layer(b, static_cast<int32_t>(i), plan.groups[i], w.layers[i]));
    NIBBLE_TRY(b.place(before));
  }
  NIBBLE_TRY(w.final_norm, b.vector({-1, Role::kFinalNorm, -1}));
  NIBBLE_TRY(b.linear({{head, &plan::source_weight(recipe, head)}}, {}, &w.head));
  NIBBLE_TRY(b.settle());
  LoadReport report = b.finish(w.bytes);
  return LoadedCudaWeights{b.weights, std::move(report)};
}

}  // namespace nibble::load
