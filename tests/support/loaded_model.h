// A checkpoint loaded for tests that look at logits: recipe, plan, load, model, and steps over it
// with any chunking and any batch.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "load/loader.h"
#include "model/model.h"

namespace nibble::testing {

class LoadedModel {
 public:
  LoadedModel(const std::string& directory, kernels::Activations activations, int threads,
              plan::Scales scales = plan::Scales::kPlain, int64_t max_rows = 512)
      : pool_(threads), activations_(activations) {
    Result<recipe::Recipe> recipe = recipe::read_recipe(directory);
    if (!recipe) {
      ADD_FAILURE() << recipe.error().message();
      return;
    }
    plan::PlanOptions options;
    options.activations = activations;
    options.threads = threads;
    options.scales = scales;
    Result<plan::PrecisionPlan> plan = plan::make_plan(*recipe, options);
    if (!plan) {
      ADD_FAILURE() << plan.error().message();
      return;
    }
    Result<load::LoadedWeights> loaded = load::load_weights(*recipe, *plan, pool_, {});
    if (!loaded) {
      ADD_FAILURE() << loaded.error().message();
      return;
    }
    report_ = loaded->report;
    take(std::move(*model::make_model(recipe->config(), loaded->store)), max_rows);
  }
  /// A model that was loaded elsewhere, such as on a GPU.
  LoadedModel(std::unique_ptr<model::Model> model, load::LoadReport report, int64_t max_rows = 512)
      : pool_(1), activations_(kernels::Activations::kBf16), report_(std::move(report)) {
    take(std::move(model), max_rows);
  }
  bool ok() const { return model_ != nullptr; }
  const model::Model& model() const { return *model_; }
  const load::LoadReport& report() const { return report_; }

  struct Output {
    std::vector<float> logits;  // [tokens, vocab]
    std::vector<float> hidden;  // [layers + 1, tokens, hidden], only from whole()
    std::vector<int32_t> topk_ids;
    std::vector<float> topk_weights;
  };

  /// One prompt in one step, with taps.
  Output whole(const std::vector<int32_t>& tokens) {
    const recipe::ModelConfig& c = model_->config();
    const int64_t rows = static_cast<int64_t>(tokens.size());
    Output out;
    out.hidden.resize(static_cast<size_t>((c.layers + 1) * rows * c.hidden_size));
    out.topk_ids.resize(static_cast<size_t>(c.layers * rows * c.top_k));
    out.topk_weights.resize(out.topk_ids.size());
    std::vector<std::vector<float>> logits;
    steps({tokens}, [&](size_t, size_t) { return tokens.size(); }, logits,
          {out.hidden.data(), out.topk_ids.data(), out.topk_weights.data()});
    out.logits = std::move(logits[0]);
    return out;
  }

  /// Logits of several sequences, stepped together: in step s, sequence i advances by chunk(i, s)
  /// tokens (0 leaves it out). Result [sequence][tokens * vocab].
  template <typename Chunk>
  std::vector<std::vector<float>> together(const std::vector<std::vector<int32_t>>& prompts,
                                           Chunk chunk) {
    std::vector<std::vector<float>> logits;
    steps(prompts, chunk, logits, {});
    return logits;
  }

 private:
  void take(std::unique_ptr<model::Model> model, int64_t max_rows) {
    model_ = std::move(model);
    workspace_.resize(
        static_cast<size_t>(model_->workspace_bytes(max_rows, max_rows, pool_.threads())) + 64);
    model_->prepare({max_rows, max_rows, max_rows, model_->config().max_positions}).value();
  }

  template <typename Chunk>
  void steps(const std::vector<std::vector<int32_t>>& prompts, Chunk chunk,
             std::vector<std::vector<float>>& logits, model::StepTaps taps) {
    const size_t vocab = static_cast<size_t>(model_->config().vocab_size);
    kernels::KvPages pages;
    pages.geometry = model_->kv_geometry(activations_);
    std::vector<std::vector<int32_t>> tables;
    int32_t next_page = 0;
    for (const auto& prompt : prompts) {  // pages of sequences interleave, last first
      const int64_t count = (static_cast<int64_t>(prompt.size()) + pages.geometry.page_tokens - 1) /
                            pages.geometry.page_tokens;
      std::vector<int32_t> table;
      for (int64_t p = 0; p < count; ++p) table.push_back(next_page++);
      std::reverse(table.begin(), table.end());
      tables.push_back(table);
    }
    pages.pages = next_page;
    const device::Memory data = std::move(*model_->allocate_pages(
        pages.geometry.layers * pages.pages * pages.geometry.layer_page_bytes()));
    pages.data = data.data();
    logits.assign(prompts.size(), {});
    std::vector<size_t> done(prompts.size(), 0);
    for (size_t step = 0;; ++step) {
      std::vector<int32_t> tokens, rows;
      std::vector<kernels::SequenceRows> sequences;
      std::vector<std::pair<size_t, size_t>> spans;  // sequence, rows
      bool left = false;
      for (size_t i = 0; i < prompts.size(); ++i) {
        const size_t take = std::min(chunk(i, step), prompts[i].size() - done[i]);
        left = left || done[i] < prompts[i].size();
        if (take == 0) continue;
        sequences.push_back({static_cast<int32_t>(tokens.size()), static_cast<int32_t>(take),
                             static_cast<int32_t>(done[i]), tables[i].data()});
        for (size_t t = 0; t < take; ++t) {
          rows.push_back(static_cast<int32_t>(tokens.size()));
          tokens.push_back(prompts[i][done[i] + t]);
        }
        spans.emplace_back(i, take);
        done[i] += take;
      }
      if (!left) return;
      if (tokens.empty()) continue;  // nobody's turn
      std::vector<float> out(rows.size() * vocab);
      std::byte* aligned = reinterpret_cast<std::byte*>(
          (reinterpret_cast<uintptr_t>(workspace_.data()) + 63) / 64 * 64);
      kernels::Workspace workspace({aligned, workspace_.size() - 64});
      const kernels::Exec exec{&pool_, *device::choose_isa(), activations_, &workspace};
      model::StepOutput output;
      output.logits = out.data();
      output.taps = taps;
      model_->forward(exec, {tokens, sequences, rows}, pages, output).value();
      size_t row = 0;
      for (const auto& [i, take] : spans) {
        logits[i].insert(logits[i].end(), out.begin() + static_cast<int64_t>(row * vocab),
                         out.begin() + static_cast<int64_t>((row + take) * vocab));
        row += take;
      }
    }
  }

  ThreadPool pool_;
  kernels::Activations activations_;
  std::unique_ptr<model::Model> model_;
  load::LoadReport report_;
  std::vector<std::byte> workspace_;
};

}  // namespace nibble::testing
