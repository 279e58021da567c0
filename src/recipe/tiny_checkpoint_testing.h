// For tests of any folder: writes the "Tiny MoE", a glm4_moe checkpoint of 2 layers, hidden 256, 8
// experts, top 2, intermediate 128 and vocabulary 512, with the storage form of every module, the
// dialect of its names, and any damage chosen by the test. Weights are a function of their module
// name alone, so two checkpoints that differ in storage hold the same model.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_writer.h"
#include "formats/element.h"
#include "formats/quantize.h"
#include "recipe/recipe.h"
#include "recipe/scale_plane.h"

namespace nibble::testing {

using formats::DType;
using formats::FormatId;

enum class TinyDialect { kModelOpt, kCompressedTensors, kDeepSeek };

struct TinyTensor {
  DType dtype = DType::kBf16;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};
using TinyTensors = std::map<std::string, TinyTensor>;

struct TinyOptions {
  int64_t hidden = 256, inner = 128, experts = 8, top_k = 2, layers = 2, vocab = 512;
  int64_t heads = 4, kv_heads = 2, head_dim = 64, dense_layers = 0, dense_inner = 384;
  bool attention_bias = false, qk_norm = true, tied = false, head = true;
  int mtp_layers = 0;         // stored
  int mtp_promised = -1;      // in the config; -1: as stored
  std::string mtp_base;       // "" is "<prefix>layers.<layers>", else "mtp.layers."
  bool mtp_own_head = false;  // its own embedding and head
  std::string prefix = "model.";
  TinyDialect dialect = TinyDialect::kModelOpt;
  bool input_scales = true;
  bool stacked = false;  // experts as one [E, ...] tensor per projection
  /// Format of a matrix by module name. Default: expert and MLP projections NVFP4, the rest BF16.
  std::function<FormatId(const std::string& module)> format;
  /// Factor on the NVFP4 global of a module, with codes and scales left as they are. Default 1.
  std::function<float(const std::string& module)> global_factor;
};

inline bool tiny_is_mlp(const std::string& module) {
  return module.find("mlp.") != std::string::npos && module.ends_with("_proj");
}

/// Deterministic values around 0.02, BF16-exact, different for every name.
inline std::vector<float> tiny_values(const std::string& name, int64_t count, float scale) {
  uint64_t state = 1469598103934665603ULL;
  for (const char c : name) state = (state ^ static_cast<uint8_t>(c)) * 1099511628211ULL;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    const float unit = static_cast<float>(state >> 40) * 0x1p-23f - 1.0f;  // [-1, 1)
    value = formats::decode_bf16(formats::encode_bf16(unit * unit * unit * scale));
  }
  return out;
}

