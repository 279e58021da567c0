// The engine's thread: takes what callers left under the mutex, asks the scheduler for a batch,
// runs it, samples, and calls back with the mutex free. Scheduler, pages and requests in progress
// belong to that thread alone; everything callers share stands under `mutex_`.
//
// Where the model draws tokens, the next step is queued before the last one's are known here, so
// that a GPU does not wait for this thread. A sequence that turns out to have ended has a row too
// many in that step, whose draw nobody reads; its pages may have a new owner then, whose steps
// come later.
#include "runtime/engine.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/check.h"
#include "device/cpu.h"
#include "runtime/engine_setup.h"
#include "runtime/scheduler.h"

namespace nibble::runtime {
namespace {

/// A request between submit and on_finish.
struct Active {
  Request request;
  std::vector<int32_t> output;
  int32_t draw_row = -1;  // logit row of the last step begun that draws its next token
};

class EngineImpl final : public Engine {
 public:
  EngineImpl(std::unique_ptr<model::Model> model, const EngineOptions& options, device::Isa isa,
             EngineMemory memory);
  ~EngineImpl() override;

  Result<RequestId> submit(Request request) override;
  void cancel(RequestId id) override;
  EngineStats stats() const override;
  const model::Model& model() const override { return *model_; }
  const EngineOptions& options() const override { return options_; }
  void wait(RequestId id) override;

 private:
  /// An item of a computed step whose request has not ended since it was begun.
  struct Pick {
    const BatchItem* item = nullptr;
    Active* active = nullptr;
    int64_t logit_row = 0;  // first of its rows in the step's output
    Sampled sampled;        // if it samples

    int64_t last_row() const { return logit_row + item->logit_rows - 1; }
  };
  using Batch = std::vector<BatchItem>;

  // On the engine's thread only.
  void loop();
  bool take_events();  // false: stop
  void step();
  Result<void> begin(const Batch& batch);
  void conclude(const Batch& batch);
  void take(const Batch& batch, const model::Draws* draws);
  void fail(const Error& error);
  void build(const Batch& batch);
  static int32_t next_token(const Active& active, size_t index);
  bool model_draws(const Request& request) const;
  void fill_sampling(const Batch& batch);
  void pick_tokens(const Batch& batch, const model::Draws* draws);
  void report();
  void report_prompt(const Pick& pick);
  void report_token(const Pick& pick);
  void finish(RequestId id, FinishReason reason, const std::string& error);
  void publish_locked();

  bool is_stop(const Request& request, int32_t token) const;
  std::span<const float> logits_row(int64_t row) const { return row_of(logits_, vocab_, row); }
  static std::span<const float> row_of(const float* data, int64_t columns, int64_t row) {
    return {data + row * columns, static_cast<size_t>(columns)};
  }

  const std::unique_ptr<model::Model> model_;
  const EngineOptions options_;
  const EngineMemory memory_;
  const int64_t vocab_, hidden_size_;
  float* const logits_;
  float* const hidden_;
  ThreadPool pool_;
  kernels::Workspace workspace_;
  kernels::Exec exec_;
  Scheduler scheduler_;
  std::map<RequestId, std::unique_ptr<Active>> active_;  // in order of submission

  // One step's arrays, reused.
  std::vector<int32_t> tokens_, logit_rows_;
  std::vector<model::RowSampling> sampling_;
  Batch under_way_;  // started, not finished; empty: no step is
  bool wants_hidden_ = false;
  std::vector<kernels::SequenceRows> sequences_;
  std::vector<Pick> picks_;
  std::vector<std::vector<std::pair<float, int32_t>>> scratch_;  // [threads]
  int64_t prompt_tokens_ = 0, generated_tokens_ = 0, steps_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_;      // the engine has something to do
  std::condition_variable finished_;  // a request left live_
  bool stop_ = false;
  RequestId next_id_ = 1;
  std::vector<std::pair<RequestId, std::unique_ptr<Active>>> submitted_;
  std::vector<RequestId> cancelled_;
  std::set<RequestId> live_;  // submitted, on_finish not yet returned
  EngineStats stats_;         // as of the engine thread's last publish; waiting is not kept

