// What tests over the model fixtures share: token ids of a reference file, and the comparison of
// BF16 activations with an FP32 reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support/loaded_model.h"
#include "support/vector_file.h"

namespace nibble::testing {

inline constexpr const char* kGlm4MoeFixtures[] = {"glm4_moe", "glm4_moe-nvfp4-modelopt",
                                                   "glm4_moe-nvfp4-ct", "glm4_moe-mxfp4-ct",
                                                   "glm4_moe_mtp"};

inline std::vector<int32_t> ids(const TensorFile& file, const std::string& name) {
  const std::vector<int64_t> wide = file.get(name).as<int64_t>();
  return {wide.begin(), wide.end()};
}

/// Logits of a prompt against the reference, as far as the same experts are chosen: a changed
/// selection changes that row and, through attention, later ones. At least half of the rows must
/// come before the first change.
inline void expect_near_where_experts_agree(const recipe::ModelConfig& c, const TensorFile& file,
                                            const std::string& prompt,
                                            const LoadedModel::Output& out) {
  const size_t rows = ids(file, prompt + ".input_ids").size();
  const auto top_k = static_cast<size_t>(c.top_k), vocab = static_cast<size_t>(c.vocab_size);
  const std::vector<float> want = file.get(prompt + ".logits").as<float>();
  size_t same = rows;
  for (int64_t layer = c.first_dense_layers; layer < c.layers; ++layer) {
    const std::vector<int32_t> chosen =
        file.get(cat(prompt, ".moe.", layer, ".topk_ids")).as<int32_t>();
    for (size_t i = 0; i < rows * top_k; ++i) {
      if (out.topk_ids[static_cast<size_t>(layer) * rows * top_k + i] != chosen[i]) {
        same = std::min(same, i / top_k);
      }
    }
  }
  EXPECT_GE(same, rows / 2) << "expert choices change early";
  double sum = 0, worst = 0;
  for (size_t i = 0; i < same * vocab; ++i) {
    const double d = std::abs(static_cast<double>(out.logits[i]) - static_cast<double>(want[i]));
    sum += std::isnan(d) ? INFINITY : d;
    worst = std::max(worst, d);
  }
  EXPECT_LE(worst, 0.3);
  EXPECT_LE(sum / static_cast<double>(same * vocab), 0.03);
}

}  // namespace nibble::testing
