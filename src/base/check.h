// NIBBLE_CHECK: for our own bugs only, never for input. Always on; prints the values and aborts.
#pragma once

#include <string>

#include "base/cat.h"

namespace nibble {
[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const std::string& values);
}  // namespace nibble

#define NIBBLE_CHECK(cond, ...)                                             \
  do {                                                                      \
    if (!(cond)) [[unlikely]]                                               \
      ::nibble::check_failed(__FILE__, __LINE__, #cond,                     \
                             ::nibble::cat("" __VA_OPT__(, ) __VA_ARGS__)); \
  } while (false)
