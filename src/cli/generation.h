// One answer as a stream of text: sampling options, token events to UTF-8, stop strings, Ctrl-C.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/engine.h"
#include "text/tokenizer.h"

namespace nibble::cli {

/// What the user set; unset values come from generation_config.json, then from "off".
struct SamplingOptions {
  std::optional<float> temperature, top_p, min_p, repetition_penalty;
  std::optional<int32_t> top_k;
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;
  uint64_t seed = 0;
  int64_t max_tokens = 0;  // 0: as much as fits
  std::vector<std::string> stops;
};
void add_sampling_options(CLI::App& app, SamplingOptions& options);

/// Reads generation_config.json of `directory`, if there is one. Errors: kCorruptInput.
Result<runtime::SamplingParams> sampling_params(const SamplingOptions& options,
                                                const std::string& directory);

struct Answer {
  std::string text;
  runtime::FinishReason reason = runtime::FinishReason::kStop;
  std::string error;
  int64_t prompt_tokens = 0, tokens = 0;
  double prompt_seconds = 0;  // submit to first token
  double decode_seconds = 0;  // first token to last
};

/// Submits `prompt` and blocks until the answer ends; `show` gets text as it becomes certain (on
/// the engine's thread). Ctrl-C (see InterruptGuard) cancels it.
Result<Answer> generate(runtime::Engine& engine, const text::Tokenizer& tokenizer,
                        std::vector<int32_t> prompt, const runtime::SamplingParams& sampling,
                        const SamplingOptions& options, const std::vector<int32_t>& stop_tokens,
                        const std::function<void(std::string_view)>& show);

/// While alive, SIGINT sets a flag instead of ending the process.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  static bool interrupted();
  static void clear();
};

}  // namespace nibble::cli
