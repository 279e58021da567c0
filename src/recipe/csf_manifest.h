// The manifest containers with CSF scales: root/manifest.json, root/build-contract.json and the
// shards of root/tensors. Their families give names to experts; sizes come from the tensors.
// Source: spec: containers, section 3.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_index.h"
#include "codec/csf.h"

namespace nibble::recipe {

struct CsfManifest {
  codec::CsfKind kind = codec::CsfKind::kNvfp4;
  std::string family, root;
  std::map<std::string, std::string> source_names;  // source tensor to bare shard name
  /// Type of the compressed scales in the source, if the writer said it (a field of nibble's own);
  /// else what the family uses.
  formats::DType scale_dtype = formats::DType::kU8;
};

/// "lil-nvfp4-csf-checkpoint/1", ...
std::string csf_manifest_schema(codec::CsfKind kind);

/// How a family names its experts' modules: head N middle E "." projection.
struct CsfFamily {
  std::string_view name;
  codec::CsfKind kind;
  int64_t experts, hidden, intermediate;  // of the model it was made for
  std::string_view head, middle;          // "layers.", ".ffn.experts."
  std::string_view weight, scale;         // suffixes of the tensors: ".weight", ".scale"
  formats::DType scale_dtype;
};
std::span<const CsfFamily> csf_families();
const CsfFamily* find_csf_family(std::string_view name);

/// Reads and checks both files. Errors: kCorruptInput starting with schema, codec, family,
/// inventory or shard_name; kNotFound for an absent file.
Result<CsfManifest> read_csf_manifest(const std::string& root);
/// Opens the shards and compares them with source_names. Errors: kCorruptInput starting with
/// inventory (a listed tensor that its shard lacks, a stored one that is not listed) or index.
Result<checkpoint::CheckpointIndex> open_manifest_tensors(const CsfManifest& manifest);

/// The source name of a stored tensor: without ".nvfp4_csf_fixed" and the like.
std::string_view csf_source_name(codec::CsfKind kind, std::string_view stored);

}  // namespace nibble::recipe
