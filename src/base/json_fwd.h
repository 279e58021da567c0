// The JSON type's name alone, for headers that pass it by reference: parsing the library's full
// header costs seconds in every file that includes it.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace nibble {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

}  // namespace nibble
