// Route metadata: sorts the (token, expert) slots by expert, cuts them into token tiles and gathers
// the activations into the order and swizzle that the products read.
#pragma once

#include "kernels/cuda/workspace.h"

namespace nibble::kernels::cuda {

/// Queues one or two kernels. tile_tokens: largest tile, a multiple of 8. Each expert's rows are
/// cut into the fewest tiles, of nearly equal size.
cudaError_t launch_route(const MoeShape& shape, const MoeGroups& weights, const MoeArgs& args,
                         const MoeWorkspace& work, int tile_tokens, cudaStream_t stream);

/// y[token] = FP32 sum over k of shares[token, k] in the order of k, then + add[token].
cudaError_t launch_reduce(const MoeShape& shape, const MoeArgs& args, const MoeWorkspace& work,
                          cudaStream_t stream);

}  // namespace nibble::kernels::cuda
