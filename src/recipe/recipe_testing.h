// What the recipe tests share: reading a tiny checkpoint, decoding and comparing weights.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "recipe/tiny_checkpoint_testing.h"

namespace nibble::recipe {

using nibble::testing::decode_weight;
using nibble::testing::TempDir;
using nibble::testing::tiny_config;
using nibble::testing::tiny_is_mlp;
using nibble::testing::tiny_tensors;
using nibble::testing::TinyDialect;
using nibble::testing::TinyOptions;
using nibble::testing::TinyTensor;
using nibble::testing::TinyTensors;

constexpr int32_t kLayers = 2, kExperts = 8;

inline Result<Recipe> read(const TinyTensors& tensors, const Json& config) {
  TempDir dir;
  nibble::testing::write_tiny(dir.path(), tensors, config);
  return read_recipe(dir.path());  // the files stay open after the folder is gone
}
inline Result<Recipe> read(const TinyOptions& options) {
  return read(tiny_tensors(options), tiny_config(options));
}
/// The recipe of options that must read; a failure is reported with its message.
inline Recipe must(Result<Recipe> got) {
  if (!got) throw std::runtime_error(got.error().message());
  return std::move(*got);
}

inline std::vector<float> decoded(const Recipe& recipe, const WeightKey& key) {
  const Weight* weight = recipe.find(key);
  if (weight == nullptr) throw std::runtime_error(key_text(key));
  return decode_weight(recipe.index(), *weight);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Every weight of both recipes decodes to the same floats. Returns how many were compared.
inline int64_t expect_same_model(const Recipe& a, const Recipe& b) {
  EXPECT_EQ(a.weights().size(), b.weights().size());
  int64_t count = 0;
  for (const auto& [key, weight] : a.weights()) {
    EXPECT_TRUE(same_bits(decoded(a, key), decoded(b, key))) << key_text(key);
    ++count;
  }
  return count;
}

inline float f32_of(const TinyTensor& tensor) {
  float value = 0;
  std::memcpy(&value, tensor.bytes.data(), sizeof(value));
  return value;
}
inline void set_f32(TinyTensor& tensor, float value) {
  std::memcpy(tensor.bytes.data(), &value, sizeof(value));
}

}  // namespace nibble::recipe
