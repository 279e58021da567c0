#include "recipe/container.h"

#include "base/file.h"
#include "base/json.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;

constexpr int64_t kMaxConfigBytes = 64 << 20;

Result<std::optional<Json>> optional_json(const std::string& path) {
  if (!file_exists(path)) return std::optional<Json>();
  NIBBLE_TRY(const std::string text, read_text_file(path, kMaxConfigBytes));
  NIBBLE_TRY(Json value, parse_json(text, path));
  return std::optional<Json>(std::move(value));
}

/// quantization_config, at the top or in text_config; null if there is none.
const Json* quantization_of(const Json& config) {
  if (const Json* own = json_find(config, "quantization_config")) return own;
  const Json* text = json_find(config, "text_config");
  return text == nullptr ? nullptr : json_find(*text, "quantization_config");
}

Error quant_method(const std::string& what) {
  return Error(Code::kCorruptInput, cat("quant_method: ", what));
}

/// The root a serving config points to; empty for an ordinary config.
Result<std::string> checkpoint_root(const Json& config) {
  const Json* quant = quantization_of(config);
  if (quant == nullptr || !quant->is_object()) return std::string();
  const Json* root = json_find(*quant, "checkpoint_root");
  const Json* method = json_find(*quant, "quant_method");
  const bool csf = method != nullptr && (*method == "nvfp4_csf" || *method == "mxfp4_csf");
  if (!csf && root == nullptr) return std::string();
  if (!csf) {
    return quant_method(cat("checkpoint_root goes with nvfp4_csf or mxfp4_csf, found ",
                            method == nullptr ? "none" : json_dump(*method).substr(0, 60)));
  }
  NIBBLE_TRY(const int64_t version, json_int(*quant, "format_version", 0), "quant_method");
  if (version != 1) return quant_method(cat("expected format_version 1, found ", version));
  if (root == nullptr || !root->is_string() ||
      !root->get_ref<const std::string&>().starts_with('/')) {
    return quant_method(cat("expected an absolute path as checkpoint_root, found ",
                            root == nullptr ? "none" : json_dump(*root).substr(0, 80)));
  }
  return root->get<std::string>();
}

/// Does the serving config's method name the manifest's codec?
Result<void> check_served(const Json& config, codec::CsfKind kind) {
  const std::string want = cat(codec::csf_kind_name(kind), "_csf");
  const Json& method = quantization_of(config)->at("quant_method");
  if (method == want) return {};
  return quant_method(
      cat("config.json says ", json_dump(method).substr(0, 60), ", checkpoint_root holds ", want));
}

/// Is this a StagedDirectory's name: "….partial-1234"? A writer that was killed left it.
bool is_unfinished(std::string_view directory) {
  while (directory.size() > 1 && directory.ends_with('/')) directory.remove_suffix(1);
  constexpr std::string_view kMark = ".partial-";
  const size_t at = directory.rfind(kMark);
  if (at == std::string_view::npos) return false;
  const std::string_view pid = directory.substr(at + kMark.size());
  return !pid.empty() && pid.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

Result<Quantization> Container::quantization() const {
  NIBBLE_TRY(Quantization out,
             Quantization::from_config(config, hf_quant_config ? &*hf_quant_config : nullptr));
  if (manifest) out.set_manifest_csf(manifest->kind);
  return out;
}

std::string config_directory(const std::string& directory) {
  return file_exists(directory + "/manifest.json") ? directory + "/metadata" : directory;
}

Result<Container> open_container(const std::string& directory) {
  if (is_unfinished(directory)) {
    return Error(
        Code::kCorruptInput,
        cat("unfinished: '", directory, "' was left by a writer that was stopped; convert again"));
  }
  const std::string files = config_directory(directory);
  NIBBLE_TRY(std::optional<Json> config, optional_json(files + "/config.json"));
  if (!config) return Error(Code::kNotFound, cat("'", files, "': config.json is missing"));
  NIBBLE_TRY(std::optional<Json> hf_quant, optional_json(files + "/hf_quant_config.json"));
  std::string root = directory;
  if (files == directory) {
    NIBBLE_TRY(root, checkpoint_root(*config));
  }
  std::optional<CsfManifest> manifest;
  if (!root.empty()) {
    NIBBLE_TRY(manifest, read_csf_manifest(root));
    if (files == directory) NIBBLE_TRY(check_served(*config, manifest->kind));
  }
  NIBBLE_TRY(CheckpointIndex index,
             manifest ? open_manifest_tensors(*manifest) : CheckpointIndex::open(directory));
  return Container{std::move(index), std::move(*config), std::move(hf_quant), std::move(manifest),
                   files};
}

}  // namespace nibble::recipe
