#include "load/cuda_loader.h"

#include "device/cuda.h"
#include "load/cuda_builder.h"

namespace nibble::load {
namespace {

using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;

// q, k and v as few packed matrices as their formats and row counts allow, in column order.
Result<std::vector<CudaQkvPart>> load_qkv(CudaBuilder& b, int32_t layer) {
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
  std::vector<CudaQkvPart> parts;
  for (const Stack& stack : stacks) {
    CudaQkvPart part;
    part.column = stack.column;
    NIBBLE_TRY(part.weight, b.linear(stack.matrices, stack.biases));
    parts.push_back(part);
  }
  return parts;
}

Result<void> load_router(CudaBuilder& b, int32_t layer, CudaLayer& out) {
  const recipe::ModelConfig& config = b.recipe().config();
  const WeightKey key{layer, Role::kRouter, -1};
  const Weight& weight = *b.recipe().find(key);
  out.router.format = weight.meta.format;
  out.router.experts = config.experts;
  out.router.hidden = config.hidden_size;
  NIBBLE_TRY(out.router.rows, b.rows(key, weight));
  NIBBLE_TRY(out.correction_bias, b.vector({layer, Role::kRouterBias, -1}));
  return {};
}

Result<void> load_routed(CudaBuilder& b, int32_t layer,
                         const std::vector<plan::CudaExpertGroup>& groups, CudaLayer& out) {
  NIBBLE_TRY(load_router(b, layer, out));
  std::vector<int32_t> rank(static_cast<size_t>(b.recipe().config().experts));
  int32_t next = 0;
  for (const plan::CudaExpertGroup& group : groups) {
    NIBBLE_TRY(
        kernels::cuda::MoeWeights weights,
        b.experts(layer, Role::kExpertGate, Role::kExpertUp, Role::kExpertDown, group.experts));
    out.groups.push_back(weights);
    for (const int32_t e : group.experts) rank[static_cast<size_t>(e)] = next++;
  }
  if (groups.size() > 1) {
    NIBBLE_TRY(out.rank, b.constant(rank));
  }
  if (b.recipe().find({layer, Role::kSharedGate, -1}) == nullptr) return {};
  out.has_mlp = true;
  out.mlp_inter = b.recipe().find({layer, Role::kSharedGate, -1})->meta.rows;
  NIBBLE_TRY(out.mlp,
             b.experts(layer, Role::kSharedGate, Role::kSharedUp, Role::kSharedDown, {-1}));
  return {};
}

Result<CudaLayer> load_layer(CudaBuilder& b, int32_t layer,
                             const std::vector<plan::CudaExpertGroup>& groups) {
  CudaLayer out;
  NIBBLE_TRY(out.input_norm, b.vector({layer, Role::kInputNorm, -1}));
  NIBBLE_TRY(out.post_norm, b.vector({layer, Role::kPostAttentionNorm, -1}));
  NIBBLE_TRY(out.q_norm, b.vector({layer, Role::kQNorm, -1}));
  NIBBLE_TRY(out.k_norm, b.vector({layer, Role::kKNorm, -1}));
  NIBBLE_TRY(out.qkv, load_qkv(b, layer));
  const WeightKey o{layer, Role::kO, -1};
  NIBBLE_TRY(out.o, b.linear({{o, b.recipe().find(o)}}, {{layer, Role::kOBias, -1}}));
  out.routed = !groups.empty();
  if (out.routed) {
    NIBBLE_TRY(load_routed(b, layer, groups, out));
    return out;
  }
  out.has_mlp = true;
  out.mlp_inter = b.recipe().find({layer, Role::kDenseGate, -1})->meta.rows;
  NIBBLE_TRY(out.mlp, b.experts(layer, Role::kDenseGate, Role::kDenseUp, Role::kDenseDown, {-1}));
  return out;
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
  NIBBLE_TRY(w.embedding.data, b.rows(embedding, table));
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    NIBBLE_TRY(CudaLayer loaded, load_layer(b, layer, plan.groups[static_cast<size_t>(layer)]));
    w.layers.push_back(std::move(loaded));
  }
  NIBBLE_TRY(w.final_norm, b.vector({-1, Role::kFinalNorm, -1}));
  NIBBLE_TRY(w.head, b.linear({{head, &plan::source_weight(recipe, head)}}, {}));
  NIBBLE_TRY(b.settle());
  LoadReport report = b.finish(w.bytes);
  return LoadedCudaWeights{b.weights, std::move(report)};
}

}  // namespace nibble::load
