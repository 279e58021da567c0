#include <algorithm>
#include <utility>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/moe_few.h"
#include "kernels/cuda/moe_layer.h"
#include "kernels/cuda/moe_stream.h"
#include "kernels/cuda/route.h"

namespace nibble::kernels::cuda {
namespace {

// Above this mean number of rows an expert, the wide geometry. Measured: docs/results.
constexpr double kWideRows = 10.0;

int64_t round_up(int64_t v, int64_t step) { return (v + step - 1) / step * step; }

Error cuda_error(const char* what, cudaError_t error) {
  return Error(Code::kInternal, cat(what, ": ", cudaGetErrorString(error)));
}

/// The instances for one format.
struct ExpertKernels {
  FormatId format;
  StreamKernel (*stream)(ScaleForm form, Geometry geometry);
  FewKernel (*few)(ScaleForm form, bool deep);
};
constexpr ExpertKernels kExpertKernels[] = {
    {FormatId::kNvfp4, stream_kernel_nvfp4, few_kernel_nvfp4},
    {FormatId::kMxfp4, stream_kernel_mxfp4, few_kernel_mxfp4},
    {FormatId::kMxfp8, stream_kernel_mxfp8, few_kernel_mxfp8},
    {FormatId::kBf16, stream_kernel_bf16, few_kernel_bf16},
    {FormatId::kFp8Block, stream_kernel_fp8_block, few_kernel_fp8_block},
    {FormatId::kNf3, stream_kernel_nf3, few_kernel_nf3},
};
/// Null: there are none.
const ExpertKernels* kernels_of(FormatId format) {
  for (const ExpertKernels& k : kExpertKernels) {
    if (k.format == format) return &k;
  }
  return nullptr;
}

Result<StreamKernel> find_kernel(const ExpertMatrices& m, Geometry geometry) {
  const ExpertKernels* kernels = kernels_of(m.format);
  if (kernels != nullptr) return kernels->stream(m.scale_form, geometry);
  return Error(Code::kUnsupported,
               cat("CUDA experts in format ", formats::block_format(m.format).name,
                   ": no kernel; nvfp4, mxfp4, mxfp8, bf16, fp8_block and nf3 have one"));
}

Result<void> check_matrices(const ExpertMatrices& m, const MoeShape& shape) {
  if (m.scale_form == ScaleForm::kCsf && !has_csf(m.format)) {
    return Error(Code::kUnsupported,
                 cat("compressed scales of format ", formats::block_format(m.format).name));
  }
  const int64_t group = group_cols(m.format);
  if (shape.hidden % group != 0 || shape.inter % group != 0) {
    return Error(
        Code::kInvalidArgument,
        cat("MoE shape: hidden ", shape.hidden, " and intermediate ", shape.inter,
            " must be multiples of ", group, " for ", formats::block_format(m.format).name));
  }
  if (m.tiles == nullptr || (m.scale_form == ScaleForm::kCsf && m.exceptions == nullptr)) {
    return Error(Code::kInvalidArgument, "MoE layer: a required pointer is null");
  }
  return {};
}

Result<void> check(const MoeShape& shape, const MoeGroups& weights, const MoeArgs& args) {
  if (shape.experts < 1 || shape.experts > 1024 || shape.top_k < 1 || shape.hidden < 1 ||
      shape.inter < 1 || shape.hidden % 4 != 0) {
    return Error(Code::kInvalidArgument,
                 cat("MoE shape: experts ", shape.experts, " (1..1024), top-k ", shape.top_k,
                     ", hidden ", shape.hidden, " (a multiple of 4), intermediate ", shape.inter));
  }
  // So that 32 bits number the slots, and all their columns in fours (RowTarget).
  if (args.tokens < 1 || args.tokens * shape.top_k * chunks(shape.hidden) > (int64_t{1} << 28)) {
    return Error(Code::kInvalidArgument, cat("MoE tokens: ", args.tokens));
  }
  const bool dense = args.ids == nullptr;
  if (dense && (shape.experts != 1 || shape.top_k != 1)) {
    return Error(Code::kInvalidArgument, "MoE layer: no ids, but more than one expert or top-k");
  }
  if (args.x == nullptr || args.y == nullptr || (!dense && args.weights == nullptr)) {
    return Error(Code::kInvalidArgument, "MoE layer: a required pointer is null");
  }
  int64_t experts = 0;
  for (const MoeWeights& w : weights.groups) {
    experts += w.experts;
    NIBBLE_TRY(check_matrices(w.gate_up, shape));
    NIBBLE_TRY(check_matrices(w.down, shape));
    if (w.gate_factor == nullptr || w.up_factor == nullptr || w.down_factor == nullptr ||
        (w.gate_bias == nullptr) != (w.up_bias == nullptr)) {
      return Error(Code::kInvalidArgument, "MoE layer: a required pointer is null");
    }
  }
  const size_t groups = weights.groups.size();
  if (groups < 1 || groups > kMaxGroups || experts != shape.experts ||
      (groups > 1 && weights.rank == nullptr)) {
    return Error(Code::kInvalidArgument,
                 cat("MoE layer: ", groups, " groups (1..", kMaxGroups, ") with ", experts,
                     " experts of ", shape.experts, ", several groups with a rank map"));
  }
  return {};
}

/// One kernel can run both products if they are packed alike.
bool alike(const MoeWeights& w) {
  return w.gate_up.format == w.down.format && w.gate_up.scale_form == w.down.scale_form;
}

/// 16 rows of one expert's gate and up matrix.
int64_t expert_ups(const MoeShape& shape) {
  return 4 * row_blocks(Product::kGateUp, shape.hidden, shape.inter);
}

/// The kernel for few slots that fits shared memory, or none.
struct FewChoice {
  FewKernel kernel;
  int64_t bytes = 0;
};
FewChoice choose_few(const MoeShape& shape, std::span<const MoeWeights> groups, int64_t tokens,
                     const Gpu& gpu) {
  if (groups.size() != 1 || !alike(groups[0]) || tokens > kFewTokens ||
      tokens * shape.top_k > kFewSlots ||
      !Divisor::divides(tokens * shape.top_k * expert_ups(shape) * gpu.processors,
                        gpu.processors)) {
    return {};
  }
  const ExpertMatrices& m = groups[0].gate_up;
  const ExpertKernels* kernels = kernels_of(m.format);
  for (const bool deep : {true, false}) {
    if (kernels == nullptr) break;
    const FewKernel kernel = kernels->few(m.scale_form, deep);
    const int64_t bytes = FewLayout(shape, tokens, kernel.ring_bytes, gpu.processors).bytes;
    if (bytes <= gpu.shared_bytes) return {kernel, bytes};
  }
  return {};
}
/// The most tokens that one launch for few slots takes; 0: none.
int64_t slice_tokens(const MoeShape& shape, std::span<const MoeWeights> groups, const Gpu& gpu) {
  int64_t tokens = kFewTokens;
  while (tokens > 0 && choose_few(shape, groups, tokens, gpu).kernel.kernel == nullptr) --tokens;
  return tokens;
}

/// Where the launch for few slots is the faster one: measured, docs/results. Up to two tokens it
/// was so for all shapes; then for those with small experts, where latency matters longer.
bool few_pays(const MoeShape& shape, int64_t tokens, const Gpu& gpu) {
  constexpr int64_t kSmallInter = 1024;
  return !gpu.has_bulk_copies() || shape.inter <= kSmallInter ||
         std::min(tokens * shape.top_k, shape.experts) <= 2 * shape.top_k;
}

/// For more tokens than one launch for few slots takes.
Result<Geometry> choose(const MoeShape& shape, std::span<const MoeWeights> groups, int64_t tokens,
                        const Gpu& gpu) {
  if (!gpu.has_bulk_copies()) return Geometry::kSlices;
  const double rows =
      static_cast<double>(tokens * shape.top_k) / static_cast<double>(shape.experts);
  if (rows > kWideRows && gpu.has_wgmma()) return Geometry::kWide;
  for (const MoeWeights& w : groups) {
    for (const ExpertMatrices* m : {&w.gate_up, &w.down}) {
      NIBBLE_TRY(const StreamKernel kernel, find_kernel(*m, Geometry::kNarrow));
      if (static_cast<int64_t>(kernel.smem_bytes) > gpu.shared_bytes) return Geometry::kSmall;
    }
  }
  return Geometry::kNarrow;
}

}  // namespace

MoeWorkspace carve_workspace(const MoeShape& shape, int64_t tokens, std::byte* base) {
  const int64_t slots = tokens * shape.top_k;
  const int64_t max_tiles = std::min(slots, shape.experts + slots / kMinTileTokens + 1);
  MoeWorkspace work;
  work.capacity = round_up(slots + 7 * std::min(shape.experts, slots), 8);
  int64_t at = 0;
  auto take = [&at, base](int64_t bytes) {
    std::byte* p = base == nullptr ? nullptr : base + at;
    at += round_up(bytes, 1024);
    return p;
  };
  work.few = reinterpret_cast<FewCounters*>(take(kMoeZeroedBytes));
  work.counters = reinterpret_cast<int*>(take(kCounters * 4));
  work.tiles = reinterpret_cast<TokenTile*>(take(max_tiles * int64_t{sizeof(TokenTile)}));
  work.done = reinterpret_cast<int*>(take(max_tiles * 4));
  work.slot_of_row = reinterpret_cast<int*>(take(work.capacity * 4));
  work.row_of_slot = reinterpret_cast<int*>(take(slots * 4));
  work.unit_of_row = reinterpret_cast<int*>(take(work.capacity * 4));
  work.x = reinterpret_cast<uint8_t*>(take(chunks(shape.hidden) * work.capacity * kRowBytes));
  // Tokens of x are read in whole stages: the last one's reach into h.
  work.h = reinterpret_cast<uint8_t*>(take(chunks(shape.inter) * work.capacity * kRowBytes));
  work.shares = reinterpret_cast<uint16_t*>(take(slots * shape.hidden * 2));
  work.bytes = at;
  return work;
}

Result<void> moe_runs_on(const Gpu& gpu, const MoeShape& shape,
                         std::span<const MoeWeights> groups) {
  for (const MoeWeights& w : groups) {
    for (const ExpertMatrices* m : {&w.gate_up, &w.down}) {
      NIBBLE_TRY(const StreamKernel kernel, find_kernel(*m, Geometry::kSmall));
      if (gpu.has_bulk_copies() && static_cast<int64_t>(kernel.smem_bytes) > gpu.shared_bytes) {
        return Error(Code::kUnsupported,
                     cat("CUDA experts: ", kernel.smem_bytes, " bytes of shared memory a CTA are ",
                         "needed, the device has ", gpu.shared_bytes));
      }
    }
  }
  if (gpu.has_bulk_copies() || slice_tokens(shape, groups, gpu) > 0) return {};
  return Error(Code::kUnsupported,
               cat("CUDA experts on compute capability ", gpu.major, ".x with ", gpu.shared_bytes,
                   " bytes of shared memory a CTA: all experts of a layer ",
                   "must have one format, and a token of hidden ", shape.hidden,
                   " and intermediate ", shape.inter, " must fit"));
}

int64_t moe_workspace_bytes(const MoeShape& shape, int64_t max_tokens) {
  return carve_workspace(shape, max_tokens, nullptr).bytes;
}

namespace {

template <typename Args>
Result<void> launch(void (*kernel)(Args), int grid, int threads, int64_t smem_bytes,
                    const Args& args, cudaStream_t stream) {
  const cudaError_t e =
      launch_overlapped(kernel, grid, threads, static_cast<size_t>(smem_bytes), stream, args);
  if (e != cudaSuccess) return cuda_error("MoE kernel", e);
  return {};
}

Result<void> launch_products(const StreamKernel& kernel, const StreamArgs& args, const Gpu& gpu,
                             cudaStream_t stream) {
  return launch(kernel.kernel, gpu.processors * kernel.ctas_per_sm, kernel.threads,
                static_cast<int64_t>(kernel.smem_bytes), args, stream);
}
Result<void> launch_few(const FewChoice& few, const FewArgs& args, const Gpu& gpu,
                        cudaStream_t stream) {
  return launch(few.kernel.kernel, gpu.processors, kFewThreads, few.bytes, args, stream);
}

FewArgs few_args(const MoeShape& shape, const MoeWeights& weights, const MoeArgs& args,
                 const MoeWorkspace& work, const Gpu& gpu) {
  auto block_bytes = [](const ExpertMatrices& m, int64_t cols) {
    return static_cast<int>(row_block_bytes(m.format, m.scale_form, chunks(cols)));
  };
  return {.shape = shape,
          .weights = weights,
          .x = static_cast<const uint8_t*>(args.x),
          .ids = args.ids,
          .router_weights = args.weights,
          .add = args.add,
          .y = args.y,
          .h = work.h,
          .counters = work.few,
          .tokens = static_cast<int>(args.tokens),
          .slots = static_cast<int>(args.tokens * shape.top_k),
          .up_block_bytes = block_bytes(weights.gate_up, shape.hidden),
          .down_block_bytes = block_bytes(weights.down, shape.inter),
          .ctas = Divisor(gpu.processors),
          .expert_ups = Divisor(expert_ups(shape)),
          .x_units = Divisor(few_row_units(shape.hidden)),
          .h_units = Divisor(few_row_units(shape.inter))};
}

Result<void> launch_slices(const MoeShape& shape, std::span<const MoeWeights> groups,
                           const MoeArgs& args, const MoeWorkspace& work, const Gpu& gpu,
                           cudaStream_t stream) {
  const int64_t step = slice_tokens(shape, groups, gpu);
  if (step == 0) {
    return Error(Code::kInvalidArgument,
                 "MoE layer in slices: one group, packed alike, whose tokens fit is wanted");
  }
  for (int64_t first = 0; first < args.tokens; first += step) {
    MoeArgs slice = args;
    slice.tokens = std::min(step, args.tokens - first);
    slice.x = static_cast<const std::byte*>(args.x) + first * shape.hidden * 2;
    if (args.ids != nullptr) slice.ids += first * shape.top_k;
    if (args.weights != nullptr) slice.weights += first * shape.top_k;
    if (args.add != nullptr) slice.add += first * shape.hidden;
    slice.y += first * shape.hidden;
    const FewChoice few = choose_few(shape, groups, slice.tokens, gpu);
    NIBBLE_TRY(launch_few(few, few_args(shape, groups[0], slice, work, gpu), gpu, stream));
  }
  return {};
}

/// The products of every group, each in one launch or (gate_up and down packed differently) two.
Result<void> launch_groups(const MoeGroups& weights, StreamArgs args, Geometry geometry,
                           const Gpu& gpu, cudaStream_t stream) {
  for (size_t g = 0; g < weights.groups.size(); ++g) {
    const MoeWeights& w = weights.groups[g];
    args.weights = w;
    args.group = static_cast<int>(g);
    for (const bool down : {false, true}) {
      if (down && alike(w)) continue;
      NIBBLE_TRY(const StreamKernel kernel, find_kernel(down ? w.down : w.gate_up, geometry));
      args.products = alike(w) ? kRunGateUp | kRunDown : down ? kRunDown : kRunGateUp;
      args.next_item = 2 * args.group + (down ? 1 : 0);
      NIBBLE_TRY(launch_products(kernel, args, gpu, stream));
    }
  }
  return {};
}

}  // namespace

Result<void> moe_layer(const MoeShape& shape, const MoeGroups& weights, const MoeArgs& args,
                       void* workspace, cudaStream_t stream, Geometry geometry) {
  NIBBLE_TRY(check(shape, weights, args));
  NIBBLE_TRY(const Gpu gpu, current_gpu());
  const MoeWorkspace work = carve_workspace(shape, args.tokens, static_cast<std::byte*>(workspace));
  if (geometry == Geometry::kAuto || geometry == Geometry::kFew) {
    const FewChoice few = choose_few(shape, weights.groups, args.tokens, gpu);
    if (few.kernel.kernel != nullptr &&
        (geometry == Geometry::kFew || few_pays(shape, args.tokens, gpu))) {
      return launch_few(few, few_args(shape, weights.groups[0], args, work, gpu), gpu, stream);
    }
    if (geometry == Geometry::kFew) {
      return Error(Code::kInvalidArgument, "MoE layer: too many slots for this geometry");
    }
    NIBBLE_TRY(geometry, choose(shape, weights.groups, args.tokens, gpu));
  }
  if (geometry == Geometry::kSlices) {
    return launch_slices(shape, weights.groups, args, work, gpu, stream);
  }
  if (!gpu.has_bulk_copies()) {
    return Error(Code::kUnsupported, "MoE layer: this geometry needs compute capability 9.0");
  }
  if (!gpu.has_wgmma() && geometry == Geometry::kWide) geometry = Geometry::kNarrow;
  StreamArgs stream_args = {};
  stream_args.shape = shape;
  stream_args.work = work;
  stream_args.router_weights = args.weights;
  const bool sums = shape.top_k > 1;
  if (!sums) {  // the only share is the result
    stream_args.add = args.add;
    stream_args.y = args.y;
  }
  int tile_tokens = INT32_MAX;  // one list of token tiles serves all launches
  for (const MoeWeights& w : weights.groups) {
    for (const ExpertMatrices* m : {&w.gate_up, &w.down}) {
      NIBBLE_TRY(const StreamKernel kernel, find_kernel(*m, geometry));
      tile_tokens = std::min(tile_tokens, kernel.tile_tokens);
    }
  }
  cudaError_t e = launch_route(shape, weights, args, stream_args.work, tile_tokens,
                               geometry == Geometry::kWide, stream);
  if (e != cudaSuccess) return cuda_error("route kernel", e);
  NIBBLE_TRY(launch_groups(weights, stream_args, geometry, gpu, stream));
  if (sums) {
    e = launch_reduce(shape, args, stream_args.work, stream);
    if (e != cudaSuccess) return cuda_error("reduce kernel", e);
  }
  return {};
}

}  // namespace nibble::kernels::cuda
