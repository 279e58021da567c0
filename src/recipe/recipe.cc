// read_recipe: config, then every expected weight resolved, then the two-way diff and the notices.
#include "recipe/recipe.h"

#include <algorithm>
#include <utility>

#include "base/file.h"
#include "base/json.h"
#include "recipe/completeness.h"
#include "recipe/config.h"
#include "recipe/container.h"
#include "recipe/families/family.h"
#include "recipe/module_resolver.h"
#include "recipe/name_summary.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;

// A config cannot make us enumerate without end; the largest public models have a tenth of it.
constexpr int64_t kMaxWeights = 3'000'000;
constexpr int64_t kMaxWeightsPerLayerBesideExperts = 32;
constexpr int64_t kMaxConfigBytes = 64 << 20;
constexpr size_t kMaxOrphansListed = 10;
constexpr size_t kMaxNoticePatterns = 20;

Result<std::optional<Json>> optional_json(const std::string& path) {
  if (!file_exists(path)) return std::optional<Json>();
  NIBBLE_TRY(const std::string text, read_text_file(path, kMaxConfigBytes));
  NIBBLE_TRY(Json value, parse_json(text, path));
  return std::optional<Json>(std::move(value));
}

const Json* pointer(const std::optional<Json>& value) { return value ? &*value : nullptr; }

}  // namespace

struct RecipeBuilder {
  Recipe recipe;
  const Family* family = nullptr;
  Quantization quant;
  std::vector<ExpectedWeight> expected;

  struct Absent {
    int64_t present = 0;  // weights that are there
    std::vector<std::string> names, whys;
  };
  Absent main;
  std::map<int32_t, Absent> mtp;  // by layer
  // "config says ..., tensors hold ..." to modules.
  std::map<std::string, std::vector<std::string>> contradictions;

  void notice(std::string text) { recipe.notices_.push_back(std::move(text)); }

  static Result<Recipe> build(CheckpointIndex index, const std::string& directory,
                              std::optional<codec::CsfKind> manifest) {
    RecipeBuilder builder;
    builder.recipe.index_ = std::make_shared<const CheckpointIndex>(std::move(index));
    NIBBLE_TRY(builder.read_configs(directory));
    if (manifest) builder.quant.set_manifest_csf(*manifest);
    NIBBLE_TRY(builder.enumerate());
    Usage usage(*builder.recipe.index_);
    NIBBLE_TRY(builder.resolve_all(usage));
    NIBBLE_TRY(builder.settle(usage));
    return std::move(builder.recipe);
  }

  Result<void> read_configs(const std::string& directory) {
    NIBBLE_TRY(std::optional<Json> config, optional_json(directory + "/config.json"));
    if (!config) return Error(Code::kNotFound, cat("'", directory, "': config.json is missing"));
    NIBBLE_TRY(const std::optional<Json> generation,
               optional_json(directory + "/generation_config.json"));
    NIBBLE_TRY(const std::optional<Json> hf_quant,
               optional_json(directory + "/hf_quant_config.json"));
    const std::string type = model_type(*config);
    family = find_family(type);
    if (family == nullptr) {
      return Error(Code::kUnsupported,
                   cat("config.json: key 'model_type': '", type.substr(0, 60),
                       "' is not a known family; known are ", known_families()));
    }
    NIBBLE_TRY(recipe.config_, family->parse_config(*config, pointer(generation)));
    recipe.config_.family = std::string(family->name);
    NIBBLE_TRY(quant, Quantization::from_config(*config, pointer(hf_quant)));
    recipe.raw_config_ = std::make_shared<const Json>(std::move(*config));
    return {};
  }

  Result<void> enumerate() {
    ModelConfig& config = recipe.config_;
    const int64_t stored = family->stored_mtp_layers(config, recipe.index());
    if (stored > config.mtp_layers) {
      notice(cat("config promises ", config.mtp_layers, " MTP layers, the tensors hold ", stored,
                 " from layer ", config.layers + config.mtp_layers, " on: taken as MTP layers"));
      config.mtp_layers = stored;
    }
    const int64_t most = (config.layers + config.mtp_layers) *
                         (3 * config.experts + kMaxWeightsPerLayerBesideExperts);
    if (most > kMaxWeights) {
      return Error(Code::kCorruptInput,
                   cat("config.json: ", config.layers, " layers of ", config.experts,
                       " experts: expected at most ", kMaxWeights, " weights"));
    }
    expected = family->enumerate(config, recipe.index());
    return {};
  }

