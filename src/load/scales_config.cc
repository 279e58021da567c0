#include "load/scales_config.h"

#include <filesystem>

#include "base/file.h"
#include "base/json.h"
#include "codec/csf_inventory.h"
#include "load/side_files.h"
#include "recipe/module_name.h"

namespace nibble::load {
namespace {

using formats::FormatId;
using recipe::Container;

constexpr const char* kConfigs[] = {"hf_quant_config.json", "config.json"};  // config.json last

Result<void> make_folder(const std::string& path) {
  std::error_code code;
  std::filesystem::create_directories(path, code);
  if (code) return Error(Code::kIo, cat("cannot create '", path, "': ", code.message()));
  return {};
}

Result<void> write_json(const std::string& path, const Json& value) {
  return write_file_atomic(path, json_dump(value, 2) + "\n");
}

/// The quantization_config inside a config.json, wherever it stands; null if there is none.
Json* quantization_in(Json& config) {
  if (!config.is_object()) return nullptr;
  if (json_find(config, "quantization_config") != nullptr) return &config["quantization_config"];
  const Json* text = json_find(config, "text_config");
  if (text == nullptr || json_find(*text, "quantization_config") == nullptr) return nullptr;
  return &config["text_config"]["quantization_config"];
}

/// The object that holds quant_algo: the given one, or its "quantization".
Json& algorithm_object(Json& quant) {
  const Json* inner = json_find(quant, "quantization");
  return inner != nullptr && inner->is_object() ? quant["quantization"] : quant;
}

std::string upper(std::string text) {
  for (char& c : text) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return text;
}

/// quantized_layers entry of a stored form; null where ModelOpt has no name for it.
Json layer_entry(FormatId format, const std::string& nvfp4_algo) {
  switch (format) {
    case FormatId::kNvfp4: return {{"quant_algo", nvfp4_algo}, {"group_size", 16}};
    case FormatId::kMxfp8: return {{"quant_algo", "MXFP8"}, {"group_size", 32}};
    case FormatId::kFp8Block: return {{"quant_algo", "FP8_PB_WO"}};
    case FormatId::kFp8Channel: return {{"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"}};
    case FormatId::kFp8Tensor: return {{"quant_algo", "FP8"}};
    default: return nullptr;
  }
}

/// From one algorithm for all to a table of every quantized module.
Json layer_table(const std::vector<QuantizedModule>& modules, const std::string& algo) {
  const std::string nvfp4 = upper(algo) == "W4A16_NVFP4" ? algo : "NVFP4";
  Json layers = Json::object();
  for (const QuantizedModule& module : modules) {
    const std::string_view experts = recipe::module_numbers(module.weight.name).experts_module;
    const std::string key = experts.empty() ? module.weight.name : std::string(experts);
    const Json entry = layer_entry(module.weight.meta.format, nvfp4);
    if (!entry.is_null()) layers[key] = entry;
  }
  return layers;
}

/// Declares the compressed modules in the object that holds quant_algo.
void declare_csf(Json& quant, const std::vector<QuantizedModule>& modules,
                 const std::set<std::string>& compressed) {
  const std::string algo = quant.value("quant_algo", std::string());
  if (upper(algo) != "MIXED_PRECISION" || json_find(quant, "quantized_layers") == nullptr) {
    quant["quantized_layers"] = layer_table(modules, algo);
    quant["quant_algo"] = "MIXED_PRECISION";
  }
  std::set<std::string> bare;
  for (const std::string& name : compressed) bare.emplace(recipe::without_prefix(name));
  Json layers = Json::object();
  for (const auto& [key, value] : quant["quantized_layers"].items()) {
    // Keys of the module, however prefixed, and of what lies below it give way to the new entry.
    const std::string own(recipe::without_prefix(key));
    const std::string above(recipe::module_numbers(own).experts_module);
    if (!bare.contains(own) && !bare.contains(above)) layers[key] = value;
  }
  for (const std::string& name : compressed) {
    layers[name] = {{"quant_algo", "NVFP4"}, {"group_size", 16}, {"weight_scale_encoding", "csf"}};
  }
  quant["quantized_layers"] = std::move(layers);
}

void undeclare_csf(Json& quant) {
  if (json_find(quant, "quantized_layers") == nullptr) return;
  for (auto& [key, value] : quant["quantized_layers"].items()) {
    if (value.is_object()) value.erase("weight_scale_encoding");
  }
}

/// The config without its quantization: what a conversion of scales must not change.
Json without_quantization(Json config) {
  if (!config.is_object()) return config;
  config.erase("quantization_config");
  if (config.contains("text_config") && config["text_config"].is_object()) {
    config["text_config"].erase("quantization_config");
  }
  return config;
}

/// Today's config, with every declaration of compressed scales taken back.
Json undeclared(const Container& container) {
  Json config = container.config;
  Json* quant = quantization_in(config);
  if (quant == nullptr) return config;
  if (container.manifest) {
    if (quant->contains("checkpoint_root")) *quant = recipe::source_quantization(*quant);
  } else {
    undeclare_csf(algorithm_object(*quant));
  }
  return config;
}

}  // namespace

Result<void> write_modelopt_csf_configs(const Container& container,
                                        const std::vector<QuantizedModule>& modules,
                                        const std::set<std::string>& compressed,
                                        const std::string& directory) {
  Json config = container.config;
  Json* own = quantization_in(config);
  std::optional<Json> hf = container.hf_quant_config;
  if (own == nullptr && !hf) {
    return Error(Code::kUnsupported, "config.json declares no quantization");
  }
  const std::string aside = cat(directory, "/", kSourceConfigFolder);
  NIBBLE_TRY(make_folder(aside));
  for (const char* name : kConfigs) {
    NIBBLE_TRY(copy_small_file(cat(container.files_directory, "/", name), cat(aside, "/", name)));
  }
  if (hf) {
    declare_csf(algorithm_object(*hf), modules, compressed);
    NIBBLE_TRY(write_json(directory + "/hf_quant_config.json", *hf));
  }
  if (own != nullptr) declare_csf(algorithm_object(*own), modules, compressed);
  return write_json(directory + "/config.json", config);
}

Result<std::string> write_plain_configs(const Container& container, const std::string& directory) {
  const std::string aside = container.manifest
                                ? container.manifest->root + "/metadata"
                                : cat(container.files_directory, "/", kSourceConfigFolder);
  if (file_exists(aside + "/config.json")) {
    NIBBLE_TRY(const Json kept, read_json_file(aside + "/config.json"));
    if (without_quantization(kept) == without_quantization(container.config)) {
      for (const char* name : kConfigs) {
        NIBBLE_TRY(copy_small_file(cat(aside, "/", name), cat(directory, "/", name)));
      }
      return std::string();
    }
  }
  if (container.hf_quant_config) {
    Json hf = *container.hf_quant_config;
    undeclare_csf(algorithm_object(hf));
    NIBBLE_TRY(write_json(directory + "/hf_quant_config.json", hf));
  }
  NIBBLE_TRY(write_json(directory + "/config.json", undeclared(container)));
  return std::string(
      "the source's own configs are not kept beside it: wrote its config without the declaration");
}

Result<void> write_manifest_files(const Container& source, const recipe::CsfManifest& facts,
                                  const std::string& root, const std::string& final_root) {
  const std::string metadata = root + "/metadata", serve = root + "/serve";
  for (const std::string& folder : {metadata, serve}) {
    NIBBLE_TRY(make_folder(folder));
    NIBBLE_TRY(copy_side_files(source.files_directory, folder));
  }
  for (const char* name : kConfigs) {
    NIBBLE_TRY(copy_small_file(cat(source.files_directory, "/", name), cat(metadata, "/", name)));
  }
  Json config = source.config;
  Json* quant = quantization_in(config);
  if (quant == nullptr) {
    config["quantization_config"] = source.hf_quant_config.value_or(Json::object());
    quant = &config["quantization_config"];
  }
  const bool nvfp4 = facts.kind == codec::CsfKind::kNvfp4;
  Json serving = nvfp4 ? Json{{"source_quantization_config", *quant}} : *quant;
  serving["quant_method"] = cat(codec::csf_kind_name(facts.kind), "_csf");
  serving["format_version"] = 1;
  serving["checkpoint_root"] = final_root;
  *quant = std::move(serving);
  NIBBLE_TRY(write_json(serve + "/config.json", config));

  const Json head = {{"schema", recipe::csf_manifest_schema(facts.kind)},
                     {"codec", codec::csf_codec_name(facts.kind)},
                     {"family", facts.family}};
  Json contract = head;
  contract["source_names"] = facts.source_names;
  NIBBLE_TRY(write_json(root + "/build-contract.json", contract));
  Json manifest = head;
  manifest["source_scale_dtype"] = formats::dtype_name(facts.scale_dtype);
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : facts.source_names) shards.insert(shard);
  for (const std::string& shard : shards) manifest["shards"].push_back({{"file", shard}});
  return write_json(root + "/manifest.json", manifest);
}

}  // namespace nibble::load
