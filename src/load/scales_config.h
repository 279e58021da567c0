// Config files around compressed scales: declaring them in a ModelOpt config and taking that back,
// and the small files of a manifest container. Not for other folders.
// Source: spec: containers, sections 2.1 and 3.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "load/scale_planes.h"

namespace nibble::load {

/// Folder in a compressed checkpoint that keeps the source's configs byte for byte.
inline constexpr const char* kSourceConfigFolder = "source-config";

/// Writes config.json (last, since without it nothing opens) and hf_quant_config.json of
/// `container` to `directory`: quant_algo MIXED_PRECISION, and a csf entry for each of `compressed`
/// (experts modules by stored name). The source's own files go to kSourceConfigFolder.
/// Errors: kUnsupported if the source is not a ModelOpt checkpoint.
Result<void> write_modelopt_csf_configs(const recipe::Container& container,
                                        const std::vector<QuantizedModule>& modules,
                                        const std::set<std::string>& compressed,
                                        const std::string& directory);

/// Writes the configs of a decoded checkpoint to `directory`, config.json last: those put aside
/// when it was compressed, if they differ from today's in the quantization alone, else today's
/// without the declaration. Returns a notice in the second case, else "".
Result<std::string> write_plain_configs(const recipe::Container& container,
                                        const std::string& directory);

/// Writes root/metadata, root/serve, root/build-contract.json and, last, root/manifest.json around
/// the finished shards of root/tensors. `final_root` is the path root will have.
Result<void> write_manifest_files(const recipe::Container& source, const recipe::CsfManifest& facts,
                                  const std::string& root, const std::string& final_root);

}  // namespace nibble::load
