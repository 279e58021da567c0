#include "load/convert_plan.h"

#include <algorithm>
#include <array>
#include <set>

#include "load/convert_spell.h"

namespace nibble::load {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using formats::FormatId;
using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;

/// What belongs to a matrix beside its bias, under every dialect.
constexpr std::string_view kMatrixSuffixes[] = {
    ".weight",         ".weight_packed",       ".weight_scale",     ".weight_scale_inv",
    ".weight_scale_2", ".weight_global_scale", ".weight_scale_fp8", ".scale",
    ".nf3_packed",     ".nf3_scale",           ".nf3_refit_packed", ".nf3_refit_scale",
    ".input_scale",    ".input_global_scale"};

std::string_view format_name(FormatId id) { return formats::block_format(id).name; }

bool is_mtp_copy(Role role) { return role == Role::kMtpEmbedding || role == Role::kMtpHead; }

ConvertTarget target_of(Role role, const ConvertOptions& options) {
  switch (role) {
    case Role::kExpertGate:
    case Role::kExpertUp:
    case Role::kExpertDown: return options.experts;
    case Role::kQ:
    case Role::kK:
    case Role::kV:
    case Role::kO:
    case Role::kDenseGate:
    case Role::kDenseUp:
    case Role::kDenseDown:
    case Role::kSharedGate:
    case Role::kSharedUp:
    case Role::kSharedDown:
    case Role::kMtpProjection: return options.others;
    case Role::kHead:
    case Role::kMtpHead: return options.head;
    default: return ConvertTarget::kKeep;
  }
}

FormatId format_of(ConvertTarget target, FormatId stored) {
  switch (target) {
    case ConvertTarget::kKeep: return stored;
    case ConvertTarget::kBf16: return FormatId::kBf16;
    case ConvertTarget::kNvfp4: return FormatId::kNvfp4;
    case ConvertTarget::kMxfp4: return FormatId::kMxfp4;
    case ConvertTarget::kMxfp8: return FormatId::kMxfp8;
    case ConvertTarget::kNf3: return FormatId::kNf3;
  }
  return stored;
}

/// NF3 has dialects of its own: only the one that is written counts as the target.
bool is_target_form(const formats::MatrixView& meta, FormatId target) {
  if (meta.format != target) return false;
  return target != FormatId::kNf3 ||
         (meta.nf3_bias_log2 == kNf3BiasLog2 && meta.nf3_levels == formats::kNf3Levels);
}

/// "….experts.gate_proj" of expert 3 is written as "….experts.3.gate_proj".
std::string result_module(const WeightKey& key, const Weight& weight) {
  if (key.expert < 0 || weight.codes.bytes == weight.codes.tensor->bytes) return weight.name;
  const size_t dot = weight.name.rfind('.');
  return cat(weight.name.substr(0, dot + 1), key.expert, weight.name.substr(dot));
}

bool holds(ConvertDialect dialect, const ConvertItem& item) {
  const bool expert = is_routed_expert(item.key.role);
  const formats::MatrixView& meta = item.weight->meta;
  switch (item.target) {
    case FormatId::kNvfp4: return dialect != ConvertDialect::kHybrid || expert;
    case FormatId::kMxfp8: return dialect != ConvertDialect::kHybrid || !expert;
    case FormatId::kMxfp4:
      return dialect == ConvertDialect::kCompressedTensors ||
             (dialect == ConvertDialect::kHybrid && expert);
    case FormatId::kNf3: return dialect == ConvertDialect::kHybrid && expert;
    case FormatId::kFp8Block:
      return dialect == ConvertDialect::kModelOpt && meta.block_rows == 128 &&
             meta.block_cols == 128 && meta.scale_kind == formats::ScaleKind::kF32;
    case FormatId::kFp8Channel:
      return dialect == ConvertDialect::kModelOpt && meta.scale_kind == formats::ScaleKind::kF32;
    case FormatId::kFp8Tensor: return dialect == ConvertDialect::kModelOpt;
    default: return true;
  }
}

constexpr ConvertDialect kDialects[] = {
    ConvertDialect::kModelOpt, ConvertDialect::kCompressedTensors, ConvertDialect::kHybrid};

struct Planner {
  const recipe::Recipe& recipe;
  const ConvertOptions& options;
  ConvertPlan plan;
  std::vector<ConvertItem> items;                 // in the order of keys
  std::set<const TensorInfo*> consumed, dropped;  // not copied
  std::map<const TensorInfo*, int32_t> layer_of;  // of tensors that weights use
  int64_t lost_input_scales = 0;

  const CheckpointIndex& index() const { return recipe.index(); }

  Result<ConvertPlan> build() {
    NIBBLE_TRY(check_options());
    if (options.drop_mtp_copies) NIBBLE_TRY(drop_mtp_copies());
    NIBBLE_TRY(make_items());
    NIBBLE_TRY(choose_dialect());
    if (plan.verbatim) items.clear();
    for (ConvertItem& item : items) {
      consume(item);
      NIBBLE_TRY(check_global(item));
    }
    list_modules();
    list_steps();
    return std::move(plan);
  }

