// What a subcommand is: options added to a CLI11 parser, and a function that runs it. The cli
// folder owns stdout, stderr and exit codes; streams are arguments so that a test is one call.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <iosfwd>
#include <span>

#include "base/result.h"

namespace nibble::cli {

/// Exit codes: 0 done, 1 the checkpoint, host or request is bad, 2 wrong usage.
using RunFn = std::function<int(std::ostream& out, std::ostream& err)>;

struct Subcommand {
  const char* name;
  const char* summary;
  /// Adds options to `app` and returns what runs after parsing.
  RunFn (*add)(CLI::App& app);
};

RunFn add_inspect(CLI::App& app);
RunFn add_run(CLI::App& app);
RunFn add_convert(CLI::App& app);
RunFn add_verify(CLI::App& app);
RunFn add_eval(CLI::App& app);
RunFn add_logits(CLI::App& app);
RunFn add_bench(CLI::App& app);
RunFn add_selftest(CLI::App& app);

/// The whole program: parses, runs, returns the exit code.
int run_main(int argc, const char* const* argv, std::ostream& out, std::ostream& err);

/// Prints "nibble NAME: message" and returns the exit code of the error.
int fail(std::ostream& err, const char* name, const Error& error);

}  // namespace nibble::cli
