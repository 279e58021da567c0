#include "plan/plan.h"

#include <algorithm>
#include <tuple>

#include "codec/csf.h"
#include "kernels/matmul/matmul.h"

namespace nibble::plan {
namespace {

using formats::FormatId;
using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;

// Source bytes that one loading task holds. Small enough that staging stays negligible beside any
// model, large enough that a read is worth a system call.
constexpr int64_t kChunkBytes = 4 << 20;

// A share takes rows of these roles ...
bool cuts_rows(Role role) {
  switch (role) {
    case Role::kQ:
    case Role::kK:
    case Role::kV:
    case Role::kExpertGate:
    case Role::kExpertUp:
    case Role::kDenseGate:
    case Role::kDenseUp:
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kHead:
    case Role::kMtpHead: return true;
    default: return false;
  }
}

// ... and columns of these; every rank holds the rest whole.
bool cuts_columns(Role role) {
  switch (role) {
    case Role::kO:
    case Role::kExpertDown:
    case Role::kDenseDown:
    case Role::kSharedDown: return true;
    default: return false;
  }
}

Result<formats::MatrixView> share(const WeightKey& key, const Weight& weight, int64_t ranks) {
  formats::MatrixView view = weight.meta;
  const int64_t group = formats::block_format(view.format).group_cols;
  if (ranks == 1) return view;
  if (cuts_rows(key.role)) {
    if (view.rows % ranks != 0) {
      return Error(Code::kUnsupported, cat(key_text(key), ": ", view.rows,
                                           " rows do not split over ", ranks, " ranks"));
    }
    view.rows /= ranks;
  } else if (cuts_columns(key.role)) {
    const int64_t unit = group > 0 ? group : 1;
    if (view.cols % (ranks * unit) != 0) {
      return Error(Code::kUnsupported,
                   cat("cut_not_group: ", key_text(key), ": ", view.cols, " columns over ", ranks,
                       " ranks is no whole number of groups of ", unit));
    }
    view.cols /= ranks;
  }
  return view;
}

// Whether the kernels can read this matrix's scales compressed: whole tiles, whole code bytes.
bool csf_capable(const formats::MatrixView& view) {
  const int64_t group = formats::block_format(view.format).group_cols;
  switch (view.format) {
    case FormatId::kNvfp4:
      return view.cols % (2 * group) == 0 && view.cols / group <= kernels::kMaxCsfColumns &&
             codec::check_csf_geometry(codec::CsfKind::kNvfp4, view.rows, view.cols / group)
                 .has_value();
    case FormatId::kMxfp4:
    case FormatId::kMxfp8:
      return view.cols / group <= kernels::kMaxCsfColumns &&
             codec::check_csf_geometry(codec::CsfKind::kMxfp4, view.rows, view.cols / group)
                 .has_value();
    default: return false;
  }
}

Result<PlannedWeight> plan_weight(const WeightKey& key, const Weight& weight,
                                  const PlanOptions& options) {
  PlannedWeight planned;
  planned.source_bytes = weight.codes.bytes + weight.stored_scale_bytes();
  if (is_vector(key.role)) {
    planned.layout = tensor::Layout::kRows;
    planned.planes.codes = weight.meta.rows * weight.meta.cols * 4;
    planned.chunk_rows = weight.meta.rows;
    return planned;
  }
  NIBBLE_TRY(const formats::MatrixView view, share(key, weight, options.ranks));
  if (Result<void> ok = formats::check_geometry(view); !ok) {
    return ok.error().with_context(key_text(key));
  }
  const int64_t row_bytes = formats::code_row_bytes(view.format, view.cols);
  if (key.role == Role::kEmbedding || key.role == Role::kMtpEmbedding) {
    planned.layout = tensor::Layout::kRows;
    planned.planes = {view.rows * row_bytes, formats::scale_plane_bytes(view)};
  } else {
    planned.planes = kernels::tile16_bytes(view);
    planned.may_compress = options.scales == Scales::kCsf && csf_capable(view);
  }
  int64_t chunk = kChunkBytes / std::max<int64_t>(row_bytes, 1) / 16 * 16;
  chunk = std::clamp<int64_t>(chunk, 16, view.rows);
  // One scale for the whole matrix cannot be written by several tasks.
  planned.chunk_rows = view.format == FormatId::kFp8Tensor ? view.rows : chunk;
  return planned;
}

int64_t staging_bytes(const recipe::Recipe& recipe, const PrecisionPlan& plan) {
  // Every thread keeps a buffer for the largest chunk of codes and holds one weight's whole scale
  // plane; a stored compressed plane is read and decoded, so both are held for a moment.
  int64_t codes = 0, scales = 0;
  for (const auto& [key, planned] : plan.weights) {
    if (is_vector(key.role)) continue;
    const Weight& weight = source_weight(recipe, key);
    codes = std::max(
        codes, planned.chunk_rows * formats::code_row_bytes(weight.meta.format, weight.meta.cols));
    scales = std::max(scales, formats::scale_plane_bytes(weight.meta) +
                                  (weight.stored_csf() ? weight.stored_scale_bytes() : 0));
  }
  return plan.options.threads * (codes + scales);
}

std::vector<ExpertGroup> expert_groups(const recipe::Recipe& recipe) {
  std::map<std::tuple<int32_t, FormatId, FormatId, FormatId>, std::vector<int32_t>> groups;
  for (const auto& [key, gate] : recipe.weights()) {
    if (key.role != Role::kExpertGate) continue;
    const Weight* up = recipe.find({key.layer, Role::kExpertUp, key.expert});
    const Weight* down = recipe.find({key.layer, Role::kExpertDown, key.expert});
    NIBBLE_CHECK(up != nullptr && down != nullptr, key_text(key));
    groups[{key.layer, gate.meta.format, up->meta.format, down->meta.format}].push_back(key.expert);
  }
  std::vector<ExpertGroup> list;
  for (auto& [id, experts] : groups) {
    list.push_back(
        {std::get<0>(id), std::get<1>(id), std::get<2>(id), std::get<3>(id), std::move(experts)});
  }
  return list;
}

}  // namespace

bool is_vector(Role role) {
  switch (role) {
    case Role::kFinalNorm:
    case Role::kInputNorm:
    case Role::kPostAttentionNorm:
    case Role::kQBias:
    case Role::kKBias:
    case Role::kVBias:
    case Role::kOBias:
    case Role::kQNorm:
    case Role::kKNorm:
    case Role::kRouterBias:
    case Role::kMtpEmbeddingNorm:
    case Role::kMtpHiddenNorm:
    case Role::kMtpHeadNorm: return true;
    default: return false;
  }
}

kernels::KvGeometry kv_geometry(const recipe::ModelConfig& config,
                                kernels::Activations activations) {
  kernels::KvGeometry kv;
  kv.layers = config.layers;
  kv.kv_heads = config.kv_heads;
  kv.k_dim = config.head_dim;
  kv.v_dim = config.head_dim;
  kv.type =
      activations == kernels::Activations::kF32 ? kernels::KvType::kF32 : kernels::KvType::kBf16;
  return kv;
}

const Weight& source_weight(const recipe::Recipe& recipe, const WeightKey& key) {
  const Weight* own = recipe.find(key);
  if (own == nullptr && key == WeightKey{-1, Role::kHead, -1}) {
    own = recipe.find({-1, Role::kEmbedding, -1});
  }
  NIBBLE_CHECK(own != nullptr, key_text(key));
  return *own;
}

Result<PrecisionPlan> make_plan(const recipe::Recipe& recipe, const PlanOptions& options) {
  const recipe::ModelConfig& config = recipe.config();
  if (options.ranks < 1) {
    return Error(Code::kInvalidArgument, cat("ranks must be at least 1, not ", options.ranks));
  }
  if (config.heads % options.ranks != 0 || config.kv_heads % options.ranks != 0) {
    return Error(Code::kUnsupported, cat(config.heads, " heads and ", config.kv_heads,
                                         " KV heads do not split over ", options.ranks, " ranks"));
  }
  PrecisionPlan plan;
  plan.options = options;
  if (plan.options.max_context == 0) plan.options.max_context = config.max_positions;
  MemoryPlan& memory = plan.memory;
  const auto add = [&](const WeightKey& key, const Weight& weight) -> Result<void> {
    NIBBLE_TRY(PlannedWeight planned, plan_weight(key, weight, options));
    const int64_t bytes = planned.resident_bytes();
    const std::string_view format =
        is_vector(key.role) ? "f32" : formats::block_format(weight.meta.format).name;
    memory.weights_by_format[std::string(format)] += bytes;
    memory.weights_bytes += bytes;
    if (key.layer >= config.layers) memory.mtp_bytes += bytes;
    plan.weights.emplace(key, planned);
    return {};
  };
  for (const auto& [key, weight] : recipe.weights()) {
    if (key.layer >= config.layers && !options.load_mtp) continue;
    NIBBLE_TRY(add(key, weight));
  }
  const WeightKey head{-1, Role::kHead, -1};
  if (recipe.find(head) == nullptr) NIBBLE_TRY(add(head, source_weight(recipe, head)));
  plan.groups = expert_groups(recipe);
  plan.kv = kv_geometry(config, options.activations);
  plan.kv.kv_heads /= options.ranks;
  memory.kv_bytes_per_token = plan.kv.bytes_per_token();
  memory.kv_bytes = memory.kv_bytes_per_token * plan.options.max_context;
  memory.staging_peak_bytes = staging_bytes(recipe, plan);
  return plan;
}

}  // namespace nibble::plan
