#include <ostream>

#include "base/json.h"
#include "cli/bench_moe.h"
#include "cli/session.h"
#include "device/cuda.h"
#include "kernels/cuda/moe_bench.h"

namespace nibble::cli {
namespace {

using kernels::cuda::MoeBenchOptions;
using kernels::cuda::MoeBenchReport;
using kernels::cuda::MoeTiming;

Json json_of(const MoeBenchCommand& command, const MoeBenchReport& report) {
  Json list = Json::array();
  for (const MoeTiming& t : report.timings) {
    list.push_back({{"device", report.device},
                    {"shape", command.shape},
                    {"experts", report.experts},
                    {"hidden", report.hidden},
                    {"inter", report.inter},
                    {"top_k", report.top_k},
                    {"format", command.format},
                    {"scales", t.scales},
                    {"rows", t.rows},
                    {"active_experts", t.active_experts},
                    {"us", t.microseconds},
                    {"spread", t.spread},
                    {"bytes_per_second", t.bytes_per_second},
                    {"copy_bandwidth", report.copy_bandwidth},
                    {"share_of_copy", t.bytes_per_second / report.copy_bandwidth},
                    {"flops", t.flops},
                    {"relative_error", t.error},
                    {"version", NIBBLE_VERSION}});
  }
  return list;
}

}  // namespace

Result<void> bench_moe_cuda(const MoeBenchCommand& command, std::ostream& out) {
  NIBBLE_TRY(const device::CudaDevice device, device::cuda_device(cuda_index(command.device)));
  NIBBLE_TRY(device::cuda_use(device.index));
  MoeBenchOptions options;
  options.shape = command.shape;
  options.format = command.format;
  options.scales = command.scales;
  options.rows = command.rows;
  NIBBLE_TRY(const MoeBenchReport report,
             kernels::cuda::bench_moe(options, [&](const MoeBenchReport& so_far) {
               if (!command.json) kernels::cuda::print_moe_progress(options, so_far, out);
             }));
  if (command.json) out << json_dump(json_of(command, report), 2) << '\n';
  return {};
}

}  // namespace nibble::cli
