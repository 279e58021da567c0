// The small files beside the weights (tokenizer, template, generation config), copied from one
// checkpoint folder to another. Configs and indexes are not among them: who converts writes those.
#pragma once

#include <string>

#include "base/result.h"

namespace nibble::load {

constexpr int64_t kSideFileBytesLimit = 256 << 20;

/// Copies *.json, *.jinja, *.txt and *.model of `from`, but hidden files, config.json,
/// hf_quant_config.json, kquant_config.json, a container's own files and *.index.json.
Result<void> copy_side_files(const std::string& from, const std::string& to);

/// Copies one small file, byte for byte, if it is there.
Result<void> copy_small_file(const std::string& from, const std::string& to);

}  // namespace nibble::load
