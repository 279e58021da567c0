// nibble verify DIR [--against DIR2]: decodes every scale plane and says what was checked and where
// the first difference lies.
#include "load/verify.h"

#include <unistd.h>

#include <iomanip>
#include <ostream>

#include "cli/command.h"
#include "cli/session.h"

namespace nibble::cli {
namespace {

struct Options {
  std::string directory, against;
  int threads = 0;
  bool quiet = false;
};

void print_report(std::ostream& out, const Options& options, const load::VerifyReport& report) {
  out << options.directory << ": " << report.planes << " scale planes, "
      << bytes_text(report.plane_bytes) << ", " << report.stored_planes
      << " stored as csf; every byte went through the codec\n";
  if (report.plane_bytes > 0) {
    out << "csf: " << bytes_text(report.csf_bytes) << ", " << report.exceptions
        << " exceptions checked";
    if (report.stored_planes < report.planes) out << " (plain planes: of a trial encode)";
    out << '\n';
  }
  if (report.not_canonical > 0) {
    out << report.not_canonical << " streams are legal, not canonical\n";
  }
  if (report.not_encodable > 0) {
    out << report.not_encodable << " planes have a size that csf does not take\n";
  }
  if (!options.against.empty()) {
    out << "against " << options.against << ": " << report.tensors << " tensors, "
        << bytes_text(report.tensor_bytes) << '\n';
  }
  if (report.same()) {
    out << "no difference\n";
    return;
  }
  out << report.differing << " tensors differ; the first is " << difference_text(*report.first)
      << '\n';
}

int run(const Options& options, std::ostream& out, std::ostream& err) {
  ThreadPool pool(options.threads);
  std::function<void(const load::ConvertProgress&)> progress;
  if (!options.quiet && ::isatty(STDERR_FILENO) != 0) {
    progress = [&err](const load::ConvertProgress& p) {
      err << "\rverifying " << bytes_text(p.source_bytes_done) << "   " << std::flush;
    };
  }
  const Result<load::VerifyReport> report =
      options.against.empty()
          ? load::verify_checkpoint(options.directory, pool, progress)
          : load::verify_against(options.directory, options.against, pool, progress);
  if (progress) err << "\r\033[K";
  if (!report) return fail(err, "verify", report.error());
  print_report(out, options, *report);
  return report->same() ? 0 : 1;
}

}  // namespace

RunFn add_verify(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("DIR", options->directory, "checkpoint directory, or a csf container")->required();
  app.add_option("--against", options->against,
                 "compare every tensor with this checkpoint, scales decoded");
  app.add_option("-t,--threads", options->threads, "threads (0: all usable cores)");
  app.add_flag("-q,--quiet", options->quiet, "no progress on stderr");
  return [options](std::ostream& out, std::ostream& err) { return run(*options, out, err); };
}

}  // namespace nibble::cli