  std::thread thread_;  // last: it uses all of the above
};

EngineImpl::EngineImpl(std::unique_ptr<model::Model> model, const EngineOptions& options,
                       device::Isa isa, EngineMemory memory)
    : model_(std::move(model)),
      options_(options),
      memory_(std::move(memory)),
      vocab_(model_->config().vocab_size),
      hidden_size_(model_->config().hidden_size),
      logits_(reinterpret_cast<float*>(memory_.logits.bytes().data())),
      hidden_(reinterpret_cast<float*>(memory_.hidden.bytes().data())),
      pool_(options.threads),
      workspace_(memory_.workspace.bytes()),
      exec_{
          .pool = &pool_, .isa = isa, .activations = options.activations, .workspace = &workspace_},
      scheduler_({.pages = memory_.pages.pages,
                  .page_tokens = memory_.pages.geometry.page_tokens,
                  .max_sequences = options.max_sequences,
                  .max_batch_tokens = options.max_batch_tokens,
                  .max_logit_rows = options.max_logit_rows}),
      scratch_(static_cast<size_t>(pool_.threads())) {
  publish_locked();
  thread_ = std::thread([this] { loop(); });
}

EngineImpl::~EngineImpl() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

// ---- any thread ----

Result<RequestId> EngineImpl::submit(Request request) {
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0)
    return Error(Code::kInvalidArgument, "the prompt has 0 tokens, at least 1 is due");
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    const int32_t token = request.prompt[i];
    if (token < 0 || token >= vocab_) {
      return Error(Code::kInvalidArgument, cat("prompt token ", token, " at position ", i,
                                               " lies outside the vocabulary of ", vocab_));
    }
  }
  if (request.max_tokens < 0) {
    return Error(Code::kInvalidArgument, cat("max_tokens must be >= 0, not ", request.max_tokens));
  }
  if (prompt > options_.max_context || request.max_tokens > options_.max_context - prompt) {
    return Error(Code::kInvalidArgument,
                 cat("prompt of ", prompt, " tokens and max_tokens ", request.max_tokens,
                     " exceed the context of ", options_.max_context));
  }
  NIBBLE_TRY(check_sampling(request.sampling));
  NIBBLE_TRY(scheduler_.check_fits({.prompt_tokens = prompt, .max_tokens = request.max_tokens}));
  auto active = std::make_unique<Active>();
  active->request = std::move(request);
  RequestId id = 0;
  {
    std::lock_guard lock(mutex_);
    id = next_id_++;
    live_.insert(id);
    submitted_.emplace_back(id, std::move(active));
  }
  wake_.notify_one();
  return id;
}

void EngineImpl::cancel(RequestId id) {
  {
    std::lock_guard lock(mutex_);
    if (!live_.contains(id)) return;
    cancelled_.push_back(id);
  }
  wake_.notify_one();
}

EngineStats EngineImpl::stats() const {
  std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.waiting = static_cast<int64_t>(live_.size()) - stats.running;
  return stats;
}

void EngineImpl::wait(RequestId id) {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return !live_.contains(id); });
}

// ---- the engine's thread ----

void EngineImpl::loop() {
  while (take_events()) step();
  if (!under_way_.empty()) static_cast<void>(model_->finish());  // the pages are read until then
  // Also those that take_events() left in submitted_: nobody else touches it any more.
  for (auto& [id, active] : submitted_) active_.emplace(id, std::move(active));
  while (!active_.empty()) finish(active_.begin()->first, FinishReason::kCancelled, "");
}

bool EngineImpl::take_events() {
  std::vector<std::pair<RequestId, std::unique_ptr<Active>>> submitted;
  std::vector<RequestId> cancelled;
  {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] {
      return stop_ || !submitted_.empty() || !cancelled_.empty() || !scheduler_.idle() ||
             !under_way_.empty();
    });
    if (stop_) return false;
    submitted.swap(submitted_);
    cancelled.swap(cancelled_);
  }
  for (auto& [id, active] : submitted) {
    const Request& request = active->request;
    const Result<void> taken =
        scheduler_.submit(id, {.prompt_tokens = static_cast<int64_t>(request.prompt.size()),
                               .max_tokens = request.max_tokens,
                               .prompt_logits = request.callbacks.on_prompt_logits != nullptr});
    taken.value();  // submit() has asked check_fits()
    active->output.reserve(static_cast<size_t>(request.max_tokens));
    active_.emplace(id, std::move(active));
  }
  for (RequestId id : cancelled) finish(id, FinishReason::kCancelled, "");
  return true;
}

void EngineImpl::step() {
  const bool all_drawn = std::all_of(active_.begin(), active_.end(), [this](const auto& entry) {
    return model_draws(entry.second->request);
  });
  Batch before;
  before.swap(under_way_);
  if (!before.empty() && !all_drawn) {  // a token or a history must be known here
    conclude(before);
    before.clear();
  }
  const Batch& batch = scheduler_.next();
  Result<void> begun;
  if (!batch.empty()) {
    {
      std::lock_guard lock(mutex_);
      publish_locked();
    }
    build(batch);
    begun = begin(batch);
  }
  if (!before.empty()) conclude(before);
  if (!begun) fail(begun.error());
}

