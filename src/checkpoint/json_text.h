// Small text helpers of this folder's JSON readers and writer. Not for other folders.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace nibble::checkpoint {

bool valid_utf8(std::string_view text);
/// A key that occurs at least twice.
std::optional<std::string_view> duplicate_of(std::vector<std::string_view> keys);
/// Untrusted text for a message: quoted, control bytes escaped, cut at 200 bytes.
std::string shown(std::string_view text);

}  // namespace nibble::checkpoint
