// In which form is a scale stored? Judged by tensor names alone; the bytes are csf.h's business.
// Source: csf spec, section 3; containers spec, sections 2.1 and 3.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "codec/csf.h"

namespace nibble::codec {

/// "<scale>.nvfp4_csf_fixed", "<scale>.nvfp4_csf_exceptions" and the same for mxfp4.
std::string csf_fixed_name(CsfKind kind, std::string_view scale);
std::string csf_exceptions_name(CsfKind kind, std::string_view scale);

enum class CsfForm : uint8_t { kPlain, kCompressed };

/// `exists` says whether a tensor of that name is stored.
/// Errors: kCorruptInput starting with partner_missing (one of the two tensors), scale_twice (plain
/// beside compressed) or scale_missing (neither; other suffixes do not count), in that order.
Result<CsfForm> judge_csf_names(CsfKind kind, std::string_view scale,
                                const std::function<bool(std::string_view)>& exists);

}  // namespace nibble::codec
