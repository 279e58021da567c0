// cat(a, b, ...): the parts printed one after the other, as a string. For messages, not for speed.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>

namespace nibble {

template <typename... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  auto put = [&out](const auto& part) {
    using P = std::decay_t<decltype(part)>;
    if constexpr (std::is_same_v<P, uint8_t> || std::is_same_v<P, int8_t>) {
      out << static_cast<int>(part);
    } else {
      out << part;
    }
  };
  (put(parts), ...);
  return std::move(out).str();
}

}  // namespace nibble
