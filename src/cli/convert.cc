// nibble convert SRC DST: writes a checkpoint whose experts have another format, or whose scales
// are stored compressed (csf) or plain again.
#include "load/convert.h"

#include <unistd.h>

#include <iomanip>
#include <ostream>

#include "cli/command.h"
#include "cli/session.h"
#include "load/convert_scales.h"

namespace nibble::cli {
namespace {

struct Options {
  std::string source, destination, dialect;
  std::string experts = "keep", others = "keep", head = "keep";
  std::string scales, container, family;
  int64_t max_shard_mb = 4000;
  int threads = 0;
  bool requantize = false, keep_mtp_copies = false, quiet = false;
};

// The parser admits only these names, so each is known.
load::ConvertTarget target(const std::string& name) {
  return *load::convert_target_from_name(name);
}

void print_report(std::ostream& out, const Options& options, const load::ConvertReport& report) {
  for (const auto& [name, flow] : report.flows) {
    out << std::left << std::setw(26) << name << std::right << std::setw(8) << flow.weights
        << " weights " << std::setw(10) << bytes_text(flow.source_bytes) << " -> " << std::setw(10)
        << bytes_text(flow.written_bytes) << '\n';
  }
  for (const std::string& notice : report.notices) out << "note: " << notice << '\n';
  out << options.destination << ": " << bytes_text(report.written_bytes) << " from "
      << bytes_text(report.source_bytes);
  if (!report.dialect.empty()) out << ", " << report.dialect << " dialect";
  out << std::fixed << std::setprecision(1) << ", " << report.seconds << " s\n";
}

std::function<void(const load::ConvertProgress&)> progress_line(const Options& options,
                                                                std::ostream& err) {
  if (options.quiet || ::isatty(STDERR_FILENO) == 0) return {};
  return [&err](const load::ConvertProgress& p) {
    err << "\rconverting " << bytes_text(p.source_bytes_done) << " of "
        << bytes_text(p.source_bytes_total) << "   " << std::flush;
  };
}

void print_scales_report(std::ostream& out, const Options& options,
                         const load::ScalesReport& report) {
  int64_t plain = 0, csf = 0, exceptions = 0;
  for (const load::ScalesReport::Group& group : report.groups) {
    if (!group.compressed) {
      out << group.module << ' ' << group.projection << " stays plain: " << group.why_plain << '\n';
      continue;
    }
    plain += group.plain_bytes;
    csf += group.csf_bytes;
    exceptions += group.exceptions;
  }
  out << std::fixed << std::setprecision(3);
  if (plain > 0) {
    out << "compressed " << report.planes_changed << " scale planes: " << bytes_text(plain)
        << " -> " << bytes_text(csf) << " (ratio "
        << static_cast<double>(csf) / static_cast<double>(plain) << ", " << exceptions
        << " exceptions, " << 100.0 * static_cast<double>(exceptions) / static_cast<double>(plain)
        << " % of the bytes)\n";
  } else {
    out << "decoded " << report.planes_changed << " scale planes\n";
  }
  for (const std::string& notice : report.notices) out << "note: " << notice << '\n';
  out << options.destination << ": " << bytes_text(report.written_bytes) << " from "
      << bytes_text(report.source_bytes) << ", " << report.container << ", "
      << report.tensors_copied << " tensors copied, " << std::setprecision(1) << report.seconds
      << " s\n";
}

Result<void> run_scales(const Options& options, std::ostream& out, std::ostream& err) {
  load::ConvertScalesOptions convert;
  convert.form = options.scales == "csf" ? load::ScalesForm::kCsf : load::ScalesForm::kPlain;
  if (!options.container.empty()) {
    convert.container = options.container == "manifest" ? load::ScalesContainer::kManifest
                                                        : load::ScalesContainer::kModelOpt;
  }
  convert.family = options.family;
  convert.max_shard_bytes = options.max_shard_mb * 1'000'000;
  ThreadPool pool(options.threads);
  const auto progress = progress_line(options, err);
  NIBBLE_TRY(const load::ScalesReport report,
             load::convert_scales(options.source, options.destination, convert, pool, progress));
  if (progress) err << "\r\033[K";
  print_scales_report(out, options, report);
  return {};
}

Result<void> run(const Options& options, std::ostream& out, std::ostream& err) {
  if (!options.scales.empty()) return run_scales(options, out, err);
  NIBBLE_TRY(const recipe::Recipe recipe, recipe::read_recipe(options.source));
  for (const std::string& notice : recipe.notices()) err << "note: " << notice << '\n';
  load::ConvertOptions convert;
  convert.experts = target(options.experts);
  convert.others = target(options.others);
  convert.head = target(options.head);
  if (!options.dialect.empty()) convert.dialect = load::convert_dialect_from_name(options.dialect);
  convert.drop_mtp_copies = !options.keep_mtp_copies;
  convert.requantize = options.requantize;
  convert.max_shard_bytes = options.max_shard_mb * 1'000'000;
  ThreadPool pool(options.threads);
  const auto progress = progress_line(options, err);
  NIBBLE_TRY(const load::ConvertReport report,
             load::convert_checkpoint(recipe, options.destination, convert, pool, progress));
  if (progress) err << "\r\033[K";
  print_report(out, options, report);
  return {};
}

}  // namespace

RunFn add_convert(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("SRC", options->source, "checkpoint directory to read")->required();
  app.add_option("DST", options->destination, "directory to write; must not exist")->required();
  CLI::Option* experts =
      app.add_option("--experts", options->experts, "format of the routed experts")
          ->check(CLI::IsMember({"keep", "nvfp4", "mxfp4", "mxfp8", "nf3", "bf16"}));
  CLI::Option* others = app.add_option("--others", options->others,
                                       "attention, dense and shared MLPs, MTP projection")
                            ->check(CLI::IsMember({"keep", "mxfp8"}));
  CLI::Option* head = app.add_option("--head", options->head, "output head")
                          ->check(CLI::IsMember({"keep", "mxfp8"}));
  CLI::Option* dialect =
      app.add_option("--dialect", options->dialect, "how it is spelled (default: what fits)")
          ->check(CLI::IsMember({"modelopt", "compressed-tensors", "hybrid"}));
  CLI::Option* scales =
      app.add_option("--scales", options->scales,
                     "store the scales of FP4 experts compressed (csf), or plain again")
          ->check(CLI::IsMember({"csf", "plain"}))
          ->excludes(experts)
          ->excludes(others)
          ->excludes(head)
          ->excludes(dialect);
  app.add_option(
         "--container", options->container,
         "with --scales csf: how they are stored (default: modelopt for NVFP4, manifest for "
         "MXFP4)")
      ->check(CLI::IsMember({"modelopt", "manifest"}))
      ->needs(scales);
  app.add_option("--family", options->family,
                 "with --container manifest: its family (default: by names and sizes)")
      ->needs(scales);
  app.add_option("--max-shard-mb", options->max_shard_mb, "largest shard, in MB")
      ->check(CLI::PositiveNumber);
  app.add_option("-t,--threads", options->threads, "threads (0: all usable cores)");
  app.add_flag("--requantize", options->requantize, "quantize already quantized weights again");
  app.add_flag("--keep-mtp-copies", options->keep_mtp_copies,
               "keep an MTP layer's own embedding and head even if they equal the model's");
  app.add_flag("-q,--quiet", options->quiet, "no progress on stderr");
  return [options](std::ostream& out, std::ostream& err) {
    const Result<void> done = run(*options, out, err);
    return done ? 0 : fail(err, "convert", done.error());
  };
}

}  // namespace nibble::cli
