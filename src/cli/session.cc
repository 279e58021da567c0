#include "cli/session.h"

#include <unistd.h>

#include <algorithm>
#include <iomanip>
#include <ostream>

#include "base/file.h"
#include "load/loader.h"

namespace nibble::cli {
namespace {

void print_progress(std::ostream& err, const load::LoadProgress& p) {
  const double rate = p.seconds > 0 ? static_cast<double>(p.source_bytes_done) / p.seconds : 0;
  const double left = static_cast<double>(p.source_bytes_total - p.source_bytes_done);
  err << "\rloading " << bytes_text(p.source_bytes_done) << " of "
      << bytes_text(p.source_bytes_total) << ", " << std::fixed << std::setprecision(2)
      << rate / 1e9 << " GB/s, " << std::setprecision(0) << (rate > 0 ? left / rate : 0)
      << " s left   " << std::flush;
}

// One line for what was compressed, and one for every layer's projection that stays plain.
void print_scales(std::ostream& err, const load::LoadReport& report) {
  int64_t plain = 0, kept = 0, exceptions = 0;
  for (const load::ScaleReport& s : report.scales) {
    plain += s.plain_bytes;
    kept += s.kept_bytes();
    exceptions += s.compressed() ? s.exceptions : 0;
    if (!s.compressed()) {
      err << "note: scales of layer " << s.layer << ' ' << recipe::role_name(s.role)
          << " stay plain: " << bytes_text(s.plain_bytes) << ", compressed "
          << bytes_text(s.csf_bytes) << '\n';
    }
  }
  if (plain == 0) return;
  err << "scales: " << bytes_text(plain) << " compressed to " << bytes_text(kept) << " ("
      << std::setprecision(3) << static_cast<double>(kept) / static_cast<double>(plain) << "), "
      << exceptions << " exceptions\n";
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1000.0 && unit < 4) {
    value /= 1000.0;
    ++unit;
  }
  std::ostringstream out;
  out << std::fixed
      << std::setprecision(unit == 0    ? 0
                           : value < 10 ? 2
                                        : 1)
      << value << ' ' << kUnits[unit];
  return out.str();
}

void add_compute_options(CLI::App& app, ModelOptions& options) {
  app.add_option("-t,--threads", options.threads, "threads (0: all usable cores)");
  app.add_option("--activations", options.activations, "what products are computed with")
      ->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--scales", options.scales,
                 "hold block scales as stored, or losslessly compressed")
      ->check(CLI::IsMember({"plain", "csf"}));
  app.add_option("-c,--ctx-size", options.context, "longest sequence in tokens (0: the model's)");
  app.add_flag("-q,--quiet", options.quiet, "no progress or plan lines on stderr");
}

void add_model_options(CLI::App& app, ModelOptions& options) {
  app.add_option("DIR", options.directory, "checkpoint directory")->required();
  add_compute_options(app, options);
}

kernels::Activations parse_activations(const std::string& name) {
  return name == "f32" ? kernels::Activations::kF32 : kernels::Activations::kBf16;
}

plan::Scales parse_scales(const std::string& name) {
  return name == "csf" ? plan::Scales::kCsf : plan::Scales::kPlain;
}

Result<std::unique_ptr<runtime::Engine>> open_engine(const ModelOptions& options,
                                                     runtime::EngineOptions engine_options,
                                                     std::ostream& err) {
  NIBBLE_TRY(const recipe::Recipe recipe, recipe::read_recipe(options.directory));
  for (const std::string& notice : recipe.notices()) err << "note: " << notice << '\n';
  const int threads = options.threads > 0 ? options.threads : usable_cores();
  plan::PlanOptions plan_options;
  plan_options.activations = parse_activations(options.activations);
  plan_options.max_context = options.context;
  plan_options.max_batch_tokens = engine_options.max_batch_tokens;
  plan_options.threads = threads;
  plan_options.scales = parse_scales(options.scales);
  NIBBLE_TRY(const plan::PrecisionPlan plan, plan::make_plan(recipe, plan_options));

  std::function<void(const load::LoadProgress&)> progress;
  if (!options.quiet && ::isatty(STDERR_FILENO) != 0) {
    progress = [&err](const load::LoadProgress& p) { print_progress(err, p); };
  }
  const int64_t rss_before = current_rss_bytes();
  ThreadPool pool(threads);
  NIBBLE_TRY(load::LoadedWeights loaded, load::load_weights(recipe, plan, pool, progress));
  if (progress) err << "\r\033[K";
  if (!options.quiet) {
    const load::LoadReport& r = loaded.report;
    err << "loaded " << bytes_text(r.source_bytes) << " in " << std::fixed << std::setprecision(3)
        << r.seconds << " s (" << std::setprecision(2)
        << static_cast<double>(r.source_bytes) / std::max(r.seconds, 1e-9) / 1e9
        << " GB/s); peak resident set grew by " << bytes_text(peak_rss_bytes() - rss_before)
        << ", planned " << bytes_text(plan.memory.load_peak_bytes()) << " = weights "
        << bytes_text(plan.memory.weights_bytes) << " + staging "
        << bytes_text(plan.memory.staging_peak_bytes) << '\n';
    print_scales(err, r);
  }
  engine_options.activations = plan_options.activations;
  engine_options.threads = threads;
  engine_options.max_context = plan.options.max_context;
  NIBBLE_TRY(std::unique_ptr<model::Model> graph,
             model::make_model(recipe.config(), std::move(loaded.store)));
  return runtime::Engine::create(std::move(graph), engine_options);
}

}  // namespace nibble::cli