/// Runs the step, or queues it if the model draws all its tokens.
Result<void> EngineImpl::begin(const Batch& batch) {
  model::StepInput input;
  input.tokens = tokens_;
  input.sequences = sequences_;
  input.logit_rows = logit_rows_;
  const bool drawn = std::all_of(batch.begin(), batch.end(), [this](const BatchItem& item) {
    return model_draws(active_.at(item.id)->request);
  });
  if (drawn) {
    fill_sampling(batch);
    NIBBLE_TRY(model_->start(exec_, input, sampling_, memory_.pages));
    under_way_ = batch;
    return {};
  }
  model::StepOutput output;
  output.logits = logits_;
  output.final_hidden = wants_hidden_ ? hidden_ : nullptr;
  NIBBLE_TRY(model_->forward(exec_, input, memory_.pages, output));
  take(batch, nullptr);
  return {};
}

/// Waits for the oldest step under way.
void EngineImpl::conclude(const Batch& batch) {
  Result<model::Draws> draws = model_->finish();
  if (!draws) {
    fail(draws.error());
    return;
  }
  take(batch, &*draws);
}

/// A computed step's tokens to their requests.
void EngineImpl::take(const Batch& batch, const model::Draws* draws) {
  pick_tokens(batch, draws);
  {
    std::lock_guard lock(mutex_);
    publish_locked();
  }
  report();
}

/// The device is lost: nobody's pages can be trusted. Later requests meet the same error.
void EngineImpl::fail(const Error& error) {
  if (!under_way_.empty()) static_cast<void>(model_->finish());
  under_way_.clear();
  while (!active_.empty()) finish(active_.begin()->first, FinishReason::kError, error.message());
}

/// Fills the step's input arrays.
void EngineImpl::build(const Batch& batch) {
  tokens_.clear();
  sequences_.clear();
  logit_rows_.clear();
  wants_hidden_ = false;
  for (const BatchItem& item : batch) {
    const Active& active = *active_.at(item.id);
    const std::vector<int32_t>& prompt = active.request.prompt;
    if (active.request.callbacks.on_prompt_logits) wants_hidden_ = true;
    sequences_.push_back({.row_begin = static_cast<int32_t>(tokens_.size()),
                          .rows = static_cast<int32_t>(item.rows),
                          .position_begin = static_cast<int32_t>(item.position_begin),
                          .pages = item.pages});
    for (int64_t i = 0; i < item.rows; ++i) {
      const size_t position = static_cast<size_t>(item.position_begin + i);
      if (i >= item.rows - item.logit_rows) {
        logit_rows_.push_back(static_cast<int32_t>(tokens_.size()));
      }
      tokens_.push_back(position < prompt.size() ? prompt[position]
                                                 : next_token(active, position - prompt.size()));
    }
  }
}

/// Token `index` of the output: known, or drawn by the step under way.
int32_t EngineImpl::next_token(const Active& active, size_t index) {
  if (index < active.output.size()) return active.output[index];
  NIBBLE_CHECK(index == active.output.size() && active.draw_row >= 0, "token ", index, " of ",
               active.output.size());
  return -1 - active.draw_row;
}

/// Whether the model can draw the request's tokens, so that no logits travel: nobody wants them,
/// and no penalty needs a history.
bool EngineImpl::model_draws(const Request& request) const {
  const SamplingParams& p = request.sampling;
  return model_->samples() && !request.callbacks.on_prompt_logits && p.repetition_penalty == 1.0f &&
         p.presence_penalty == 0.0f && p.frequency_penalty == 0.0f;
}

/// How each logit row's token is drawn, and who waits for it.
void EngineImpl::fill_sampling(const Batch& batch) {
  sampling_.clear();
  for (const BatchItem& item : batch) {
    if (item.logit_rows == 0) continue;
    Active& active = *active_.at(item.id);
    const SamplingParams& p = active.request.sampling;
    const auto prompt = static_cast<int64_t>(active.request.prompt.size());
    NIBBLE_CHECK(item.samples && item.logit_rows == 1);
    active.draw_row = static_cast<int32_t>(sampling_.size());
    sampling_.push_back({.temperature = p.temperature,
                         .top_p = p.top_p,
                         .min_p = p.min_p,
                         .top_k = p.top_k,
                         .seed = p.seed,
                         .draw = static_cast<uint64_t>(item.position_begin + item.rows - prompt)});
  }
}

