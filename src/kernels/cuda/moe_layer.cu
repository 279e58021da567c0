#include <algorithm>

#include "kernels/cuda/launch.h"
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

Result<StreamKernel> find_kernel(FormatId format, Geometry geometry) {
  switch (format) {
    case FormatId::kNvfp4: return stream_kernel_nvfp4(geometry);
    case FormatId::kMxfp4: return stream_kernel_mxfp4(geometry);
    case FormatId::kMxfp8: return stream_kernel_mxfp8(geometry);
    case FormatId::kBf16: return stream_kernel_bf16(geometry);
    default:
      return Error(Code::kUnsupported,
                   cat("CUDA experts in format ", formats::block_format(format).name,
                       ": no kernel; nvfp4, mxfp4, mxfp8 and bf16 have one"));
  }
}

Result<void> check(const MoeShape& shape, const MoeWeights& weights, const MoeArgs& args) {
  const int64_t group = shape.format == FormatId::kBf16 ? 8 : group_cols(shape.format);
  if (shape.experts < 1 || shape.experts > 1024 || shape.top_k < 1 || shape.hidden < 1 ||
      shape.inter < 1 || shape.hidden % group != 0 || shape.inter % group != 0) {
    return Error(Code::kInvalidArgument,
                 cat("MoE shape: experts ", shape.experts, " (1..1024), top-k ", shape.top_k,
                     ", hidden ", shape.hidden, " and intermediate ", shape.inter,
                     " must be positive multiples of ", group));
  }
  if (args.tokens < 1 || args.tokens * shape.top_k > (int64_t{1} << 28)) {
    return Error(Code::kInvalidArgument, cat("MoE tokens: ", args.tokens));
  }
  const bool missing = args.x == nullptr || args.ids == nullptr || args.weights == nullptr ||
                       args.y == nullptr || weights.gate_up == nullptr || weights.down == nullptr ||
                       weights.gate_factor == nullptr || weights.up_factor == nullptr ||
                       weights.down_factor == nullptr;
  if (missing) return Error(Code::kInvalidArgument, "MoE layer: a required pointer is null");
  return {};
}

Geometry choose(const MoeShape& shape, int64_t tokens) {
  const double slots = static_cast<double>(tokens * shape.top_k);
  return slots / static_cast<double>(shape.experts) > kWideRows ? Geometry::kWide
                                                                : Geometry::kNarrow;
}

struct DeviceFacts {
  int processors = 0, major = 0;
};
Result<DeviceFacts> device_facts() {
  int device = 0;
  DeviceFacts facts;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return cuda_error("device", e);
  cudaError_t e = cudaDeviceGetAttribute(&facts.processors, cudaDevAttrMultiProcessorCount, device);
  if (e != cudaSuccess) return cuda_error("device", e);
  e = cudaDeviceGetAttribute(&facts.major, cudaDevAttrComputeCapabilityMajor, device);
  if (e != cudaSuccess) return cuda_error("device", e);
  if (facts.major < 9) {
    return Error(
        Code::kUnsupported,
        cat("the MoE kernels need compute capability 9.0 or later (bulk copies); this device has ",
            facts.major, ".x"));
  }
  return facts;
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
  work.counters = reinterpret_cast<int*>(take(8));
  work.tiles = reinterpret_cast<TokenTile*>(take(max_tiles * int64_t{sizeof(TokenTile)}));
  work.done = reinterpret_cast<int*>(take(max_tiles * 4));
  work.slot_of_row = reinterpret_cast<int*>(take(work.capacity * 4));
  work.row_of_slot = reinterpret_cast<int*>(take(slots * 4));
  work.x = reinterpret_cast<uint8_t*>(take(chunks(shape.hidden) * work.capacity * kRowBytes));
  work.h = reinterpret_cast<uint8_t*>(take(chunks(shape.inter) * work.capacity * kRowBytes));
  work.partial = reinterpret_cast<float*>(take(slots * shape.hidden * 4));
  work.bytes = at;
  return work;
}

int64_t moe_workspace_bytes(const MoeShape& shape, int64_t max_tokens) {
  return carve_workspace(shape, max_tokens, nullptr).bytes;
}

Result<void> moe_layer(const MoeShape& shape, const MoeWeights& weights, const MoeArgs& args,
                       void* workspace, cudaStream_t stream, Geometry geometry) {
  NIBBLE_TRY(check(shape, weights, args));
  NIBBLE_TRY(const DeviceFacts device, device_facts());
  if (geometry == Geometry::kAuto) geometry = choose(shape, args.tokens);
  if (device.major != 9) geometry = Geometry::kNarrow;  // wgmma is Hopper's alone
  NIBBLE_TRY(const StreamKernel kernel, find_kernel(shape.format, geometry));
  cudaError_t e = cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(kernel.smem_bytes));
  if (e != cudaSuccess) return cuda_error("shared memory of the MoE kernel", e);
  StreamArgs stream_args = {shape, weights,
                            carve_workspace(shape, args.tokens, static_cast<std::byte*>(workspace)),
                            args.weights};
  e = launch_route(shape, args, stream_args.work, kernel.tile_tokens, stream);
  if (e != cudaSuccess) return cuda_error("route kernel", e);
  e = launch_overlapped(kernel.kernel, device.processors * kernel.ctas_per_sm, kernel.threads,
                        kernel.smem_bytes, stream, stream_args);
  if (e != cudaSuccess) return cuda_error("MoE kernel", e);
  e = launch_reduce(shape, args, stream_args.work, stream);
  if (e != cudaSuccess) return cuda_error("reduce kernel", e);
  return {};
}

}  // namespace nibble::kernels::cuda
