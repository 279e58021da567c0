// CPU feature detection by the compiler's built-ins (they check the operating system's register
// saving too), and the NIBBLE_ISA override.
#include "device/cpu.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace nibble::device {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  // F16C came before AVX2 in every CPU and has no portable name in the built-in.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
}
#endif

constexpr Isa kAllIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kNeon};

std::string joined_names(const std::vector<Isa>& isas) {
  std::string names;
  for (Isa isa : isas) {
    if (!names.empty()) names += ", ";
    names += isa_name(isa);
  }
  return names;
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kNeon: return "neon";
  }
  return "?";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas = {Isa::kScalar};
#if defined(__x86_64__)
  if (has_avx2()) isas.push_back(Isa::kAvx2);
  if (has_avx512()) isas.push_back(Isa::kAvx512);
  if (has_avx512_bf16()) isas.push_back(Isa::kAvx512Bf16);
#elif defined(__aarch64__)
  isas.push_back(Isa::kNeon);
#endif
  return isas;
}

Result<Isa> choose_isa() {
  const std::vector<Isa> available = available_isas();
  const char* forced = std::getenv("NIBBLE_ISA");
  if (forced == nullptr || *forced == '\0') return available.back();
  for (Isa isa : kAllIsas) {
    if (isa_name(isa) != forced) continue;
    if (std::find(available.begin(), available.end(), isa) != available.end()) return isa;
    return Error(Code::kUnsupported, cat("NIBBLE_ISA=", forced, ": this build and host run only ",
                                         joined_names(available)));
  }
  return Error(
      Code::kInvalidArgument,
      cat("NIBBLE_ISA=", forced, " is not one of scalar, avx2, avx512, avx512_bf16, neon"));
}

}  // namespace nibble::device
