// For tests: a model whose logits are a hash of the token history, read back from the KV pages it
// wrote itself. A wrong page table, position, chunk or stale page shows up as other tokens.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "model/model.h"
#include "runtime/random.h"

namespace nibble::runtime {

constexpr int64_t kFakeVocab = 97, kFakeHidden = 3, kFakePageTokens = 16;
/// A history that ends with this token gets a NaN among its logits.
constexpr int32_t kPoisonToken = 96;

inline uint64_t hash_history(uint64_t hash, int32_t token) {
  return random_bits(hash, static_cast<uint64_t>(token) + 1);
}

/// The row's outputs, from the hash of the tokens up to and with its own.
inline void fake_outputs(uint64_t hash, int32_t last, float* logits, float* hidden) {
  for (int64_t v = 0; v < kFakeVocab; ++v) {
    const uint64_t bits = random_bits(hash, 1000 + static_cast<uint64_t>(v));
    logits[v] = static_cast<float>(bits >> 40) * 0x1p-21f - 4.0f;  // [-4, 4)
  }
  logits[kPoisonToken] = -std::numeric_limits<float>::infinity();  // never generated
  if (last == kPoisonToken) logits[5] = std::numeric_limits<float>::quiet_NaN();
  if (hidden == nullptr) return;
  for (int64_t h = 0; h < kFakeHidden; ++h) {
    hidden[h] = static_cast<float>(hash >> (20 * h) & 0xFFFFF);
  }
}

class FakeModel : public model::Model {
 public:
  /// on_forward runs on the engine's thread, before each step is computed.
  explicit FakeModel(std::function<void(const model::StepInput&)> on_forward = nullptr)
      : on_forward_(std::move(on_forward)) {
    config_.family = "fake";
    config_.vocab_size = kFakeVocab;
    config_.hidden_size = kFakeHidden;
    config_.max_positions = 4096;
  }
  const recipe::ModelConfig& config() const override { return config_; }
  kernels::KvGeometry kv_geometry(kernels::Activations) const override {
    return {.layers = 2,
            .kv_heads = 1,
            .k_dim = 1,
            .v_dim = 1,
            .page_tokens = kFakePageTokens,
            .type = kernels::KvType::kF32};
  }
  int64_t workspace_bytes(int64_t max_rows, int64_t, int) const override {
    return kernels::Workspace::bytes_for<uint64_t>(max_rows);
  }

  Result<void> forward(const kernels::Exec& exec, const model::StepInput& input,
                       const kernels::KvPages& pages, const model::StepOutput& output) override {
    if (on_forward_) on_forward_(input);
    kernels::WorkspaceScope scope(*exec.workspace);
    const int64_t rows = static_cast<int64_t>(input.tokens.size());
    uint64_t* hashes = exec.workspace->take<uint64_t>(rows);
    int64_t next_row = 0;
    for (const kernels::SequenceRows& sequence : input.sequences) {
      EXPECT_EQ(sequence.row_begin, next_row);
      EXPECT_GE(sequence.rows, 1);
      next_row += sequence.rows;
    }
    EXPECT_EQ(next_row, rows);
    exec.pool->parallel_for(static_cast<int64_t>(input.sequences.size()), [&](int64_t task, int) {
      run_sequence(input.sequences[static_cast<size_t>(task)], input.tokens, pages, hashes);
    });
    exec.pool->parallel_for(static_cast<int64_t>(input.logit_rows.size()), [&](int64_t i, int) {
      const int32_t row = input.logit_rows[static_cast<size_t>(i)];
      EXPECT_TRUE(i == 0 || row > input.logit_rows[static_cast<size_t>(i - 1)]);
      fake_outputs(hashes[row], input.tokens[static_cast<size_t>(row)],
                   output.logits + i * kFakeVocab,
                   output.final_hidden ? output.final_hidden + i * kFakeHidden : nullptr);
    });
    return {};
  }

 private:
  /// The place of `position`: K keeps the token in layer 0, V the position in layer 1.
  static float* key(const kernels::KvPages& pages, const kernels::SequenceRows& s, int64_t pos) {
    const int64_t page = s.pages[pos / kFakePageTokens];
    return reinterpret_cast<float*>(pages.head(0, page, 0)) + pos % kFakePageTokens;
  }
  static float* value(const kernels::KvPages& pages, const kernels::SequenceRows& s, int64_t pos) {
    const int64_t page = s.pages[pos / kFakePageTokens];
    return reinterpret_cast<float*>(pages.head(1, page, 0)) + kFakePageTokens +
           pos % kFakePageTokens;
  }
  static void run_sequence(const kernels::SequenceRows& s, std::span<const int32_t> tokens,
                           const kernels::KvPages& pages, uint64_t* hashes) {
    for (int32_t r = 0; r < s.rows; ++r) {
      const int64_t position = s.position_begin + r;
      *key(pages, s, position) = static_cast<float>(tokens[static_cast<size_t>(s.row_begin + r)]);
      *value(pages, s, position) = static_cast<float>(position);
    }
    uint64_t hash = 0;
    for (int64_t p = 0; p < s.position_begin + s.rows; ++p) {
      EXPECT_EQ(*value(pages, s, p), static_cast<float>(p));
      hash = hash_history(hash, static_cast<int32_t>(*key(pages, s, p)));
      if (p >= s.position_begin) hashes[s.row_begin + p - s.position_begin] = hash;
    }
  }

  std::function<void(const model::StepInput&)> on_forward_;
  recipe::ModelConfig config_;
};

}  // namespace nibble::runtime
