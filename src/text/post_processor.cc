#include "text/post_processor.h"

#include <string>

#include "base/json.h"

namespace nibble::text {
namespace {

constexpr int kMaxDepth = 8;

Error corrupt(std::string_view what) {
  return Error(Code::kCorruptInput, cat("post_processor TemplateProcessing: ", what));
}

Result<std::vector<int32_t>> special_ids(const Json& json, const std::string& name) {
  const Json* all = json_find(json, "special_tokens");
  const Json* entry = all == nullptr ? nullptr : json_find(*all, name);
  const Json* ids = entry == nullptr ? nullptr : json_find(*entry, "ids");
  if (ids == nullptr || !ids->is_array()) return corrupt(cat("no ids for '", name, "'"));
  std::vector<int32_t> out;
  for (const Json& id : *ids) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX) {
      return corrupt(cat("ids of '", name, "' are not token ids"));
    }
    out.push_back(id.get<int32_t>());
  }
  return out;
}

// Puts the ids of a template around what `out` has.
Result<void> add_template(const Json& json, PostProcessor& out) {
  const Json* single = json_find(json, "single");
  if (single == nullptr || !single->is_array()) return corrupt("no 'single'");
  std::vector<int32_t> before, after;
  int texts = 0;
  for (const Json& piece : *single) {
    if (const Json* token = json_find(piece, "SpecialToken")) {
      NIBBLE_TRY(const std::string name, json_string(*token, "id"), "post_processor");
      NIBBLE_TRY(const std::vector<int32_t> ids, special_ids(json, name));
      auto& side = texts == 0 ? before : after;
      side.insert(side.end(), ids.begin(), ids.end());
    } else if (const Json* sequence = json_find(piece, "Sequence")) {
      NIBBLE_TRY(const std::string name, json_string(*sequence, "id"), "post_processor");
      if (name != "A") return corrupt(cat("'single' has sequence '", name, "'"));
      ++texts;
    } else {
      return corrupt("'single' has a piece of unknown kind");
    }
  }
  if (texts != 1) return corrupt(cat("'single' has the text ", texts, " times"));
  out.before.insert(out.before.begin(), before.begin(), before.end());
  out.after.insert(out.after.end(), after.begin(), after.end());
  return {};
}

Result<void> add(const Json& json, PostProcessor& out, int depth) {
  NIBBLE_TRY(const std::string type_name, json_string(json, "type"), "post_processor");
  const std::string_view type = type_name;
  if (type == "ByteLevel") return {};
  if (type == "TemplateProcessing") return add_template(json, out);
  if (type == "Sequence" && depth < kMaxDepth) {
    const Json* parts = json_find(json, "processors");
    if (parts == nullptr || !parts->is_array()) {
      return Error(Code::kCorruptInput, "post_processor Sequence without 'processors'");
    }
    for (const Json& part : *parts) {
      NIBBLE_TRY(add(part, out, depth + 1));
    }
    return {};
  }
  return Error(Code::kUnsupported, cat("post_processor type '", type, "'"));
}

}  // namespace

Result<PostProcessor> PostProcessor::parse(const Json* json) {
  PostProcessor out;
  if (json != nullptr) {
    NIBBLE_TRY(add(*json, out, 0));
  }
  return out;
}

}  // namespace nibble::text
