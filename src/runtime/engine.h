// The one thread-safe door to a loaded model: submit, cancel, stats. Owns scheduler, model, KV
// pages and the thread that steps them. Sees token ids, never text.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "model/model.h"
#include "runtime/sampler.h"

namespace nibble::runtime {

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };

struct TokenEvent {
  int32_t token = 0;
  float logprob = 0;  // of the token under the model's own distribution (before sampling filters)
};

/// Called on the engine's thread, in order; must not block for long nor call back into the Engine
/// (but cancel() is allowed). on_finish comes once, last.
struct RequestCallbacks {
  std::function<void(const TokenEvent&)> on_token;
  std::function<void(FinishReason, const std::string& error)> on_finish;
  /// If set, every prompt position's logits are computed and handed over in order of position
  /// (chunk by chunk): logits [vocab], hidden [hidden] after the final norm.
  std::function<void(int64_t position, std::span<const float> logits,
                     std::span<const float> hidden)>
      on_prompt_logits;
};

struct Request {
  std::vector<int32_t> prompt = {};  // not empty
  SamplingParams sampling = {};
  int64_t max_tokens = 0;                 // 0: only prompt logits are wanted
  std::vector<int32_t> stop_tokens = {};  // end generation; the stop token is not reported
  RequestCallbacks callbacks = {};
};

using RequestId = uint64_t;

struct EngineOptions {
  kernels::Activations activations = kernels::Activations::kBf16;
  int threads = 0;                 // 0: all usable cores
  int64_t max_context = 0;         // per sequence; 0: the model's max_positions
  int64_t kv_tokens = 0;           // positions the pages hold in all; 0: max_context
  int64_t max_sequences = 64;      // running at once
  int64_t max_batch_tokens = 512;  // rows of one step
  int64_t max_logit_rows = 64;     // rows of one step whose logits are computed
};

/// The last line counts since the engine was created; generated_tokens are those reported.
struct EngineStats {
  int64_t running = 0, waiting = 0;
  int64_t kv_pages_total = 0, kv_pages_free = 0;
  int64_t prompt_tokens = 0, generated_tokens = 0, steps = 0;
};

class Engine {
 public:
  /// Allocates pages and workspace. Errors: kResourceExhausted naming need and budget;
  /// kInvalidArgument for an option out of range; those of device::choose_isa().
  static Result<std::unique_ptr<Engine>> create(std::unique_ptr<model::Model> model,
                                                const EngineOptions& options);
  /// Ends the step in progress; every request that is left finishes with kCancelled before this
  /// returns. No other call may run or follow.
  virtual ~Engine() = default;

  /// Errors: kInvalidArgument (empty prompt, token out of range, prompt + max_tokens beyond
  /// max_context or beyond all pages, sampling parameter out of range), each with both numbers.
  virtual Result<RequestId> submit(Request request) = 0;
  /// The request ends with kCancelled within one step; unknown or finished ids are ignored.
  virtual void cancel(RequestId id) = 0;
  virtual EngineStats stats() const = 0;
  virtual const model::Model& model() const = 0;
  /// As in effect: every 0 that means "default" is replaced, kv_tokens is whole pages, and
  /// max_sequences is at most max_batch_tokens and max_logit_rows (each decodes one row a step).
  virtual const EngineOptions& options() const = 0;
  /// Blocks until on_finish of the request has returned; at once for an unknown id. Convenience
  /// for the CLI and tests; not from a callback.
  virtual void wait(RequestId id) = 0;
};

}  // namespace nibble::runtime
