#include "base/result.h"

#include <cstdio>
#include <cstdlib>

namespace nibble {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kInvalidArgument: return "invalid argument";
    case Code::kNotFound: return "not found";
    case Code::kCorruptInput: return "corrupt input";
    case Code::kUnsupported: return "unsupported";
    case Code::kResourceExhausted: return "resource exhausted";
    case Code::kIo: return "i/o error";
    case Code::kCancelled: return "cancelled";
    case Code::kUnavailable: return "unavailable";
    case Code::kDeviceLost: return "device lost";
    case Code::kInternal: return "internal error";
  }
  return "unknown";
}

void check_failed(const char* file, int line, const char* condition, const std::string& values) {
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, condition, values.c_str());
  std::abort();
}

}  // namespace nibble
