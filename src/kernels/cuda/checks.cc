#include "kernels/cuda/checks.h"

#include <algorithm>

namespace nibble::kernels::cuda {
namespace {

constexpr KernelCheck kChecks[] = {
    {"moe", "nvfp4", check_moe},
    {"moe", "mxfp4", check_moe},
    {"moe", "mxfp8", check_moe},
    {"moe", "bf16", check_moe},
    {"moe", "fp8_block", check_moe},
    {"moe", "nf3", check_moe},
    {"moe", "mixed", check_moe},
    {"moe", "groups", check_moe},
    {"csf", "nvfp4", check_csf},
    {"csf", "mxfp4", check_csf},
    {"csf", "mxfp8", check_csf},
    {"linear", "bf16", check_linear},
    {"linear", "nvfp4", check_linear},
    {"linear", "mxfp4", check_linear},
    {"linear", "mxfp8", check_linear},
    {"linear", "fp8_block", check_linear},
    {"linear", "fp8_channel", check_linear},
    {"router", "bf16", check_router},
    {"router", "f32", check_router},
    {"attention", "bf16", check_attention},
    {"attention", "fp8", check_attention},
    {"step", "i32", check_step},
    {"embed", "f32", check_embed},
    {"embed", "f16", check_embed},
    {"embed", "bf16", check_embed},
    {"norm", "f32", check_norm},
    {"sample", "f32", check_sample},
};

}  // namespace

void CheckSummary::add(const CheckSummary& other) {
  checks += other.checks;
  failed += other.failed;
  worst = std::max(worst, other.worst);
}

std::span<const KernelCheck> kernel_checks() { return kChecks; }

}  // namespace nibble::kernels::cuda