template <typename T>
std::vector<std::byte> tiny_bytes(const std::vector<T>& values) {
  std::vector<std::byte> out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

/// Writes every tensor of one module into a TinyTensors map.
struct TinyModule {
  const TinyOptions& options;
  TinyTensors& out;
  std::string name;
  int64_t rows, cols;

  void put(const std::string& suffix, DType dtype, std::vector<int64_t> shape,
           std::vector<std::byte> bytes) const {
    out[name + suffix] = TinyTensor{dtype, std::move(shape), std::move(bytes)};
  }
  void put_f32(const std::string& suffix, std::vector<int64_t> shape, float value) const {
    put(suffix, DType::kF32, std::move(shape), tiny_bytes(std::vector<float>{value}));
  }

  void write(const std::vector<float>& w, FormatId format) const {
    const bool ct = options.dialect == TinyDialect::kCompressedTensors;
    switch (format) {
      case FormatId::kF32: return put(".weight", DType::kF32, {rows, cols}, tiny_bytes(w));
      case FormatId::kF16: return write_half(w, DType::kF16);
      case FormatId::kBf16: return write_half(w, DType::kBf16);
      case FormatId::kNvfp4: return write_nvfp4(w, ct);
      case FormatId::kMxfp4: {
        auto q = formats::quantize_mxfp4(w, rows, cols, name).value();
        const bool deepseek = options.dialect == TinyDialect::kDeepSeek;
        put(ct ? ".weight_packed" : ".weight", deepseek ? DType::kI8 : DType::kU8, {rows, cols / 2},
            std::move(q.codes));
        return put(deepseek ? ".scale" : ".weight_scale", deepseek ? DType::kF8E8M0 : DType::kU8,
                   {rows, cols / 32}, std::move(q.scales));
      }
      case FormatId::kMxfp8: {
        auto q = formats::quantize_mxfp8(w, rows, cols, name).value();
        put(".weight", DType::kF8E4M3, {rows, cols}, std::move(q.codes));
        return put(".weight_scale", DType::kU8, {rows, cols / 32}, std::move(q.scales));
      }
      case FormatId::kFp8Block: {
        auto q = formats::quantize_fp8_block(w, rows, cols, name).value();
        put(".weight", DType::kF8E4M3, {rows, cols}, std::move(q.codes));
        return put(".weight_scale_inv", DType::kF32, {(rows + 127) / 128, (cols + 127) / 128},
                   std::move(q.scales));
      }
      case FormatId::kFp8Channel: return write_fp8_rows(w, ct ? 2 : 1);
      case FormatId::kFp8Tensor: return write_fp8_rows(w, 0);
      case FormatId::kNf3: {
        auto q = formats::quantize_nf3(w, rows, cols, name).value();
        put(".nf3_packed", DType::kU8, {rows, cols * 3 / 8}, std::move(q.codes));
        return put(".nf3_scale", DType::kU8, {rows, cols / 32}, std::move(q.scales));
      }
    }
  }

  void write_half(const std::vector<float>& w, DType dtype) const {
    std::vector<uint16_t> bits;
    for (const float value : w) {
      bits.push_back(dtype == DType::kF16 ? formats::encode_f16(value)
                                          : formats::encode_bf16(value));
    }
    put(".weight", dtype, {rows, cols}, tiny_bytes(bits));
  }

  void write_nvfp4(const std::vector<float>& w, bool ct) const {
    auto q = formats::quantize_nvfp4(w, rows, cols, name).value();
    // A global that both dialects can say: the reciprocal of its own reciprocal.
    const float factor = options.global_factor ? options.global_factor(name) : 1.0f;
    const float divisor = 1.0f / (q.meta.global * factor);
    put(ct ? ".weight_packed" : ".weight", DType::kU8, {rows, cols / 2}, std::move(q.codes));
    put(".weight_scale", DType::kF8E4M3, {rows, cols / 16}, std::move(q.scales));
    if (ct) {
      put_f32(".weight_global_scale", {1}, divisor);
      if (options.input_scales) put_f32(".input_global_scale", {1}, 200.0f);
    } else {
      put_f32(".weight_scale_2", {}, 1.0f / divisor);
      if (options.input_scales) put_f32(".input_scale", {}, 0.005f);
    }
  }

  /// rank 0: one scale; 1: [rows] in F32; 2: [rows, 1] in BF16.
  void write_fp8_rows(const std::vector<float>& w, int rank) const {
    std::vector<float> scales;
    std::vector<uint8_t> codes;
    float all = 0;
    for (const float value : w) all = std::max(all, std::abs(value));
    for (int64_t r = 0; r < rows; ++r) {
      float amax = 0;
      for (int64_t c = 0; c < cols; ++c) {
        amax = std::max(amax, std::abs(w[static_cast<size_t>(r * cols + c)]));
      }
      float scale = (rank == 0 ? all : amax) / 448.0f + 1e-6f;
      if (rank == 2) scale = formats::decode_bf16(formats::encode_bf16(scale));
      scales.push_back(scale);
      for (int64_t c = 0; c < cols; ++c) {
        codes.push_back(formats::encode_e4m3(w[static_cast<size_t>(r * cols + c)] / scale));
      }
    }
    put(".weight", DType::kF8E4M3, {rows, cols}, tiny_bytes(codes));
    if (rank == 0) return put_f32(".weight_scale", {}, scales[0]);
    if (rank == 1) return put(".weight_scale", DType::kF32, {rows}, tiny_bytes(scales));
    std::vector<uint16_t> bits;
    for (const float scale : scales) bits.push_back(formats::encode_bf16(scale));
    put(".weight_scale", DType::kBf16, {rows, 1}, tiny_bytes(bits));
  }
};

class TinyBuilder {
 public:
  explicit TinyBuilder(const TinyOptions& options) : o_(options) {}

  TinyTensors build() {
    matrix(o_.prefix + "embed_tokens", o_.vocab, o_.hidden, 1.0f);
    if (o_.head) matrix("lm_head", o_.vocab, o_.hidden, 0.2f);
    norm(o_.prefix + "norm.weight", o_.hidden);
    for (int64_t l = 0; l < o_.layers; ++l) layer(cat(o_.prefix, "layers.", l), l);
    for (int n = 0; n < o_.mtp_layers; ++n) {
      const std::string base =
          o_.mtp_base.empty() ? cat(o_.prefix, "layers.", o_.layers + n) : cat(o_.mtp_base, n);
      layer(base, o_.layers + n);
      matrix(base + ".eh_proj", o_.hidden, 2 * o_.hidden, 0.2f);
      for (const char* name : {".enorm.weight", ".hnorm.weight", ".shared_head.norm.weight"}) {
        norm(base + name, o_.hidden);
      }
      if (o_.mtp_own_head) {
        matrix(base + ".embed_tokens", o_.vocab, o_.hidden, 1.0f);
        matrix(base + ".shared_head.head", o_.vocab, o_.hidden, 0.2f);
      }
    }
    if (o_.stacked) stack();
    return std::move(out_);
  }

 private:
  void matrix(const std::string& name, int64_t rows, int64_t cols, float scale) {
    const FormatId format = o_.format           ? o_.format(name)
                            : tiny_is_mlp(name) ? FormatId::kNvfp4
                                                : FormatId::kBf16;
    TinyModule{o_, out_, name, rows, cols}.write(tiny_values(bare(name), rows * cols, scale),
                                                 format);
  }
  /// Values depend on the name without the prefix: all spellings are one model.
  std::string bare(const std::string& name) const {
    return name.starts_with(o_.prefix) ? name.substr(o_.prefix.size()) : name;
  }
  void norm(const std::string& name, int64_t count) {
    std::vector<uint16_t> bits;
    for (const float value : tiny_values(bare(name), count, 0.2f)) {
      bits.push_back(formats::encode_bf16(1.0f + value));
    }
    out_[name] = TinyTensor{DType::kBf16, {count}, tiny_bytes(bits)};
  }
  void mlp(const std::string& base, int64_t inner) {
    matrix(base + ".gate_proj", inner, o_.hidden, 0.2f);
    matrix(base + ".up_proj", inner, o_.hidden, 0.25f);
    matrix(base + ".down_proj", o_.hidden, inner, 0.2f);
  }
  void layer(const std::string& base, int64_t number) {
    norm(base + ".input_layernorm.weight", o_.hidden);
    norm(base + ".post_attention_layernorm.weight", o_.hidden);
    const int64_t q = o_.heads * o_.head_dim, kv = o_.kv_heads * o_.head_dim;
    matrix(base + ".self_attn.q_proj", q, o_.hidden, 0.2f);
    matrix(base + ".self_attn.k_proj", kv, o_.hidden, 0.2f);
    matrix(base + ".self_attn.v_proj", kv, o_.hidden, 0.2f);
    matrix(base + ".self_attn.o_proj", o_.hidden, q, 0.2f);
    if (o_.attention_bias) {
      norm(base + ".self_attn.q_proj.bias", q);
      norm(base + ".self_attn.k_proj.bias", kv);
      norm(base + ".self_attn.v_proj.bias", kv);
    }
    if (o_.qk_norm) {
      norm(base + ".self_attn.q_norm.weight", o_.head_dim);
      norm(base + ".self_attn.k_norm.weight", o_.head_dim);
    }
    if (number < o_.dense_layers) return mlp(base + ".mlp", o_.dense_inner);
    matrix(base + ".mlp.gate", o_.experts, o_.hidden, 0.5f);
    out_[base + ".mlp.gate.e_score_correction_bias"] = TinyTensor{
        DType::kF32, {o_.experts}, tiny_bytes(tiny_values(bare(base) + "bias", o_.experts, 0.1f))};
    for (int64_t e = 0; e < o_.experts; ++e) mlp(cat(base, ".mlp.experts.", e), o_.inner);
    mlp(base + ".mlp.shared_experts", o_.inner);
  }

  /// "….experts.E.REST" of all E become "….experts.REST" with a leading extent.
  void stack() {
    TinyTensors stacked;
    for (auto& [name, tensor] : out_) {
      const size_t at = name.find(".experts.0.");
      if (name.find(".experts.") == std::string::npos) {
        stacked.emplace(name, std::move(tensor));
      }
      if (at == std::string::npos) continue;
      const std::string head = name.substr(0, at + 9), rest = name.substr(at + 11);
      TinyTensor whole = tensor;
      for (int64_t e = 1; e < o_.experts; ++e) {
        const TinyTensor& part = out_.at(cat(head, e, ".", rest));
        whole.bytes.insert(whole.bytes.end(), part.bytes.begin(), part.bytes.end());
      }
      whole.shape.insert(whole.shape.begin(), o_.experts);
      stacked.emplace(head + rest, std::move(whole));
    }
    out_ = std::move(stacked);
  }

  const TinyOptions& o_;
  TinyTensors out_;
};

inline TinyTensors tiny_tensors(const TinyOptions& options) { return TinyBuilder(options).build(); }

/// ModelOpt or compressed-tensors NVFP4 of the MLP projections, or block FP8.
inline Json tiny_quantization(TinyDialect dialect) {
  const Json ignore = {"lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"};
  if (dialect == TinyDialect::kCompressedTensors) {
    const Json group = {{"targets", {"Linear"}},
                        {"weights", {{"num_bits", 4}, {"type", "float"}, {"group_size", 16}}}};
    return {{"quant_method", "compressed-tensors"},
            {"format", "nvfp4-pack-quantized"},
            {"config_groups", {{"group_0", group}}},
            {"ignore", ignore}};
  }
  if (dialect == TinyDialect::kDeepSeek) {
    return {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  }
  return {{"quant_method", "modelopt"},
          {"quant_algo", "NVFP4"},
          {"group_size", 16},
          {"ignore", {"lm_head", "*self_attn*", "*mlp.gate"}}};
}

inline Json tiny_config(const TinyOptions& o) {
  return {{"model_type", "glm4_moe"},
          {"hidden_size", o.hidden},
          {"num_hidden_layers", o.layers},
          {"vocab_size", o.vocab},
          {"max_position_embeddings", 4096},
          {"num_attention_heads", o.heads},
          {"num_key_value_heads", o.kv_heads},
          {"head_dim", o.head_dim},
          {"intermediate_size", o.dense_inner},
          {"moe_intermediate_size", o.inner},
          {"n_routed_experts", o.experts},
          {"num_experts_per_tok", o.top_k},
          {"n_shared_experts", 1},
          {"first_k_dense_replace", o.dense_layers},
          {"num_nextn_predict_layers", o.mtp_promised < 0 ? o.mtp_layers : o.mtp_promised},
          {"attention_bias", o.attention_bias},
          {"use_qk_norm", o.qk_norm},
          {"tie_word_embeddings", o.tied},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 1000000.0},
          {"partial_rotary_factor", 0.5},
          {"routed_scaling_factor", 2.5},
          {"eos_token_id", 2},
          {"quantization_config", tiny_quantization(o.dialect)}};
}

/// A fresh directory under the system's temporary one, removed with the object.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "nibble-XXXXXX").string();
    const char* made = mkdtemp(pattern.data());
    NIBBLE_CHECK(made != nullptr, pattern);
    path_ = made;
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline void write_tiny(const std::string& directory, const TinyTensors& tensors, const Json& config,
                       int64_t shard_bytes = int64_t{1} << 40) {
  checkpoint::CheckpointWriter writer(directory, shard_bytes);
  for (const auto& [name, tensor] : tensors) {
    writer.add(name, tensor.dtype, tensor.shape, tensor.bytes).value();
  }
  writer.finish().value();
  write_file_atomic(directory + "/config.json", json_dump(config, 1)).value();
}

/// Reads a weight's planes and decodes it: rows * cols floats.
inline std::vector<float> decode_weight(const checkpoint::CheckpointIndex& index,
                                        const recipe::Weight& weight) {
  std::vector<std::byte> codes(static_cast<size_t>(weight.codes.bytes));
  const std::vector<std::byte> scales = recipe::read_scale_plane(index, weight).value();
  index.read(*weight.codes.tensor, weight.codes.begin, codes).value();
  formats::MatrixView view = weight.meta;
  view.codes = codes.data();
  view.scales = scales.data();
  std::vector<float> out(static_cast<size_t>(view.rows * view.cols));
  formats::decode_rows(view, 0, view.rows, out.data());
  return out;
}

}  // namespace nibble::testing
