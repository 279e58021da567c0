#include "codec/csf_inventory.h"

namespace nibble::codec {

std::string csf_fixed_name(CsfKind kind, std::string_view scale) {
  return cat(scale, '.', csf_kind_name(kind), "_csf_fixed");
}

std::string csf_exceptions_name(CsfKind kind, std::string_view scale) {
  return cat(scale, '.', csf_kind_name(kind), "_csf_exceptions");
}

Result<CsfForm> judge_csf_names(CsfKind kind, std::string_view scale,
                                const std::function<bool(std::string_view)>& exists) {
  const std::string fixed_name = csf_fixed_name(kind, scale);
  const std::string exceptions_name = csf_exceptions_name(kind, scale);
  const bool fixed = exists(fixed_name), exceptions = exists(exceptions_name);
  const bool plain = exists(scale);
  if (fixed != exceptions) {
    return Error(Code::kCorruptInput,
                 cat("partner_missing: '", fixed ? fixed_name : exceptions_name, "' without '",
                     fixed ? exceptions_name : fixed_name, "'"));
  }
  if (fixed && plain) {
    return Error(Code::kCorruptInput,
                 cat("scale_twice: '", scale, "' stands beside '", fixed_name, "'"));
  }
  if (!fixed && !plain) {
    return Error(Code::kCorruptInput,
                 cat("scale_missing: neither '", scale, "' nor '", fixed_name, "' is stored"));
  }
  return fixed ? CsfForm::kCompressed : CsfForm::kPlain;
}

}  // namespace nibble::codec
