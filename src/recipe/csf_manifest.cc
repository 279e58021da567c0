#include "recipe/csf_manifest.h"

#include <algorithm>
#include <array>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "codec/csf_inventory.h"

namespace nibble::recipe {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using codec::CsfKind;
using formats::DType;

constexpr std::string_view kMlp = ".mlp.experts.", kLanguage = "model.language_model.layers.";
constexpr std::array<CsfFamily, 5> kFamilies = {{
    {"glm53_nvfp4", CsfKind::kNvfp4, 288, 4096, 2048, kLanguage, kMlp, ".weight", ".weight_scale",
     DType::kF8E4M3},
    {"qwen38_flash_next_nvfp4", CsfKind::kNvfp4, 512, 2560, 640, kLanguage, kMlp, ".weight",
     ".weight_scale", DType::kF8E4M3},
    {"deepseek_v41", CsfKind::kMxfp4, 384, 5120, 2304, "layers.", ".ffn.experts.", ".weight",
     ".scale", DType::kF8E8M0},
    {"deepseek_v4_flash", CsfKind::kMxfp4, 256, 4096, 2048, "layers.", ".ffn.experts.", ".weight",
     ".scale", DType::kF8E8M0},
    {"kimi_k3", CsfKind::kMxfp4, 896, 3584, 3072, "language_model.model.layers.",
     ".block_sparse_moe.experts.", ".weight_packed", ".weight_scale", DType::kU8},
}};

template <typename... Parts>
Error fault(std::string_view name, const Parts&... parts) {
  return Error(Code::kCorruptInput, cat(name, ": ", parts...));
}

Result<void> check_equal(const Json& file, const char* file_name, const char* key,
                         std::string_view want) {
  const Json* value = json_find(file, key);
  if (value != nullptr && value->is_string() && value->get_ref<const std::string&>() == want) {
    return {};
  }
  return fault(key, file_name, ": expected '", want, "', found ",
               value == nullptr ? std::string("none") : json_dump(*value).substr(0, 80));
}

/// The codec whose schema this is.
Result<CsfKind> kind_of(const Json& manifest) {
  const Json* schema = json_find(manifest, "schema");
  for (const CsfKind kind : {CsfKind::kNvfp4, CsfKind::kMxfp4}) {
    if (schema != nullptr && *schema == csf_manifest_schema(kind)) return kind;
  }
  return fault("schema", "manifest.json: expected '", csf_manifest_schema(CsfKind::kNvfp4),
               "' or '", csf_manifest_schema(CsfKind::kMxfp4), "', found ",
               schema == nullptr ? std::string("none") : json_dump(*schema).substr(0, 80));
}

Result<std::set<std::string>> manifest_shards(const Json& manifest) {
  std::set<std::string> out;
  const Json* shards = json_find(manifest, "shards");
  if (shards == nullptr || !shards->is_array()) {
    return fault("inventory", "manifest.json: expected a list 'shards'");
  }
  for (const Json& shard : *shards) {
    const Json* file = json_find(shard, "file");
    if (file == nullptr || !file->is_string()) {
      return fault("inventory", "manifest.json: a shard without 'file'");
    }
    if (!out.insert(file->get<std::string>()).second) {
      return fault("inventory", "manifest.json: shard ", json_dump(*file).substr(0, 80),
                   " is listed twice");
    }
  }
  return out;
}

Result<std::map<std::string, std::string>> contract_names(const Json& contract) {
  std::map<std::string, std::string> out;
  const Json* names = json_find(contract, "source_names");
  if (names == nullptr || !names->is_object()) {
    return fault("inventory", "build-contract.json: expected an object 'source_names'");
  }
  for (const auto& [tensor, shard] : names->items()) {
    if (!shard.is_string()) {
      return fault("inventory", "build-contract.json: '", tensor.substr(0, 80), "' names no shard");
    }
    out.emplace(tensor, shard.get<std::string>());
  }
  return out;
}

bool is_bare(const std::string& shard) {
  constexpr std::string_view kSuffix = ".safetensors";
  return shard.size() > kSuffix.size() && shard.ends_with(kSuffix) && !shard.starts_with('.') &&
         shard.find('/') == std::string::npos && shard.find('\0') == std::string::npos;
}

DType declared_scale_dtype(const Json& manifest, DType usual) {
  const Json* name = json_find(manifest, "source_scale_dtype");
  if (name == nullptr || !name->is_string()) return usual;
  for (const DType dtype : {DType::kU8, DType::kF8E8M0, DType::kF8E4M3}) {
    if (*name == std::string(formats::dtype_name(dtype))) return dtype;
  }
  return usual;
}

}  // namespace

