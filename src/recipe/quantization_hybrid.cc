// The two-tier hybrid's keys. Spec: containers, section 7.
#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "formats/element.h"
#include "recipe/module_name.h"
#include "recipe/quantization.h"

namespace nibble::recipe {
namespace {

Error bit_map_error(const std::string& what) {
  return Error(Code::kCorruptInput, cat("bit_map: ", what));
}

Result<void> parse_layer_bits(const std::string& key, const Json& list, int64_t experts,
                              HybridMap& out) {
  const int64_t layer = leading_number(key);
  if (layer < 0 || key.find_first_not_of("0123456789") != std::string::npos) {
    return bit_map_error(cat("key '", key.substr(0, 60), "': expected a layer number"));
  }
  const bool known = experts > 0;
  if (!list.is_array() || list.empty() || (known && list.size() != static_cast<size_t>(experts))) {
    return bit_map_error(
        cat("layer ", layer, ": expected a list of ", known ? cat(experts) : std::string("all"),
            " experts, found ",
            list.is_array() ? cat(list.size(), " entries") : json_dump(list).substr(0, 60)));
  }
  std::vector<uint8_t> bits;
  bits.reserve(list.size());
  for (const Json& value : list) {
    if (!value.is_number_integer() || (value != 3 && value != 4)) {
      return bit_map_error(cat("layer ", layer, " expert ", bits.size(),
                               ": expected 3 or 4, found ", json_dump(value).substr(0, 60)));
    }
    bits.push_back(value.get<uint8_t>());
  }
  out.bits.insert_or_assign(layer, std::move(bits));
  return {};
}

}  // namespace

Result<std::array<float, 8>> parse_nf3_levels(const Json& value) {
  std::array<float, 8> levels = {};
  const auto fault = [&] {
    return Error(Code::kCorruptInput, cat("nf3_levels: expected eight ascending numbers, found ",
                                          json_dump(value).substr(0, 120)));
  };
  if (!value.is_array() || value.size() != levels.size()) return fault();
  for (size_t i = 0; i < levels.size(); ++i) {
    if (!value[i].is_number()) return fault();
    const double number = value[i].get<double>();
    if (!(std::abs(number) < 1e30)) return fault();
    levels[i] = formats::decode_bf16(formats::encode_bf16(static_cast<float>(number)));
    if (i > 0 && !(levels[i] > levels[i - 1])) return fault();
  }
  return levels;
}

Result<HybridMap> parse_hybrid_map(const Json& quant, int64_t experts) {
  HybridMap out;
  const Json* map = json_find(quant, "hybrid_bit_map");
  if (map == nullptr || !map->is_object() || map->empty()) {
    return bit_map_error(cat("expected an object of layers that is not empty, found ",
                             map == nullptr ? "nothing" : json_dump(*map).substr(0, 60)));
  }
  for (const auto& [key, list] : map->items()) {
    NIBBLE_TRY(parse_layer_bits(key, list, experts, out));
  }
  const Json* kept = json_find(quant, "kept_format");
  const bool mxfp4 = kept != nullptr && *kept == "mxfp4_e8m0k32";
  if (kept != nullptr && !mxfp4 && *kept != "NVFP4") {
    return Error(Code::kCorruptInput, cat("kept_format: expected NVFP4 or mxfp4_e8m0k32, found ",
                                          json_dump(*kept).substr(0, 60)));
  }
  const Json* demoted = json_find(quant, "demoted_format");
  if (demoted != nullptr && *demoted != "nf3_2p1") {
    return Error(Code::kUnsupported, cat("demoted_format: expected nf3_2p1, found ",
                                         json_dump(*demoted).substr(0, 60)));
  }
  out.kept.format = mxfp4 ? formats::FormatId::kMxfp4 : formats::FormatId::kNvfp4;
  out.kept.label = "the bit map's kept tier";
  out.demoted.format = formats::FormatId::kNf3;
  out.demoted.label = "the bit map's demoted tier";
  out.unmapped.format = formats::FormatId::kNvfp4;
  out.unmapped.label = "a layer that the bit map leaves out";
  const Json* dense = json_find(quant, "dense_format");
  out.dense_mxfp8 = dense != nullptr && *dense == "mxfp8";
  if (dense != nullptr && !out.dense_mxfp8) {
    return Error(Code::kUnsupported,
                 cat("quant_method: dense_format ", json_dump(*dense).substr(0, 60),
                     " is not known; known is mxfp8"));
  }
  out.dense.format = formats::FormatId::kMxfp8;
  out.dense.label = "dense_format mxfp8";
  if (const Json* ignored = json_find(quant, "ignored_layers")) {
    if (!ignored->is_array()) {
      return Error(Code::kCorruptInput, "key 'ignored_layers': expected a list of names");
    }
    for (const Json& name : *ignored) {
      if (!name.is_string()) {
        return Error(Code::kCorruptInput, cat("key 'ignored_layers': expected names, found ",
                                              json_dump(name).substr(0, 60)));
      }
      out.ignored_layers.push_back(name.get<std::string>());
    }
  }
  return out;
}

}  // namespace nibble::recipe
