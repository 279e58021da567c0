// `nibble bench moe`: the fused MoE layer of a shape, without a checkpoint. In a build without CUDA
// it says so (bench_moe_none.cc).
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/command.h"

namespace nibble::cli {

struct MoeBenchCommand {
  std::string shape = "glm", format = "nvfp4", device = "cuda";
  std::vector<std::string> scales = {"plain"};
  std::vector<int64_t> rows = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
  bool json = false;
};

/// Adds the options of `nibble bench moe`.
RunFn add_bench_moe(CLI::App& app);

/// Times and prints. Errors: kUnsupported without a usable GPU; those of kernels/cuda/moe_bench.h.
Result<void> bench_moe_cuda(const MoeBenchCommand& command, std::ostream& out);

}  // namespace nibble::cli
