#include <set>
#include <sstream>

#include "cli/selftest.h"
#include "kernels/cuda/checks.h"

namespace nibble::cli {
namespace {

using kernels::cuda::CheckOptions;
using kernels::cuda::CheckSize;
using kernels::cuda::CheckSummary;
using kernels::cuda::KernelCheck;
using recipe::Role;

/// "linear nvfp4" and the like: what the graph of a checkpoint calls.
std::set<std::string> used_kernels(const recipe::Recipe& recipe) {
  std::set<std::string> used;
  std::set<std::string> expert_formats;
  for (const auto& [key, weight] : recipe.weights()) {
    std::string format(formats::block_format(weight.meta.format).name);
    switch (key.role) {
      case Role::kExpertGate:
      case Role::kExpertUp:
      case Role::kExpertDown: expert_formats.insert(format); [[fallthrough]];
      case Role::kSharedGate:
      case Role::kSharedUp:
      case Role::kSharedDown:
      case Role::kDenseGate:
      case Role::kDenseUp:
      case Role::kDenseDown: used.insert(cat("moe ", format)); break;
      case Role::kQ:
      case Role::kK:
      case Role::kV:
      case Role::kO:
      case Role::kHead:
        if (format == "fp8_tensor") format = "fp8_channel";  // one kernel
        used.insert(cat("linear ", format));
        break;
      case Role::kRouter: used.insert(cat("router ", format)); break;
      case Role::kEmbedding:
        used.insert(cat("embed ", format));
        if (recipe.config().tied_embeddings) used.insert(cat("linear ", format));
        break;
      default: break;
    }
  }
  if (expert_formats.size() > 1) used.insert({"moe mixed", "moe groups"});
  return used;
}

/// Kernels that run whatever the weights' formats, and compressed scales of experts that have them.
bool wanted(const KernelCheck& check, const std::set<std::string>& used) {
  const std::string_view kernel = check.kernel;
  if (kernel == "norm" || kernel == "sample" || kernel == "attention") return true;
  if (kernel == "csf") return used.count(cat("moe ", check.format)) > 0;
  return used.count(cat(kernel, " ", check.format)) > 0;
}

}  // namespace

Result<void> selftest_cuda(const recipe::Recipe* recipe, const VerdictSink& sink) {
  const std::set<std::string> used =
      recipe != nullptr ? used_kernels(*recipe) : std::set<std::string>();
  for (const KernelCheck& check : kernels::cuda::kernel_checks()) {
    if (recipe != nullptr && !wanted(check, used)) continue;
    std::ostringstream failures;
    const CheckSummary s =
        check.run({check.format, CheckSize::kUsual, /*print_cases=*/false}, failures);
    sink({std::string(check.kernel), std::string(check.format), s.checks, s.failed, s.worst,
          failures.str()});
  }
  return {};
}

}  // namespace nibble::cli
