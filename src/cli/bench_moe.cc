#include "cli/bench_moe.h"

#include "cli/session.h"

namespace nibble::cli {

RunFn add_bench_moe(CLI::App& app) {
  auto command = std::make_shared<MoeBenchCommand>();
  app.add_option("--shape", command->shape,
                 "qwen, glm, tp8, gptoss, a3b, or E,H,I,K: experts, hidden and intermediate size, "
                 "experts a token");
  app.add_option("--format", command->format,
                 "nvfp4, mxfp4, mxfp8, bf16, fp8_block, nf3, or GATE_UP+DOWN");
  app.add_option("--scales", command->scales, "plain, csf (losslessly compressed), or both in turn")
      ->delimiter(',')
      ->check(CLI::IsMember({"plain", "csf"}));
  app.add_option("--rows", command->rows, "tokens of a step")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  add_device_option(app, command->device);
  app.add_flag("--json", command->json, "machine-readable output");
  app.footer(
      "One layer is route metadata, gate and up, activation, down with the router's weight, and "
      "the\n"
      "sum over the experts, timed as CUDA graph replays over more weights than the L2 holds, "
      "after a\n"
      "check against a double reference. TB/s counts the active experts' bytes once; % of copy is\n"
      "against a device-to-device copy measured in the same run.");
  return [command](std::ostream& out, std::ostream& err) {
    const Result<void> done =
        command->device == "cpu"
            ? Error(Code::kInvalidArgument, "fused MoE layers run on a GPU, not on the CPU")
            : bench_moe_cuda(*command, out);
    return done ? 0 : fail(err, "bench moe", done.error());
  };
}

}  // namespace nibble::cli
