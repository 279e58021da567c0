// Which vector instructions this process uses. One source is compiled per ISA; the choice is made
// once at start and can be forced by NIBBLE_ISA=scalar|avx2|avx512|avx512_bf16|neon.
#pragma once

#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble::device {

enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Bf16, kNeon };

std::string_view isa_name(Isa isa);
/// ISAs this build contains and this host can run, best last. kScalar is always there.
std::vector<Isa> available_isas();
/// The best available one, or NIBBLE_ISA. Errors: kInvalidArgument for an unknown name,
/// kUnsupported if the host lacks it.
Result<Isa> choose_isa();

}  // namespace nibble::device