  Result<void> resolve_all(Usage& usage) {
    for (const ExpectedWeight& want : expected) {
      const bool is_vector = want.kind == WeightKind::kVector;
      NIBBLE_TRY(Resolution found,
                 is_vector ? resolve_vector(recipe.index(), want.module.name, want.cols)
                           : resolve(recipe.index(), quant, want.module, want.rows, want.cols));
      Absent& side = want.key.layer >= recipe.config_.layers ? mtp[want.key.layer] : main;
      if (!found.weight) {
        note_missing(want, found, side);
        continue;
      }
      ++side.present;
      for (const checkpoint::TensorInfo* tensor : found.used) usage.mark(tensor);
      if (!is_vector) cross_check(want, found);
      recipe.weights_.insert_or_assign(recipe.weights_.end(), want.key, std::move(*found.weight));
    }
    return {};
  }

  void note_missing(const ExpectedWeight& want, const Resolution& found, Absent& side) {
    const bool wholly = found.why == "weight" || want.kind == WeightKind::kVector;
    if (want.optional && wholly) return;
    side.names.push_back(found.missing);
    if (!wholly) {
      side.whys.push_back(
          cat(key_text(want.key), " lacks '", found.missing, "' (", found.why, ")"));
    }
  }

  void cross_check(const ExpectedWeight& want, const Resolution& found) {
    if (found.contradiction.empty()) return;
    const bool plain = found.weight->meta.scale_kind == formats::ScaleKind::kNone;
    if (plain && want.kind == WeightKind::kSilentMatrix) return;
    const Declared& says = found.declared;
    contradictions[cat("config says ", says.form == nullptr ? "unquantized (" : "", says.because,
                       says.form == nullptr ? ")" : "", ", tensors hold ", found.contradiction,
                       " (used)")]
        .push_back(want.module.name);
  }

  Result<void> settle(const Usage& usage) {
    const ModelConfig& config = recipe.config_;
    recipe.mtp_present_ = config.mtp_layers > 0;
    for (auto& [layer, side] : mtp) {
      if (side.names.empty()) continue;
      if (side.present == 0) {
        recipe.mtp_present_ = false;
        std::erase_if(recipe.weights_,
                      [layer = layer](const auto& entry) { return entry.first.layer == layer; });
        notice(cat("MTP layer ", layer, " is promised by num_nextn_predict_layers but its ",
                   side.names.size(), " tensors are absent"));
        continue;
      }
      main.names.insert(main.names.end(), side.names.begin(), side.names.end());
      main.whys.insert(main.whys.end(), side.whys.begin(), side.whys.end());
    }
    const Usage::Rest rest = usage.rest();
    NIBBLE_TRY(completeness(main.names, rest.surplus, main.whys));
    add_notices(rest);
    return {};
  }

  void add_notices(const Usage::Rest& rest) {
    for (auto& [text, modules] : contradictions) {
      // Stacked experts repeat their module.
      modules.erase(std::unique(modules.begin(), modules.end()), modules.end());
      notice(cat(text, ": ", pattern_lines(modules, "modules", ", ", kMaxNoticePatterns)));
    }
    if (recipe.config_.tied_embeddings && recipe.weights_.contains({-1, Role::kHead})) {
      notice("config says tie_word_embeddings, the tensors hold a head of its own (used)");
    }
    std::string ignored;
    for (const auto& [name, count] : rest.ignored) {
      ignored += cat(ignored.empty() ? "" : ", ", name, " (", count, ")");
    }
    if (!ignored.empty()) notice(cat("stored but not needed, ignored: ", ignored));
    const auto orphans = recipe.index().orphans();
    if (orphans.empty()) return;
    std::string text = cat("stored in a shard but not assigned to it by the index, ignored: ");
    for (size_t i = 0; i < orphans.size() && i < kMaxOrphansListed; ++i) {
      text += cat(i == 0 ? "" : ", ", orphans[i]);
    }
    if (orphans.size() > kMaxOrphansListed) {
      text += cat(" and ", orphans.size() - kMaxOrphansListed, " more");
    }
    notice(std::move(text));
  }
};

const Weight* Recipe::find(const WeightKey& key) const {
  const auto found = weights_.find(key);
  return found == weights_.end() ? nullptr : &found->second;
}

Result<Recipe> read_recipe(CheckpointIndex index, const std::string& directory) {
  return RecipeBuilder::build(std::move(index), directory, std::nullopt);
}

Result<Recipe> read_recipe(const std::string& directory) {
  NIBBLE_TRY(Container container, open_container(directory));
  std::optional<codec::CsfKind> manifest;
  if (container.manifest) manifest = container.manifest->kind;
  return RecipeBuilder::build(std::move(container.index), container.files_directory, manifest);
}

}  // namespace nibble::recipe
