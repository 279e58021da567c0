// nibble run DIR -p TEXT, or a chat on a terminal.
#include <unistd.h>

#include <iomanip>
#include <iostream>

#include "base/json.h"
#include "cli/command.h"
#include "cli/generation.h"
#include "cli/session.h"
#include "recipe/container.h"
#include "text/chat_template.h"

namespace nibble::cli {
namespace {

struct Options {
  ModelOptions model;
  SamplingOptions sampling;
  std::string prompt, system;
  bool raw = false;
};

struct Talk {
  runtime::Engine& engine;
  const text::Tokenizer& tokenizer;
  std::optional<text::ChatTemplate> chat;
  runtime::SamplingParams sampling;
  const Options& options;
};

Result<std::string> render(const Talk& talk, const OrderedJson& messages) {
  OrderedJson variables;
  variables["messages"] = messages;
  variables["add_generation_prompt"] = true;
  return talk.chat->render(variables);
}

void print_speed(std::ostream& err, const Answer& answer) {
  err << std::fixed << "\n[" << answer.prompt_tokens << " prompt tokens in " << std::setprecision(3)
      << answer.prompt_seconds << " s; " << answer.tokens << " tokens";
  if (answer.tokens > 1) {
    err << ", " << std::setprecision(1)
        << static_cast<double>(answer.tokens - 1) / answer.decode_seconds << " tokens/s";
  }
  const char* reason = "";
  switch (answer.reason) {
    case runtime::FinishReason::kStop: reason = "stop"; break;
    case runtime::FinishReason::kLength: reason = "length"; break;
    case runtime::FinishReason::kCancelled: reason = "cancelled"; break;
    case runtime::FinishReason::kError: reason = "error"; break;
  }
  err << "; " << reason << "]\n";
}

Result<Answer> answer_text(const Talk& talk, const std::string& prompt, bool add_special,
                           std::ostream& out, std::ostream& err) {
  NIBBLE_TRY(Answer answer,
             generate(talk.engine, talk.tokenizer, talk.tokenizer.encode(prompt, add_special),
                      talk.sampling, talk.options.sampling, talk.engine.model().config().eos_ids,
                      [&out](std::string_view text) { out << text << std::flush; }));
  if (answer.reason == runtime::FinishReason::kError) return Error(Code::kInternal, answer.error);
  if (!talk.options.model.quiet) print_speed(err, answer);
  return answer;
}

OrderedJson message(const char* role, const std::string& content) {
  return {{"role", role}, {"content", content}};
}

Result<void> run_once(const Talk& talk, std::ostream& out, std::ostream& err) {
  std::string prompt = talk.options.prompt;
  if (talk.chat && !talk.options.raw) {
    OrderedJson messages = OrderedJson::array();
    if (!talk.options.system.empty()) messages.push_back(message("system", talk.options.system));
    messages.push_back(message("user", prompt));
    NIBBLE_TRY(prompt, render(talk, messages));
  }
  NIBBLE_TRY(const Answer answer,
             answer_text(talk, prompt, !talk.chat || talk.options.raw, out, err));
  out << '\n';
  return {};
}

Result<void> run_chat(const Talk& talk, std::ostream& out, std::ostream& err) {
  if (!talk.chat) {
    return Error(Code::kInvalidArgument,
                 "the checkpoint has no chat template: give a prompt with -p");
  }
  err << "Type a message; Ctrl-C stops an answer, Ctrl-D ends.\n";
  OrderedJson messages = OrderedJson::array();
  if (!talk.options.system.empty()) messages.push_back(message("system", talk.options.system));
  for (;;) {
    out << "\n> " << std::flush;
    std::string line;
    if (!std::getline(std::cin, line)) {
      if (!InterruptGuard::interrupted()) break;
      InterruptGuard::clear();  // Ctrl-C at the prompt starts a new line
      std::cin.clear();
      continue;
    }
    if (line.empty()) continue;
    messages.push_back(message("user", line));
    NIBBLE_TRY(const std::string prompt, render(talk, messages));
    Result<Answer> answer = answer_text(talk, prompt, false, out, err);
    InterruptGuard::clear();
    if (!answer) {
      // A full context, say: the chat goes on without this message.
      err << "nibble run: " << answer.error().message() << '\n';
      messages.erase(messages.size() - 1);
      continue;
    }
    messages.push_back(message("assistant", answer->text));
  }
  out << '\n';
  return {};
}

Result<void> run(const Options& options, std::ostream& out, std::ostream& err) {
  const bool chat = options.prompt.empty();
  if (chat && ::isatty(STDIN_FILENO) == 0) {
    return Error(Code::kInvalidArgument,
                 "no prompt: give one with -p, or run on a terminal to chat");
  }
  const std::string directory = recipe::config_directory(options.model.directory);
  NIBBLE_TRY(const text::Tokenizer tokenizer, text::Tokenizer::open(directory));
  NIBBLE_TRY(const runtime::SamplingParams sampling, sampling_params(options.sampling, directory));
  std::optional<text::ChatTemplate> chat_template;
  if (Result<text::ChatTemplate> found = text::ChatTemplate::open(directory); found) {
    chat_template = std::move(*found);
  } else if (found.error().code() != Code::kNotFound) {
    return found.error();
  }
  runtime::EngineOptions engine_options;
  engine_options.max_sequences = 1;
  NIBBLE_TRY(const std::unique_ptr<runtime::Engine> engine,
             open_engine(options.model, engine_options, err));
  const InterruptGuard guard;
  const Talk talk{*engine, tokenizer, std::move(chat_template), sampling, options};
  return chat ? run_chat(talk, out, err) : run_once(talk, out, err);
}

}  // namespace

RunFn add_run(CLI::App& app) {
  auto options = std::make_shared<Options>();
  add_model_options(app, options->model);
  app.add_option("-p,--prompt", options->prompt, "a message (or text, with --raw); none: chat");
  app.add_option("--system", options->system, "system message");
  app.add_flag("--raw", options->raw, "continue the prompt as it is, without the chat template");
  add_sampling_options(app, options->sampling);
  return [options](std::ostream& out, std::ostream& err) {
    const Result<void> done = run(*options, out, err);
    return done ? 0 : fail(err, "run", done.error());
  };
}

}  // namespace nibble::cli
