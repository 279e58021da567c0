#include "recipe/completeness.h"

#include "recipe/name_summary.h"

namespace nibble::recipe {
namespace {

constexpr size_t kMaxLines = 40;
constexpr size_t kMaxWhys = 3;

constexpr std::string_view kAllowedExtras[] = {".input_scale", ".input_global_scale", ".k_scale",
                                               ".v_scale", ".rotary_emb.inv_freq"};

}  // namespace

bool is_allowed_extra(std::string_view name) {
  for (const std::string_view suffix : kAllowedExtras) {
    if (name.ends_with(suffix)) return true;
  }
  return false;
}

Usage::Usage(const checkpoint::CheckpointIndex& index)
    : index_(index), used_(index.tensors().size(), false) {}

void Usage::mark(const checkpoint::TensorInfo* tensor) {
  const auto at = static_cast<size_t>(tensor - index_.tensors().data());
  NIBBLE_CHECK(at < used_.size(), "tensor of another index: ", tensor->name);
  used_[at] = true;
}

Usage::Rest Usage::rest() const {
  Rest out;
  for (size_t i = 0; i < used_.size(); ++i) {
    if (used_[i]) continue;
    const std::string& name = index_.tensors()[i].name;
    if (is_allowed_extra(name)) {
      ++out.ignored[name.substr(name.rfind('.') + 1)];
    } else {
      out.surplus.push_back(name);
    }
  }
  return out;
}

Result<void> completeness(const std::vector<std::string>& missing,
                          const std::vector<std::string>& surplus,
                          const std::vector<std::string>& whys) {
  if (missing.empty() && surplus.empty()) return {};
  std::string message = cat(missing.empty() ? "tensor_surplus: " : "tensor_missing: ",
                            "the model and the files differ by ", missing.size(), " missing and ",
                            surplus.size(), " surplus tensors");
  if (!missing.empty()) message += "\n  " + pattern_lines(missing, "missing", "\n  ", kMaxLines);
  if (!surplus.empty()) message += "\n  " + pattern_lines(surplus, "surplus", "\n  ", kMaxLines);
  for (size_t i = 0; i < whys.size() && i < kMaxWhys; ++i) message += "\n  " + whys[i];
  return Error(Code::kCorruptInput, std::move(message));
}

}  // namespace nibble::recipe
