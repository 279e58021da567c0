#include "cli/command.h"

#include <ostream>

#include "base/log.h"

namespace nibble::cli {
namespace {

constexpr Subcommand kSubcommands[] = {
    {"run", "generate text from a prompt, or chat on a terminal", add_run},
    {"inspect", "say what a checkpoint is and what it needs, from headers only", add_inspect},
    {"convert", "write a checkpoint with its experts in another format", add_convert},
    {"verify", "prove that no byte of a scale plane is lost, alone or against another checkpoint",
     add_verify},
    {"eval", "perplexity of a text, or KL divergence against another checkpoint", add_eval},
    {"logits", "write the logits of every position of a token sequence", add_logits},
    {"bench", "prompt and generation speed, in llama-bench's manner", add_bench},
    {"selftest", "test kernels against their references on this machine", add_selftest},
};

}  // namespace

int fail(std::ostream& err, const char* name, const Error& error) {
  err << "nibble " << name << ": " << error.message() << '\n';
  switch (error.code()) {
    case Code::kInvalidArgument: return 2;
    case Code::kNotFound:
    case Code::kCorruptInput:
    case Code::kUnsupported:
    case Code::kResourceExhausted:
    case Code::kIo:
    case Code::kCancelled:
    case Code::kUnavailable:
    case Code::kDeviceLost:
    case Code::kInternal: return 1;
  }
  return 1;
}

int run_main(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  set_log_sink([&err](LogLevel level, std::string_view line) {
    err << (level == LogLevel::kWarning ? "warning: " : "") << line << '\n';
  });
  CLI::App app("nibble serves mixture-of-experts language models straight from 4-bit checkpoints.",
               "nibble");
  app.set_version_flag("--version", "nibble " NIBBLE_VERSION);
  app.require_subcommand(1);
  std::vector<std::pair<CLI::App*, RunFn>> commands;
  for (const Subcommand& command : kSubcommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    sub->option_defaults()->always_capture_default();
    commands.emplace_back(sub, command.add(*sub));
  }
  try {  // CLI11 reports by throwing; nothing of it leaves this function
    app.parse(argc, const_cast<char**>(argv));
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e, out, err);
    return code == 0 ? 0 : 2;
  }
  for (const auto& [sub, run] : commands) {
    if (sub->parsed()) return run(out, err);
  }
  return 2;
}

}  // namespace nibble::cli
