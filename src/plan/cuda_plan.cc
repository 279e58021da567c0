#include "plan/cuda_plan.h"

#include <algorithm>
#include <tuple>

#include "kernels/cuda/layout.h"

namespace nibble::plan {
namespace {

using formats::FormatId;
using kernels::cuda::packed_bytes;
using kernels::cuda::Product;
using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;

constexpr int64_t kMaxGroupsOfALayer = 4;  // kernels/cuda/moe_layer.h

Error no_kernel(const WeightKey& key, FormatId format, std::string_view role) {
  return Error(Code::kUnsupported,
               cat(key_text(key), ": format ", formats::block_format(format).name,
                   " has no CUDA kernel as ", role));
}

bool is_expert(Role role) {
  switch (role) {
    case Role::kExpertGate:
    case Role::kExpertUp:
    case Role::kExpertDown:
    case Role::kDenseGate:
    case Role::kDenseUp:
    case Role::kDenseDown:
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kSharedDown: return true;
    default: return false;
  }
}

bool fp8_block_ok(const formats::MatrixView& v) {
  return v.block_rows % 64 == 0 && v.block_cols % 64 == 0 && v.origin_row == 0 && v.origin_col == 0;
}

Result<void> check_expert(const WeightKey& key, const formats::MatrixView& v) {
  switch (v.format) {
    case FormatId::kBf16:
    case FormatId::kNvfp4:
    case FormatId::kMxfp4:
    case FormatId::kMxfp8:
    case FormatId::kNf3: return {};
    case FormatId::kFp8Block:
      if (fp8_block_ok(v)) return {};
      break;
    default: break;
  }
  return no_kernel(key, v.format, "an expert or MLP");
}

Result<void> check_linear(const WeightKey& key, const formats::MatrixView& v) {
  switch (v.format) {
    case FormatId::kBf16:
    case FormatId::kNvfp4:
    case FormatId::kMxfp4:
    case FormatId::kMxfp8:
    case FormatId::kFp8Channel:
    case FormatId::kFp8Tensor: return {};
    case FormatId::kFp8Block:
      if (v.block_rows == 128 && v.block_cols == 128 && fp8_block_ok(v)) return {};
      break;
    default: break;
  }
  return no_kernel(key, v.format, "a linear layer");
}

/// What a weight takes on the device.
Result<int64_t> device_bytes(const WeightKey& key, const Weight& weight) {
  const formats::MatrixView& v = weight.meta;
  if (is_vector(key.role)) return v.rows * v.cols * 4;
  if (key.role == Role::kEmbedding || key.role == Role::kRouter) {
    if (v.format != FormatId::kBf16 && v.format != FormatId::kF32 &&
        !(v.format == FormatId::kF16 && key.role == Role::kEmbedding)) {
      return no_kernel(key, v.format, recipe::role_name(key.role));
    }
    return v.rows * formats::code_row_bytes(v.format, v.cols);
  }
  if (is_expert(key.role)) {
    NIBBLE_TRY(check_expert(key, v));
  } else {
    NIBBLE_TRY(check_linear(key, v));
  }
  const FormatId tiles = v.format == FormatId::kFp8Channel || v.format == FormatId::kFp8Tensor
                             ? FormatId::kMxfp8
                             : v.format;
  return packed_bytes(tiles, Product::kDown, v.rows, v.cols);
}

/// What must be equal in a group.
auto form_of(const formats::MatrixView& v) {
  return std::tuple(v.format, v.block_rows, v.block_cols, v.nf3_levels);
}

Result<std::vector<CudaExpertGroup>> group_experts(const recipe::Recipe& recipe, int32_t layer) {
  using Form = decltype(form_of({}));
  std::map<std::pair<Form, Form>, CudaExpertGroup> groups;
  for (int32_t e = 0; e < recipe.config().experts; ++e) {
    const formats::MatrixView& gate = recipe.find({layer, Role::kExpertGate, e})->meta;
    const formats::MatrixView& up = recipe.find({layer, Role::kExpertUp, e})->meta;
    const formats::MatrixView& down = recipe.find({layer, Role::kExpertDown, e})->meta;
    if (form_of(gate) != form_of(up)) {
      return Error(
          Code::kUnsupported,
          cat("layer ", layer, " expert ", e, ": gate is ", formats::block_format(gate.format).name,
              " and up ", formats::block_format(up.format).name,
              "; the CUDA kernels need one format for both (the CPU does not)"));
    }
    groups[{form_of(gate), form_of(down)}].experts.push_back(e);
  }
  if (static_cast<int64_t>(groups.size()) > kMaxGroupsOfALayer) {
    return Error(Code::kUnsupported,
                 cat("layer ", layer, ": experts of ", groups.size(),
                     " different formats, the CUDA kernels take ", kMaxGroupsOfALayer));
  }
  std::vector<CudaExpertGroup> list;
  for (auto& [form, group] : groups) list.push_back(std::move(group));
  return list;
}

// Codes of gate and up of one expert must fit a slot; few slots do if they are large.
CudaStaging staging_for(int64_t codes) {
  constexpr int kFewSlots = 3;
  CudaStaging staging;
  const int64_t usual = staging.device_bytes();
  staging.slot_bytes = std::max(staging.slot_bytes, 2 * codes + 4096);
  staging.slots =
      static_cast<int>(std::clamp<int64_t>(usual / staging.slot_bytes, kFewSlots, staging.slots));
  return staging;
}

}  // namespace

Result<CudaPlan> make_cuda_plan(const recipe::Recipe& recipe, const PlanOptions& options) {
  const recipe::ModelConfig& config = recipe.config();
  CudaPlan plan;
  plan.options = options;
  if (plan.options.max_context == 0) plan.options.max_context = config.max_positions;
  const auto add = [&](const WeightKey& key, const Weight& weight) -> Result<void> {
    NIBBLE_TRY(const int64_t bytes, device_bytes(key, weight));
    plan.weights_by_format[std::string(
        is_vector(key.role) ? "f32" : formats::block_format(weight.meta.format).name)] += bytes;
    plan.weights_bytes += bytes;
    return {};
  };
  int64_t scales = 0;  // of the largest projection, staged whole
  int64_t codes = 0;   // of the largest expert's (or MLP's) matrix
  std::map<std::pair<int32_t, Role>, int64_t> scales_of;
  for (const auto& [key, weight] : recipe.weights()) {
    if (key.layer >= config.layers) continue;  // the MTP layer is not used yet
    NIBBLE_TRY(add(key, weight));
    if (!is_expert(key.role)) continue;
    int64_t& sum = scales_of[{key.layer, key.role}];
    sum += formats::scale_plane_bytes(weight.meta);
    scales = std::max(scales, sum);
    codes = std::max(codes, weight.codes.bytes);
  }
  const WeightKey head{-1, Role::kHead, -1};
  if (recipe.find(head) == nullptr) NIBBLE_TRY(add(head, source_weight(recipe, head)));
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    plan.groups.emplace_back();
    if (recipe.find({layer, Role::kRouter, -1}) == nullptr) continue;
    NIBBLE_TRY(plan.groups.back(), group_experts(recipe, layer));
  }
  plan.kv_bytes_per_token = kv_geometry(config, kernels::Activations::kBf16).bytes_per_token();
  plan.kv_bytes = plan.kv_bytes_per_token * plan.options.max_context;
  plan.staging = staging_for(codes);
  plan.host_staging_bytes = plan.staging.host_bytes(plan.staging.readers);
  // Slots, gate's and up's scales, and what encoding them takes (about twice their bytes).
  plan.device_staging_bytes =
      plan.staging.device_bytes() + 2 * scales * (options.scales == Scales::kCsf ? 3 : 1);
  return plan;
}

}  // namespace nibble::plan
