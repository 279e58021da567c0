#include "recipe/families/family.h"

namespace nibble::recipe {
namespace {

constexpr const Family* kFamilies[] = {&kGlm4Moe};

}  // namespace

const Family* find_family(std::string_view model_type) {
  for (const Family* family : kFamilies) {
    for (const std::string_view name : family->model_types) {
      if (name == model_type) return family;
    }
  }
  return nullptr;
}

std::string known_families() {
  std::string out;
  for (const Family* family : kFamilies) {
    for (const std::string_view name : family->model_types) {
      out += cat(out.empty() ? "" : ", ", name);
    }
  }
  return out;
}

}  // namespace nibble::recipe