/// Every token that is due, drawn by the model or here (the rows in parallel), and counts the step.
void EngineImpl::pick_tokens(const Batch& batch, const model::Draws* draws) {
  picks_.clear();
  int64_t logit_row = 0;
  for (const BatchItem& item : batch) {
    if (const auto found = active_.find(item.id); found != active_.end()) {
      Active& active = *found->second;
      picks_.push_back({.item = &item, .active = &active, .logit_row = logit_row, .sampled = {}});
      const auto prompt = static_cast<int64_t>(active.request.prompt.size());
      if (item.position_begin < prompt) prompt_tokens_ += item.rows;
    }
    logit_row += item.logit_rows;
  }
  if (draws != nullptr) {
    for (Pick& pick : picks_) {
      if (!pick.item->samples) continue;
      const auto row = static_cast<size_t>(pick.last_row());
      pick.sampled = {.token = draws->tokens[row], .logprob = draws->logprobs[row]};
    }
  } else {
    pool_.parallel_for(static_cast<int64_t>(picks_.size()), [&](int64_t task, int worker) {
      Pick& pick = picks_[static_cast<size_t>(task)];
      if (!pick.item->samples) return;
      const Active& active = *pick.active;
      pick.sampled = sample(logits_row(pick.last_row()), active.request.prompt, active.output,
                            active.request.sampling, active.output.size(),
                            scratch_[static_cast<size_t>(worker)]);
    });
  }
  for (const Pick& pick : picks_) {
    const int32_t token = pick.sampled.token;
    if (pick.item->samples && token >= 0 && !is_stop(pick.active->request, token)) {
      ++generated_tokens_;
    }
  }
  ++steps_;
}

/// Calls back, sequence by sequence in the batch's order.
void EngineImpl::report() {
  for (const Pick& pick : picks_) {
    const BatchItem& item = *pick.item;
    const Request& request = pick.active->request;
    if (request.callbacks.on_prompt_logits &&
        item.position_begin < static_cast<int64_t>(request.prompt.size())) {
      report_prompt(pick);
    }
    if (item.samples) {
      report_token(pick);
    } else if (item.ends_prompt) {
      finish(item.id, FinishReason::kLength, "");
    }
  }
}

void EngineImpl::report_prompt(const Pick& pick) {
  for (int64_t i = 0; i < pick.item->rows; ++i) {
    const int64_t row = pick.logit_row + i;
    pick.active->request.callbacks.on_prompt_logits(pick.item->position_begin + i, logits_row(row),
                                                    row_of(hidden_, hidden_size_, row));
  }
}

void EngineImpl::report_token(const Pick& pick) {
  const BatchItem& item = *pick.item;
  const Sampled& sampled = pick.sampled;
  Active& active = *pick.active;
  const Request& request = active.request;
  if (sampled.token < 0) {
    finish(item.id, FinishReason::kError,
           cat("the logits at position ", item.position_begin + item.rows - 1,
               " are not a distribution (NaN or infinite)"));
    return;
  }
  if (is_stop(request, sampled.token)) {
    finish(item.id, FinishReason::kStop, "");
    return;
  }
  active.output.push_back(sampled.token);
  if (request.callbacks.on_token) {
    request.callbacks.on_token({.token = sampled.token, .logprob = sampled.logprob});
  }
  if (static_cast<int64_t>(active.output.size()) == request.max_tokens) {
    finish(item.id, FinishReason::kLength, "");
  }
}

/// Frees the request's pages, tells its owner, forgets it. Unknown ids are ignored.
void EngineImpl::finish(RequestId id, FinishReason reason, const std::string& error) {
  const auto it = active_.find(id);
  if (it == active_.end()) return;
  const std::unique_ptr<Active> active = std::move(it->second);
  active_.erase(it);
  scheduler_.end(id);
  if (active->request.callbacks.on_finish) active->request.callbacks.on_finish(reason, error);
  {
    std::lock_guard lock(mutex_);
    live_.erase(id);
    publish_locked();
  }
  finished_.notify_all();
}

void EngineImpl::publish_locked() {
  stats_.running = scheduler_.running();
  stats_.kv_pages_total = scheduler_.pages().total();
  stats_.kv_pages_free = scheduler_.pages().free();
  stats_.prompt_tokens = prompt_tokens_;
  stats_.generated_tokens = generated_tokens_;
  stats_.steps = steps_;
}

bool EngineImpl::is_stop(const Request& request, int32_t token) const {
  for (int32_t stop : request.stop_tokens) {
    if (stop == token) return true;
  }
  return false;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(std::unique_ptr<model::Model> model,
                                               const EngineOptions& options) {
  NIBBLE_CHECK(model != nullptr);
  NIBBLE_TRY(const EngineOptions resolved, resolve_options(*model, options));
  NIBBLE_TRY(const device::Isa isa, device::choose_isa());
  NIBBLE_TRY(model->prepare({.max_rows = resolved.max_batch_tokens,
                             .max_logit_rows = resolved.max_logit_rows,
                             .max_sequences = resolved.max_sequences,
                             .max_context = resolved.max_context}));
  NIBBLE_TRY(EngineMemory memory, allocate_memory(*model, resolved));
  return std::unique_ptr<Engine>(
      std::make_unique<EngineImpl>(std::move(model), resolved, isa, std::move(memory)));
}

}  // namespace nibble::runtime