  Result<void> check_options() {
    const auto fits = [](ConvertTarget t) {
      return t == ConvertTarget::kKeep || t == ConvertTarget::kMxfp8;
    };
    if (!fits(options.others) || !fits(options.head)) {
      return Error(Code::kInvalidArgument,
                   cat(fits(options.others) ? "head" : "others", ": expected keep or mxfp8"));
    }
    if (options.max_shard_bytes < 1) {
      return Error(Code::kInvalidArgument,
                   cat("shard size: expected at least 1 byte, found ", options.max_shard_bytes));
    }
    return {};
  }

  Result<bool> same_bytes(const TensorInfo& a, const TensorInfo& b) {
    constexpr int64_t kChunk = 16 << 20;
    if (a.dtype != b.dtype || a.shape != b.shape) return false;
    std::vector<std::byte> left, right;
    for (int64_t at = 0; at < a.bytes; at += kChunk) {
      const auto size = static_cast<size_t>(std::min(kChunk, a.bytes - at));
      left.resize(size);
      right.resize(size);
      NIBBLE_TRY(index().read(a, at, left));
      NIBBLE_TRY(index().read(b, at, right));
      if (left != right) return false;
    }
    return true;
  }

  Result<void> drop_mtp_copies() {
    for (const auto& [key, weight] : recipe.weights()) {
      if (!is_mtp_copy(key.role) || !is_plain(weight.meta.format)) continue;
      const Weight* original =
          recipe.find({-1, key.role == Role::kMtpHead ? Role::kHead : Role::kEmbedding});
      if (original == nullptr) original = recipe.find({-1, Role::kEmbedding});  // tied
      if (original == nullptr || !is_plain(original->meta.format)) continue;
      const TensorInfo& tensor = *weight.codes.tensor;
      NIBBLE_TRY(const bool same, same_bytes(tensor, *original->codes.tensor));
      plan.notices.push_back(cat(same ? "dropped '" : "kept '", tensor.name, "': it ",
                                 same ? "equals '" : "differs from '", original->codes.tensor->name,
                                 "'"));
      if (same) dropped.insert(&tensor);
    }
    return {};
  }

  Result<void> make_items() {
    struct Refused {
      int64_t count = 0;
      std::string first;
    };
    std::map<std::string, Refused> twice;
    for (const auto& [key, weight] : recipe.weights()) {
      layer_of.emplace(weight.codes.tensor, key.layer);
      if (dropped.contains(weight.codes.tensor)) continue;
      const FormatId stored = weight.meta.format;
      const ConvertTarget wish = target_of(key.role, options);
      const FormatId target = format_of(wish, stored);
      const bool same = wish == ConvertTarget::kKeep || is_target_form(weight.meta, target);
      if (same && is_plain(stored)) continue;
      if (!same && !is_plain(stored) && !is_plain(target)) {
        Refused& pair = twice[cat(format_name(stored), " to ", format_name(target))];
        if (pair.count++ == 0) pair.first = recipe::key_text(key);
      }
      ConvertItem item;
      item.key = key;
      item.weight = &weight;
      item.module = result_module(key, weight);
      item.target = target;
      item.same = same;
      NIBBLE_TRY(check_group(item));
      items.push_back(std::move(item));
    }
    for (const auto& [text, pair] : twice) {
      const std::string what = cat(pair.count, " weights go from ", text, ", the first is ",
                                   pair.first, ": decoded and rounded a second time");
      if (!options.requantize) {
        return Error(Code::kUnsupported, cat(what, "; this needs to be asked for (requantize)"));
      }
      plan.notices.push_back(what);
    }
    return {};
  }

  Result<void> check_group(const ConvertItem& item) {
    const int group = formats::block_format(item.target).group_cols;
    if (item.same || group == 0 || item.weight->meta.cols % group == 0) return {};
    return Error(
        Code::kInvalidArgument,
        cat(recipe::key_text(item.key), " '", item.module, "': ", item.weight->meta.cols,
            " columns are not a multiple of ", group, " (", format_name(item.target), ")"));
  }

  /// A global that is kept cannot be moved to one that the dialect can express.
  Result<void> check_global(const ConvertItem& item) {
    if (plan.dialect != ConvertDialect::kCompressedTensors || !item.same ||
        item.target != FormatId::kNvfp4 || item.global_divisor != nullptr ||
        divisor_of(item.weight->meta.global)) {
      return {};
    }
    return Error(Code::kUnsupported,
                 cat(recipe::key_text(item.key), " '", item.module, "': its global scale ",
                     item.weight->meta.global, " is the reciprocal of no FP32 number, so ",
                     "compressed-tensors cannot store it; modelopt can"));
  }

  const ConvertItem* first_without_form(ConvertDialect dialect) const {
    for (const ConvertItem& item : items) {
      if (!is_plain(item.target) && !holds(dialect, item)) return &item;
    }
    return nullptr;
  }

