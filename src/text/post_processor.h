// The "post_processor" of tokenizer.json for one text: ids put before and after it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/json_fwd.h"
#include "base/result.h"

namespace nibble::text {

struct PostProcessor {
  std::vector<int32_t> before, after;
  /// `json` may be null. ByteLevel only moves offsets, so it adds nothing.
  /// Errors: kUnsupported naming the type; kCorruptInput for broken templates.
  static Result<PostProcessor> parse(const Json* json);
};

}  // namespace nibble::text
