// nibble convert SRC DST: writes a checkpoint whose experts have another format.
#include "load/convert.h"

#include <unistd.h>

#include <iomanip>
#include <ostream>

#include "cli/command.h"
#include "cli/session.h"

namespace nibble::cli {
namespace {

struct Options {
  std::string source, destination, dialect;
  std::string experts = "keep", others = "keep", head = "keep";
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

Result<void> run(const Options& options, std::ostream& out, std::ostream& err) {
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
  std::function<void(const load::ConvertProgress&)> progress;
  if (!options.quiet && ::isatty(STDERR_FILENO) != 0) {
    progress = [&err](const load::ConvertProgress& p) {
      err << "\rconverting " << bytes_text(p.source_bytes_done) << " of "
          << bytes_text(p.source_bytes_total) << "   " << std::flush;
    };
  }
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
  app.add_option("--experts", options->experts, "format of the routed experts")
      ->check(CLI::IsMember({"keep", "nvfp4", "mxfp4", "mxfp8", "nf3", "bf16"}));
  app.add_option("--others", options->others, "attention, dense and shared MLPs, MTP projection")
      ->check(CLI::IsMember({"keep", "mxfp8"}));
  app.add_option("--head", options->head, "output head")->check(CLI::IsMember({"keep", "mxfp8"}));
  app.add_option("--dialect", options->dialect, "how it is spelled (default: what fits)")
      ->check(CLI::IsMember({"modelopt", "compressed-tensors", "hybrid"}));
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
