#include "cli/session.h"

#include <unistd.h>

#include <algorithm>
#include <iomanip>
#include <ostream>

#include "base/file.h"
#include "cli/cuda_model.h"
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
  add_device_option(app, options.device);
  app.add_option("--kv-cache", options.kv_cache,
                 "keys and values: auto (as the activations), bf16 or fp8 (GPU only)")
      ->check(CLI::IsMember({"auto", "bf16", "fp8"}));
  app.add_option("-c,--ctx-size", options.context, "longest sequence in tokens (0: the model's)");
  app.add_flag("-q,--quiet", options.quiet, "no progress or plan lines on stderr");
}

void add_device_option(CLI::App& app, std::string& device) {
  app.add_option("--device", device, "cpu, cuda, cuda:N, or auto: a usable GPU, else the CPU")
      ->check(CLI::Validator(
          [](const std::string& text) {
            const bool known =
                text == "auto" || text == "cpu" || text == "cuda" ||
                (text.rfind("cuda:", 0) == 0 && text.size() <= 7 && text.size() > 5 &&
                 text.find_first_not_of("0123456789", 5) == std::string::npos);
            return known ? std::string() : "'" + text + "' is none of auto, cpu, cuda and cuda:N";
          },
          "DEVICE"));
}

int cuda_index(const std::string& device) {
  const size_t colon = device.find(':');
  return colon == std::string::npos ? 0 : std::stoi(device.substr(colon + 1));
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

namespace {

using Progress = std::function<void(const load::LoadProgress&)>;

std::string seconds_text(const load::LoadReport& r) {
  std::ostringstream out;
  out << "loaded " << bytes_text(r.source_bytes) << " in " << std::fixed << std::setprecision(3)
      << r.seconds << " s (" << std::setprecision(2)
      << static_cast<double>(r.source_bytes) / std::max(r.seconds, 1e-9) / 1e9 << " GB/s)";
  return out.str();
}

// A model and the context it was planned for.
struct Opened {
  std::unique_ptr<model::Model> model;
  int64_t max_context = 0;
};

Result<Opened> open_on_cpu(const recipe::Recipe& recipe, const plan::PlanOptions& plan_options,
                           bool quiet, const Progress& progress, std::ostream& err) {
  NIBBLE_TRY(const plan::PrecisionPlan plan, plan::make_plan(recipe, plan_options));
  const int64_t rss_before = current_rss_bytes();
  ThreadPool pool(plan_options.threads);
  NIBBLE_TRY(load::LoadedWeights loaded, load::load_weights(recipe, plan, pool, progress));
  if (progress) err << "\r\033[K";
  if (!quiet) {
    err << seconds_text(loaded.report) << "; peak resident set grew by "
        << bytes_text(peak_rss_bytes() - rss_before) << ", planned "
        << bytes_text(plan.memory.load_peak_bytes()) << " = weights "
        << bytes_text(plan.memory.weights_bytes) << " + staging "
        << bytes_text(plan.memory.staging_peak_bytes) << '\n';
    print_scales(err, loaded.report);
  }
  Opened opened;
  opened.max_context = plan.options.max_context;
  NIBBLE_TRY(opened.model, model::make_model(recipe.config(), std::move(loaded.store)));
  return opened;
}

Result<Opened> open_on_cuda(const recipe::Recipe& recipe, const plan::PlanOptions& plan_options,
                            const ModelOptions& options, const device::CudaDevice& device,
                            const Progress& progress, std::ostream& err) {
  const bool quiet = options.quiet;
  if (plan_options.activations == kernels::Activations::kF32) {
    return Error(Code::kUnsupported, "FP32 activations are computed on the CPU (--device cpu)");
  }
  const auto kv = options.kv_cache == "fp8" ? kernels::KvType::kFp8 : kernels::KvType::kBf16;
  const int64_t rss_before = current_rss_bytes();
  ThreadPool pool(usable_cores());
  NIBBLE_TRY(CudaModel loaded, load_cuda_model(recipe, plan_options, kv, device, pool, progress));
  if (progress) err << "\r\033[K";
  if (!quiet) {
    err << seconds_text(loaded.report) << ", " << std::setprecision(3)
        << loaded.report.reading_seconds << " s of it reading; weights take "
        << bytes_text(loaded.report.resident_bytes) << " of device memory, planned "
        << bytes_text(loaded.planned_bytes) << "; peak resident set grew by "
        << bytes_text(peak_rss_bytes() - rss_before) << ", planned staging "
        << bytes_text(loaded.host_staging_bytes) << '\n';
    print_scales(err, loaded.report);
    if (recipe.mtp_present()) err << "note: the MTP layer is not loaded: it is not used on a GPU\n";
  }
  return Opened{std::move(loaded.model), loaded.max_context};
}

// On the device that was asked for; `auto` takes the GPU if it can run the checkpoint, and says why
// if it cannot.
Result<Opened> open_model(const recipe::Recipe& recipe, const ModelOptions& options,
                          const plan::PlanOptions& plan_options, const Progress& progress,
                          std::ostream& err) {
  std::string why = "as asked";
  const bool automatic = options.device == "auto";
  if (automatic && plan_options.activations == kernels::Activations::kF32) {
    why = "FP32 activations are computed there";
  } else if (options.device != "cpu") {
    const int index = cuda_index(options.device);
    const Result<device::CudaDevice> device = device::cuda_device(index);
    if (device) {
      Result<Opened> opened = open_on_cuda(recipe, plan_options, options, *device, progress, err);
      if (opened || !automatic) {
        if (opened && !options.quiet) {
          err << "device: cuda:" << index << " (" << device->name << ", "
              << bytes_text(device->bytes) << ")\n";
        }
        return opened;
      }
      why = opened.error().message();
    } else {
      if (!automatic) return device.error();
      why = device.error().message();
    }
  }
  if (options.kv_cache != "auto" &&
      (options.kv_cache == "fp8" || plan_options.activations == kernels::Activations::kF32)) {
    return Error(Code::kUnsupported, cat("--kv-cache ", options.kv_cache,
                                         ": on the CPU keys and values are kept as the "
                                         "activations are (device: cpu, ",
                                         why, ")"));
  }
  if (!options.quiet) err << "device: cpu (" << why << ")\n";
  return open_on_cpu(recipe, plan_options, options.quiet, progress, err);
}

}  // namespace

Result<std::unique_ptr<runtime::Engine>> open_engine(const ModelOptions& options,
                                                     runtime::EngineOptions engine_options,
                                                     std::ostream& err) {
  NIBBLE_TRY(const recipe::Recipe recipe, recipe::read_recipe(options.directory));
  for (const std::string& notice : recipe.notices()) err << "note: " << notice << '\n';
  plan::PlanOptions plan_options;
  plan_options.activations = parse_activations(options.activations);
  plan_options.max_context = options.context;
  plan_options.max_batch_tokens = engine_options.max_batch_tokens;
  plan_options.threads = options.threads > 0 ? options.threads : usable_cores();
  plan_options.scales = parse_scales(options.scales);
  Progress progress;
  if (!options.quiet && ::isatty(STDERR_FILENO) != 0) {
    progress = [&err](const load::LoadProgress& p) { print_progress(err, p); };
  }
  NIBBLE_TRY(Opened opened, open_model(recipe, options, plan_options, progress, err));
  engine_options.activations = plan_options.activations;
  engine_options.threads = plan_options.threads;
  engine_options.max_context = opened.max_context;
  return runtime::Engine::create(std::move(opened.model), engine_options);
}

}  // namespace nibble::cli
