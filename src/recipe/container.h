// Opening a checkpoint whatever container it is in: an ordinary Hugging Face directory, the root of
// a manifest container, or a serving directory whose config.json points to such a root.
// Source: spec: containers, sections 1 to 3.
#pragma once

#include <optional>
#include <string>

#include "base/json.h"
#include "recipe/csf_manifest.h"
#include "recipe/quantization.h"

namespace nibble::recipe {

struct Container {
  checkpoint::CheckpointIndex index;
  Json config;                          // config.json
  std::optional<Json> hf_quant_config;  // hf_quant_config.json
  std::optional<CsfManifest> manifest;  // in a manifest container
  /// Where config.json and the tokenizer files lie: the directory itself, or the root's metadata.
  std::string files_directory;
  /// What the config declares, the manifest's codec included.
  Result<Quantization> quantization() const;
};

/// Errors: kCorruptInput starting with unfinished for a folder that a killed writer left
/// ("….partial-<pid>", whatever it holds); kNotFound without a config.json; those of
/// CheckpointIndex::open; kCorruptInput starting with schema, codec, family, inventory or
/// shard_name (manifest); kUnsupported or kCorruptInput starting with quant_method (serving
/// config).
Result<Container> open_container(const std::string& directory);

/// Where config.json of an unopened directory lies: `directory`, or its "metadata" for a root.
std::string config_directory(const std::string& directory);

}  // namespace nibble::recipe
