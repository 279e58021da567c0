#include "cli/generation.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>

#include "base/file.h"
#include "base/json.h"

namespace nibble::cli {
namespace {

volatile std::sig_atomic_t interrupt_flag = 0;
void on_interrupt(int) { interrupt_flag = 1; }
void (*previous_handler)(int) = SIG_DFL;

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

// State shared between the waiting thread and the engine's callbacks.
struct Stream {
  Stream(const text::Tokenizer& tokenizer, const std::vector<std::string>& stops)
      : decoder(tokenizer), filter(stops) {}
  text::StreamDecoder decoder;
  text::StopFilter filter;
  std::mutex mutex;
  std::condition_variable changed;
  Answer answer;
  bool finished = false, stop_wanted = false;
  Clock::time_point start = Clock::now(), first, last;
};

void take_text(Stream& stream, std::string_view text,
               const std::function<void(std::string_view)>& show) {
  if (text.empty()) return;
  stream.answer.text += text;
  if (show) show(text);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  interrupt_flag = 0;
  previous_handler = std::signal(SIGINT, on_interrupt);
}
InterruptGuard::~InterruptGuard() { std::signal(SIGINT, previous_handler); }
bool InterruptGuard::interrupted() { return interrupt_flag != 0; }
void InterruptGuard::clear() { interrupt_flag = 0; }

void add_sampling_options(CLI::App& app, SamplingOptions& options) {
  app.add_option("--temp,--temperature", options.temperature, "0 is greedy")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-k", options.top_k, "keep the k most probable tokens (0: all)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-p", options.top_p, "keep the most probable tokens up to this mass")
      ->check(CLI::Range(0.0f, 1.0f));
  app.add_option("--min-p", options.min_p, "drop tokens below this share of the most probable")
      ->check(CLI::Range(0.0f, 1.0f));
  app.add_option("--repeat-penalty", options.repetition_penalty, "1: off")
      ->check(CLI::PositiveNumber);
  app.add_option("--presence-penalty", options.presence_penalty, "0: off");
  app.add_option("--frequency-penalty", options.frequency_penalty, "0: off");
  app.add_option("-s,--seed", options.seed, "the same seed gives the same text");
  app.add_option("-n,--max-tokens", options.max_tokens,
                 "longest answer (0: what the context holds)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--stop", options.stops, "end at this string (repeatable)");
}

Result<runtime::SamplingParams> sampling_params(const SamplingOptions& options,
                                                const std::string& directory) {
  Json defaults = Json::object();
  const std::string path = directory + "/generation_config.json";
  if (file_exists(path)) {
    NIBBLE_TRY(defaults, read_json_file(path));
  }
  NIBBLE_TRY(const bool do_sample, json_bool(defaults, "do_sample", false), path);
  NIBBLE_TRY(const double temperature, json_number(defaults, "temperature", 1.0), path);
  NIBBLE_TRY(const double top_p, json_number(defaults, "top_p", 1.0), path);
  NIBBLE_TRY(const double min_p, json_number(defaults, "min_p", 0.0), path);
  NIBBLE_TRY(const double repetition, json_number(defaults, "repetition_penalty", 1.0), path);
  NIBBLE_TRY(const int64_t top_k, json_int(defaults, "top_k", 0), path);
  runtime::SamplingParams params;
  params.temperature =
      options.temperature.value_or(do_sample ? static_cast<float>(temperature) : 0);
  params.top_p = options.top_p.value_or(static_cast<float>(top_p));
  params.min_p = options.min_p.value_or(static_cast<float>(min_p));
  params.top_k = options.top_k.value_or(static_cast<int32_t>(top_k));
  params.repetition_penalty = options.repetition_penalty.value_or(static_cast<float>(repetition));
  params.presence_penalty = options.presence_penalty;
  params.frequency_penalty = options.frequency_penalty;
  params.seed = options.seed;
  return params;
}

Result<Answer> generate(runtime::Engine& engine, const text::Tokenizer& tokenizer,
                        std::vector<int32_t> prompt, const runtime::SamplingParams& sampling,
                        const SamplingOptions& options, const std::vector<int32_t>& stop_tokens,
                        const std::function<void(std::string_view)>& show) {
  Stream stream(tokenizer, options.stops);
  runtime::Request request;
  const int64_t prompt_tokens = static_cast<int64_t>(prompt.size());
  const int64_t room = engine.options().max_context - prompt_tokens;
  stream.answer.prompt_tokens = prompt_tokens;
  request.prompt = std::move(prompt);
  request.sampling = sampling;
  request.stop_tokens = stop_tokens;
  request.max_tokens = options.max_tokens > 0 ? options.max_tokens : std::max<int64_t>(room, 1);
  request.callbacks.on_token = [&](const runtime::TokenEvent& event) {
    std::lock_guard lock(stream.mutex);
    stream.last = Clock::now();
    if (stream.answer.tokens++ == 0) stream.first = stream.last;
    if (stream.stop_wanted) return;
    take_text(stream, stream.filter.push(stream.decoder.push(event.token)), show);
    if (stream.filter.stopped()) {
      stream.stop_wanted = true;
      stream.changed.notify_all();
    }
  };
  request.callbacks.on_finish = [&](runtime::FinishReason reason, const std::string& error) {
    std::lock_guard lock(stream.mutex);
    stream.answer.reason = reason;
    stream.answer.error = error;
    stream.finished = true;
    stream.changed.notify_all();
  };
  NIBBLE_TRY(const runtime::RequestId id, engine.submit(std::move(request)));

  std::unique_lock lock(stream.mutex);
  bool cancelled = false;
  while (!stream.finished) {
    stream.changed.wait_for(lock, std::chrono::milliseconds(20));
    if (!cancelled && !stream.finished && (stream.stop_wanted || InterruptGuard::interrupted())) {
      cancelled = true;
      lock.unlock();
      engine.cancel(id);
      lock.lock();
    }
  }
  if (!stream.filter.stopped()) {
    take_text(stream, stream.filter.push(stream.decoder.finish()), show);
    take_text(stream, stream.filter.finish(), show);
  }
  Answer& answer = stream.answer;
  if (stream.filter.stopped()) answer.reason = runtime::FinishReason::kStop;
  if (answer.tokens > 0) {
    answer.prompt_seconds = seconds_between(stream.start, stream.first);
    answer.decode_seconds = seconds_between(stream.first, stream.last);
  }
  return std::move(answer);
}

}  // namespace nibble::cli
