// For tests: checkpoints whose experts have the scales of trained weights (heavy tails, rows of
// different size), in the names of the families that manifest containers hold, and damage to them.
#pragma once

#include <cmath>
#include <string>

#include "recipe/tiny_checkpoint_testing.h"

namespace nibble::testing {

/// rows * cols values of a Student-t-like distribution with a scale of its own for every row.
inline std::vector<float> heavy_values(const std::string& name, int64_t rows, int64_t cols) {
  const std::vector<float> a = tiny_values(name + "a", rows * cols, 1.0f);
  const std::vector<float> b = tiny_values(name + "b", rows * cols, 1.0f);
  const std::vector<float> size = tiny_values(name + "rows", rows, 2.0f);
  std::vector<float> out(a.size());
  for (size_t i = 0; i < out.size(); ++i) {
    const float row = std::exp(size[i / static_cast<size_t>(cols)]);
    out[i] = 0.02f * row * std::cbrt(a[i]) / std::sqrt(std::abs(b[i]) + 0.02f);
  }
  return out;
}

struct FamilyNames {
  std::string head, middle, weight, scale;
  DType codes, scales;
};
inline FamilyNames deepseek_names() {
  return {"layers.", ".ffn.experts.", ".weight", ".scale", DType::kI8, DType::kF8E8M0};
}
inline FamilyNames kimi_names() {
  return {"language_model.model.layers.",
          ".block_sparse_moe.experts.",
          ".weight_packed",
          ".weight_scale",
          DType::kU8,
          DType::kU8};
}

constexpr int64_t kHeavyHidden = 256, kHeavyInner = 128, kHeavyExperts = 4;

inline void add_mxfp4(TinyTensors& out, const FamilyNames& names, const std::string& module,
                      int64_t rows, int64_t cols) {
  auto q = formats::quantize_mxfp4(heavy_values(module, rows, cols), rows, cols, module).value();
  out[module + names.weight] = {names.codes, {rows, cols / 2}, std::move(q.codes)};
  out[module + names.scale] = {names.scales, {rows, cols / 32}, std::move(q.scales)};
}

/// MXFP4 experts of layers [first, last], and one expert under `extra` if it is not empty.
inline TinyTensors mxfp4_experts(const FamilyNames& names, int first, int last,
                                 const std::string& extra) {
  TinyTensors out;
  std::vector<std::string> experts;
  for (int layer = first; layer <= last; ++layer) {
    for (int64_t e = 0; e < kHeavyExperts; ++e) {
      experts.push_back(cat(names.head, layer, names.middle, e));
    }
  }
  if (!extra.empty()) experts.push_back(extra);
  for (const std::string& expert : experts) {
    add_mxfp4(out, names, expert + ".w1", kHeavyInner, kHeavyHidden);
    add_mxfp4(out, names, expert + ".w3", kHeavyInner, kHeavyHidden);
    add_mxfp4(out, names, expert + ".w2", kHeavyHidden, kHeavyInner);
  }
  return out;
}

inline TinyTensor plain_bf16(const std::string& name, int64_t rows, int64_t cols) {
  std::vector<uint16_t> bits;
  for (const float v : tiny_values(name, rows * cols, 1.0f))
    bits.push_back(formats::encode_bf16(v));
  return {DType::kBf16, {rows, cols}, tiny_bytes(bits)};
}

/// Two MoE layers, a draft layer, block-FP8 attention, a BF16 head.
inline TinyTensors deepseek_tensors() {
  TinyTensors out = mxfp4_experts(deepseek_names(), 0, 1, "mtp.0.ffn.experts.0");
  std::vector<uint8_t> codes(256 * 256), scales(4, 120);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 % 120);
  out["layers.0.attn.wq.weight"] = {DType::kF8E4M3, {256, 256}, tiny_bytes(codes)};
  out["layers.0.attn.wq.scale"] = {DType::kF8E8M0, {2, 2}, tiny_bytes(scales)};
  out["head.weight"] = plain_bf16("head", 32, kHeavyHidden);
  out["norm.weight"] = {DType::kF32, {3}, tiny_bytes(std::vector<float>{1, 2, 3})};
  return out;
}
inline Json deepseek_config() {
  return {{"model_type", "deepseek_v4"},
          {"num_hidden_layers", 2},
          {"n_routed_experts", kHeavyExperts},
          {"expert_dtype", "fp4"},
          {"quantization_config",
           {{"quant_method", "fp8"},
            {"fmt", "e4m3"},
            {"scale_fmt", "ue8m0"},
            {"weight_block_size", {128, 128}}}}};
}

/// Layers 1 and 2 of a model with 2 layers: the last is a draft layer.
inline TinyTensors kimi_tensors() {
  TinyTensors out = mxfp4_experts(kimi_names(), 1, 2, "");
  const std::string attention = "language_model.model.layers.1.self_attn.q_proj.weight";
  out[attention] = plain_bf16(attention, 64, kHeavyHidden);
  return out;
}
inline Json kimi_config() {
  const Json weights = {
      {"num_bits", 4},     {"type", "float"},  {"strategy", "group"},         {"group_size", 32},
      {"symmetric", true}, {"dynamic", false}, {"scale_dtype", "torch.uint8"}};
  const Json quant = {
      {"quant_method", "compressed-tensors"},
      {"format", "mxfp4-pack-quantized"},
      {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}}}}},
      {"ignore", {"lm_head", "re:.*self_attn.*"}}};
  return {
      {"model_type", "kimi_k3"},
      {"text_config",
       {{"num_hidden_layers", 2}, {"num_experts", kHeavyExperts}, {"quantization_config", quant}}}};
}

/// NVFP4 experts with heavy tails in the Tiny MoE of ModelOpt, under `prefix`.
inline TinyTensors nvfp4_tensors(const TinyOptions& options) {
  TinyTensors out = tiny_tensors(options);
  for (auto& [name, tensor] : out) {
    // One global for all, since a compressed module wants gate and up to share theirs.
    if (name.ends_with(".weight_scale_2")) tensor.bytes = tiny_bytes(std::vector<float>{0.5f});
    if (!name.ends_with("_proj.weight_scale") || name.find(".experts.") == std::string::npos) {
      continue;
    }
    const int64_t rows = tensor.shape[0], cols = tensor.shape[1] * 16;
    auto q = formats::quantize_nvfp4(heavy_values(name, rows, cols), rows, cols, name).value();
    tensor.bytes = std::move(q.scales);
  }
  return out;
}

/// Every tensor of a checkpoint or container.
inline TinyTensors tensors_of(const checkpoint::CheckpointIndex& index) {
  TinyTensors out;
  for (const checkpoint::TensorInfo& t : index.tensors()) {
    TinyTensor tensor{t.dtype, t.shape, std::vector<std::byte>(static_cast<size_t>(t.bytes))};
    index.read(t, 0, tensor.bytes).value();
    out.emplace(t.name, std::move(tensor));
  }
  return out;
}

inline bool operator==(const TinyTensor& a, const TinyTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes;
}

}  // namespace nibble::testing