std::string csf_manifest_schema(CsfKind kind) {
  return cat("lil-", codec::csf_kind_name(kind), "-csf-checkpoint/1");
}

std::span<const CsfFamily> csf_families() { return kFamilies; }

const CsfFamily* find_csf_family(std::string_view name) {
  const auto found = std::find_if(kFamilies.begin(), kFamilies.end(),
                                  [name](const CsfFamily& f) { return f.name == name; });
  return found == kFamilies.end() ? nullptr : &*found;
}

Result<CsfManifest> read_csf_manifest(const std::string& root) {
  NIBBLE_TRY(const Json manifest, read_json_file(root + "/manifest.json"));
  NIBBLE_TRY(const Json contract, read_json_file(root + "/build-contract.json"));
  CsfManifest out;
  out.root = root;
  NIBBLE_TRY(out.kind, kind_of(manifest));
  NIBBLE_TRY(check_equal(contract, "build-contract.json", "schema", csf_manifest_schema(out.kind)));
  const std::string_view codec = codec::csf_codec_name(out.kind);
  NIBBLE_TRY(check_equal(manifest, "manifest.json", "codec", codec));
  NIBBLE_TRY(check_equal(contract, "build-contract.json", "codec", codec));
  const Json* family = json_find(contract, "family");
  if (family != nullptr && family->is_string()) out.family = family->get<std::string>();
  const CsfFamily* known = find_csf_family(out.family);
  if (known == nullptr || known->kind != out.kind) {
    std::string names;
    for (const CsfFamily& f : kFamilies) {
      if (f.kind == out.kind) names += cat(names.empty() ? "" : ", ", f.name);
    }
    return fault("family", "build-contract.json: expected one of ", names, ", found '",
                 out.family.substr(0, 80), "'");
  }
  NIBBLE_TRY(check_equal(manifest, "manifest.json", "family", out.family));
  NIBBLE_TRY(const std::set<std::string> shards, manifest_shards(manifest));
  NIBBLE_TRY(out.source_names, contract_names(contract));
  std::set<std::string> named;
  for (const auto& [tensor, shard] : out.source_names) named.insert(shard);
  if (named != shards) {
    return fault("inventory", "manifest.json lists ", shards.size(),
                 " shards, build-contract.json names ", named.size(),
                 ", and they are not the same");
  }
  for (const std::string& shard : shards) {
    if (!is_bare(shard)) {
      return fault("shard_name", "expected a bare *.safetensors name, found '", shard.substr(0, 80),
                   "'");
    }
  }
  out.scale_dtype = declared_scale_dtype(manifest, known->scale_dtype);
  return out;
}

std::string_view csf_source_name(CsfKind kind, std::string_view stored) {
  for (const std::string& suffix :
       {codec::csf_fixed_name(kind, ""), codec::csf_exceptions_name(kind, "")}) {
    if (stored.ends_with(suffix)) return stored.substr(0, stored.size() - suffix.size());
  }
  return stored;
}

Result<CheckpointIndex> open_manifest_tensors(const CsfManifest& manifest) {
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : manifest.source_names) shards.insert(shard);
  NIBBLE_TRY(CheckpointIndex index,
             CheckpointIndex::open_shards(manifest.root + "/tensors",
                                          std::vector<std::string>(shards.begin(), shards.end())));
  std::set<std::string_view> stored;
  for (const TensorInfo& tensor : index.tensors()) {
    const std::string_view source = csf_source_name(manifest.kind, tensor.name);
    const auto named = manifest.source_names.find(std::string(source));
    const std::string& shard = index.shards()[static_cast<size_t>(tensor.shard)];
    if (named == manifest.source_names.end() || named->second != shard) {
      return fault("inventory", "tensor '", tensor.name, "' is stored in '", shard, "', ",
                   named == manifest.source_names.end()
                       ? std::string("source_names lacks it")
                       : cat("source_names says '", named->second, "'"));
    }
    stored.insert(source);
  }
  for (const auto& [tensor, shard] : manifest.source_names) {
    if (!stored.contains(tensor)) {
      return fault("inventory", "tensor '", tensor, "' is not in its shard '", shard, "'");
    }
  }
  return index;
}

}  // namespace nibble::recipe
