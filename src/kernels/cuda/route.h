// Route metadata: sorts the (token, expert) slots by expert and cuts them into token tiles; the
// activations' columns, and for many tokens their rows too, are brought into the order that the
// products read.
#pragma once

#include "kernels/cuda/workspace.h"

namespace nibble::kernels::cuda {

/// Queues one kernel, or two if x is wanted sorted (MoeWorkspace::x). tile_tokens: largest tile, a
/// multiple of 8. Each expert's rows are cut into the fewest tiles, of nearly equal size.
cudaError_t launch_route(const MoeShape& shape, const MoeGroups& weights, const MoeArgs& args,
                         const MoeWorkspace& work, int tile_tokens, bool sorted_x,
                         cudaStream_t stream);

/// y[token] = FP32 sum over k of shares[token, k] in the order of k, then + add[token].
cudaError_t launch_reduce(const MoeShape& shape, const MoeArgs& args, const MoeWorkspace& work,
                          cudaStream_t stream);

}  // namespace nibble::kernels::cuda
