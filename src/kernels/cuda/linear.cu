#include <algorithm>

#include "kernels/cuda/gpu.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_kernels.h"

namespace nibble::kernels::cuda {
namespace {

// The many-row kernel gives a CTA 64 weight rows and all of K. So matrices of few rows leave most
// of the GPU idle, and the few-row kernel reads their weights several times in less time. Measured
// on an H200: 5120 x 2048 and 2048 x 4096.
bool takes_few(int64_t rows, int64_t out) { return rows <= 16 || (rows <= 64 && chunks(out) < 64); }

// Most rows of the kernel that holds the weights; it counts on 227 KiB of shared memory a CTA.
constexpr int64_t kHeldRows = 16;
constexpr int64_t kAutoHeldRows = 8;  // it multiplies 8 rows at a time

constexpr int64_t kMaxSegments = 208;  // the few-row kernel's sums of 8 tokens fill shared memory
constexpr int64_t kMaxCount = int64_t{1} << 24;
constexpr int64_t kMaxStaged = int64_t{1} << 28;  // chunks of rows: 32 bits number their units

bool launchers_of(FormatId format, LinearLaunchers& found) {
  switch (format) {
    case FormatId::kBf16: found = linear_launchers_bf16(); return true;
    case FormatId::kNvfp4: found = linear_launchers_nvfp4(); return true;
    case FormatId::kMxfp4: found = linear_launchers_mxfp4(); return true;
    case FormatId::kMxfp8: found = linear_launchers_mxfp8(); return true;
    case FormatId::kFp8Block: found = linear_launchers_fp8_block(); return true;
    case FormatId::kFp8Channel:
    case FormatId::kFp8Tensor: found = linear_launchers_fp8_plain(); return true;
    default: return false;
  }
}

int64_t column_step(FormatId format) {
  switch (format) {
    case FormatId::kBf16: return 8;
    case FormatId::kMxfp4:
    case FormatId::kMxfp8: return 32;
    default: return 16;
  }
}

Error cuda_error(const char* what, cudaError_t error) {
  return Error(Code::kInternal, cat(what, ": ", cudaGetErrorString(error)));
}

int64_t padded_rows(int64_t rows) { return (rows + 7) / 8 * 8; }

Result<void> check(const LinearWeight& w, const LinearArgs& a, int64_t x_stride) {
  if (w.out < 1 || w.cols < 1 || w.out > kMaxCount || w.cols % column_step(w.format) != 0 ||
      chunks(w.cols) > kMaxSegments * kLinearSegmentChunks) {
    return Error(Code::kInvalidArgument,
                 cat("linear layer of ", w.out, " x ", w.cols, ": rows must be 1..", kMaxCount,
                     ", columns a multiple of ", column_step(w.format), " up to ",
                     kMaxSegments * kLinearSegmentChunks * kTileCols));
  }
  if (a.rows < 1 || a.rows > kMaxCount || padded_rows(a.rows) * chunks(w.cols) > kMaxStaged ||
      x_stride < w.cols || x_stride % 8 != 0) {
    return Error(Code::kInvalidArgument,
                 cat("linear layer: ", a.rows, " rows with a stride of ", x_stride, " for ", w.cols,
                     " columns; strides must be multiples of 8, rows times columns at most ",
                     kMaxStaged * kTileCols));
  }
  if (w.packed == nullptr || a.x == nullptr || a.y == nullptr) {
    return Error(Code::kInvalidArgument, "linear layer: a required pointer is null");
  }
  return {};
}

}  // namespace

int64_t linear_packed_bytes(FormatId format, int64_t out, int64_t cols) {
  LinearLaunchers unused;
  if (!launchers_of(format, unused)) return 0;
  int64_t bytes = linear_tiles_bytes(format, out, cols);
  if (format == FormatId::kFp8Block) bytes += chunks(out) * ((chunks(cols) + 1) / 2) * 4;
  return (bytes + 255) / 256 * 256;
}

int64_t linear_scratch_bytes(int64_t max_rows, int64_t max_cols) {
  return padded_rows(max_rows) * chunks(max_cols) * kRowBytes;
}

Result<void> linear(const LinearWeight& weight, const LinearArgs& args, void* scratch,
                    cudaStream_t stream, LinearPath path) {
  LinearLaunchers launchers;
  if (!launchers_of(weight.format, launchers)) {
    return Error(Code::kUnsupported, cat("CUDA linear layer in format ",
                                         formats::block_format(weight.format).name, ": no kernel"));
  }
  const int64_t x_stride = args.x_stride == 0 ? weight.cols : args.x_stride;
  NIBBLE_TRY(check(weight, args, x_stride));
  NIBBLE_TRY(const Gpu gpu, current_gpu());

  LinearKernelArgs k = {};
  k.packed = reinterpret_cast<const uint8_t*>(weight.packed);
  k.block_scales = reinterpret_cast<const float*>(
      k.packed + linear_tiles_bytes(weight.format, weight.out, weight.cols));
  k.factor = weight.factor;
  k.bias = weight.bias;
  k.x = static_cast<const uint8_t*>(args.x);
  k.x_stride = x_stride;
  k.y = args.y;
  k.y_stride = args.y_stride == 0 ? weight.out : args.y_stride;
  k.staged_x = static_cast<uint8_t*>(scratch);
  k.capacity = padded_rows(args.rows);
  k.rows = static_cast<int>(args.rows);
  k.out = static_cast<int>(weight.out);
  k.cols = static_cast<int>(weight.cols);
  k.chunk_count = static_cast<int>(chunks(weight.cols));
  k.segments = (k.chunk_count + kLinearSegmentChunks - 1) / kLinearSegmentChunks;
  k.accumulate = args.accumulate;
  k.vector_y = k.y_stride % 2 == 0 && reinterpret_cast<uintptr_t>(args.y) % 8 == 0;

  if (path == LinearPath::kAuto) {
    path = args.rows <= kAutoHeldRows         ? LinearPath::kHeld
           : takes_few(args.rows, weight.out) ? LinearPath::kFewRows
                                              : LinearPath::kManyRows;
  }
  if (path == LinearPath::kHeld &&
      (args.rows > kHeldRows || !gpu.has_large_shared() || launchers.held == nullptr ||
       !launchers.is_held(k, gpu.processors))) {
    path = LinearPath::kFewRows;
  }
  if (path == LinearPath::kManyRows && !gpu.has_wgmma()) path = LinearPath::kFewRows;
  if (path == LinearPath::kManyRows && scratch == nullptr) {
    return Error(Code::kInvalidArgument, "linear layer: many rows need scratch");
  }
  const LinearLauncher launch = path == LinearPath::kManyRows ? launchers.many
                                : path == LinearPath::kHeld   ? launchers.held
                                                              : launchers.few;
  const cudaError_t e = launch(k, gpu.processors, stream);
  if (e != cudaSuccess) return cuda_error("linear kernel", e);
  return {};
}

}  // namespace nibble::kernels::cuda
