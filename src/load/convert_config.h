// The config that declares a converted checkpoint. Spec: containers, sections 2, 4 and 7.
#pragma once

#include <optional>

#include "base/json.h"
#include "load/convert_plan.h"

namespace nibble::load {

struct ConvertedConfig {
  Json config;                          // config.json
  std::optional<Json> hf_quant_config;  // hf_quant_config.json, ModelOpt only
};

/// The source's config with `quantization_config` replaced, or removed where nothing is quantized.
/// Errors: kUnsupported if the dialect's config cannot say what the plan holds.
Result<ConvertedConfig> converted_config(const Json& source, const ConvertPlan& plan);

}  // namespace nibble::load