  Result<void> choose_dialect() {
    const bool converts =
        std::any_of(items.begin(), items.end(), [](const ConvertItem& i) { return !i.same; });
    plan.verbatim = !converts && !options.dialect;
    if (plan.verbatim) return {};
    std::vector<ConvertDialect> order(std::begin(kDialects), std::end(kDialects));
    const bool from_ct = std::any_of(items.begin(), items.end(), [](const ConvertItem& i) {
      return i.same && i.weight->dialect.starts_with("compressed-tensors");
    });
    if (from_ct) std::swap(order[0], order[1]);
    std::string able;
    for (const ConvertDialect dialect : order) {
      if (first_without_form(dialect) != nullptr) continue;
      if (!options.dialect || *options.dialect == dialect) {
        plan.dialect = dialect;
        return {};
      }
      able += cat(able.empty() ? "" : " or ", convert_dialect_name(dialect));
    }
    const ConvertDialect asked = options.dialect.value_or(order[0]);
    const ConvertItem* item = first_without_form(asked);
    return Error(Code::kUnsupported,
                 cat(convert_dialect_name(asked), " has no form for ", format_name(item->target),
                     " of ", recipe::key_text(item->key), "; ",
                     able.empty() ? "no dialect holds all formats of this result"
                                  : cat(able, " holds all of this result")));
  }

  void consume(ConvertItem& item) {
    const std::string& name = item.weight->name;
    for (const std::string_view suffix : kMatrixSuffixes) {
      if (const TensorInfo* tensor = index().find(cat(name, suffix))) consumed.insert(tensor);
    }
    consumed.insert(item.weight->codes.tensor);
    if (item.weight->scales.tensor != nullptr) consumed.insert(item.weight->scales.tensor);
    if (!item.same || item.module != name) return;
    const bool from_ct = item.weight->dialect.starts_with("compressed-tensors");
    const bool to_ct = plan.dialect == ConvertDialect::kCompressedTensors;
    if (from_ct != to_ct) {
      if (item.weight->has_input_scale) ++lost_input_scales;
      return;
    }
    item.input_scale = index().find(cat(name, to_ct ? ".input_global_scale" : ".input_scale"));
    if (to_ct) item.global_divisor = index().find(cat(name, ".weight_global_scale"));
  }

  void list_modules() {
    std::map<WeightKey, const ConvertItem*> by_key;
    for (const ConvertItem& item : items) by_key.emplace(item.key, &item);
    for (const auto& [key, weight] : recipe.weights()) {
      if (dropped.contains(weight.codes.tensor)) continue;
      const auto found = by_key.find(key);
      ResultModule module;
      module.key = key;
      module.meta = weight.meta;
      if (found == by_key.end()) {
        module.name = weight.name;
        module.format = weight.meta.format;
      } else {
        module.name = found->second->module;
        module.format = found->second->target;
        if (!found->second->same) {
          module.meta = {};
          module.meta.nf3_levels = formats::kNf3Levels;
          module.meta.nf3_bias_log2 = kNf3BiasLog2;
        }
        module.input_scale = found->second->input_scale != nullptr;
      }
      const bool vector = weight.codes.tensor->shape.size() < 2;
      const bool embedding = key.role == Role::kEmbedding || key.role == Role::kMtpEmbedding;
      if (!is_plain(module.format)) {
        plan.quantized.push_back(std::move(module));
      } else if (!vector && !embedding) {
        plan.plain.push_back(std::move(module));
      }
    }
    if (lost_input_scales > 0) {
      plan.notices.push_back(cat("input scales of ", lost_input_scales,
                                 " weights are left out: the result's dialect spells them "
                                 "differently"));
    }
  }

  void list_steps() {
    // By layer: what is copied, then single weights, then each expert's gate and up, and its down.
    std::map<std::array<int64_t, 3>, ConvertStep> order;  // layer, expert, place
    int64_t place = 0;
    for (const TensorInfo& tensor : index().tensors()) {
      if (consumed.contains(&tensor) || dropped.contains(&tensor)) continue;
      const auto layer = layer_of.find(&tensor);
      order[{layer == layer_of.end() ? -1 : layer->second, -1, place++}].copy = &tensor;
      plan.source_bytes += tensor.bytes;
    }
    for (ConvertItem& item : items) {
      plan.source_bytes += item.weight->codes.bytes + item.weight->scales.bytes;
      std::array<int64_t, 3> at = {item.key.layer, item.key.expert, place++};
      if (is_routed_expert(item.key.role)) at[2] = item.key.role == Role::kExpertDown ? 1 : 0;
      order[at].items.push_back(std::move(item));
    }
    for (auto& [at, step] : order) plan.steps.push_back(std::move(step));
  }
};

}  // namespace

bool is_plain(FormatId format) {
  return format == FormatId::kF32 || format == FormatId::kF16 || format == FormatId::kBf16;
}

bool is_routed_expert(Role role) {
  return role == Role::kExpertGate || role == Role::kExpertUp || role == Role::kExpertDown;
}

Result<ConvertPlan> plan_conversion(const recipe::Recipe& recipe, const ConvertOptions& options) {
  return Planner{recipe, options, {}, {}, {}, {}, {}, 0}.build();
}

}  // namespace nibble::load
