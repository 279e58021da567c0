// A checkpoint on its way to a running engine, with the lines a user sees meanwhile: shared by
// every subcommand that computes.
#pragma once

#include <CLI/CLI.hpp>
#include <iosfwd>
#include <memory>
#include <string>

#include "plan/plan.h"
#include "recipe/recipe.h"
#include "runtime/engine.h"

namespace nibble::cli {

struct ModelOptions {
  std::string directory;
  int threads = 0;
  std::string activations = "bf16";
  std::string scales = "plain";
  std::string device = "auto";
  std::string kv_cache = "auto";
  int64_t context = 0;
  bool quiet = false;
};
/// Adds DIR, --threads, --activations, --ctx-size and --quiet.
void add_model_options(CLI::App& app, ModelOptions& options);
void add_device_option(CLI::App& app, std::string& device);
/// N of "cuda:N", else 0.
int cuda_index(const std::string& device);
/// Only the options, for commands that name the checkpoint themselves.
void add_compute_options(CLI::App& app, ModelOptions& options);

/// Recipe, plan, load, engine. Prints notices, progress and "planned / measured" lines to `err`
/// unless quiet (errors and notices always).
Result<std::unique_ptr<runtime::Engine>> open_engine(const ModelOptions& options,
                                                     runtime::EngineOptions engine_options,
                                                     std::ostream& err);

kernels::Activations parse_activations(const std::string& name);
plan::Scales parse_scales(const std::string& name);
/// "1.23 GB"
std::string bytes_text(int64_t bytes);

}  // namespace nibble::cli
