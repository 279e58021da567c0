#include "load/cuda_builder.h"

#include <algorithm>
#include <cstring>

#include "device/cuda.h"
#include "kernels/cuda/packing.h"

namespace nibble::load {

using formats::FormatId;
using kernels::cuda::LinearPiece;
using kernels::cuda::LinearWeight;
using recipe::Weight;
using recipe::WeightKey;

namespace {

constexpr int64_t kBlockBytes = 4 << 20;
constexpr size_t kMaxFlags = 1 << 16;
int64_t round256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// Formats whose scales belong to whole rows.
bool scales_rows(FormatId format) {
  return format == FormatId::kFp8Channel || format == FormatId::kFp8Tensor;
}

}  // namespace

Result<void> CudaBuilder::open() {
  const recipe::ModelConfig& config = recipe_.config();
  int64_t slot = plan::kCudaSlotBytes;
  for (const auto& [key, weight] : recipe_.weights()) {
    if (key.layer >= config.layers) continue;
    total_ += weight.codes.bytes + weight.stored_scale_bytes();
    // One expert's codes of two matrices, or 64 rows of any matrix, must fit.
    const int64_t whole = weight.codes.bytes + formats::scale_plane_bytes(weight.meta);
    if (key.expert >= 0) slot = std::max(slot, 2 * whole + 4096);
  }
  NIBBLE_TRY(ring_, CudaRing::create(recipe_.index(), pool_, slot, plan::kCudaSlots));
  return {};
}

Result<std::byte*> CudaBuilder::keep(int64_t bytes) {
  NIBBLE_TRY(device::Memory memory, device::cuda_memory(round256(bytes)));
  std::byte* data = memory.data();
  weights->memory.push_back(std::move(memory));
  weights->bytes += bytes;
  return data;
}

Result<std::byte*> CudaBuilder::small(const void* data, int64_t bytes) {
  const int64_t need = round256(bytes);
  if (constants_.empty() ||
      constants_.back().used + need > static_cast<int64_t>(constants_.back().host.size())) {
    const int64_t size = std::max(kBlockBytes, need);
    NIBBLE_TRY(std::byte * device, keep(size));
    constants_.push_back({device, std::vector<std::byte>(static_cast<size_t>(size)), 0});
  }
  Block& block = constants_.back();
  std::memcpy(block.host.data() + block.used, data, static_cast<size_t>(bytes));
  std::byte* to = block.device + block.used;
  block.used += need;
  return to;
}

Result<void> CudaBuilder::upload_constants() {
  for (const Block& block : constants_) {
    NIBBLE_TRY(cuda_ok(cudaMemcpy(block.device, block.host.data(), static_cast<size_t>(block.used),
                                  cudaMemcpyHostToDevice),
                       "constants"));
  }
  constants_.clear();
  return {};
}

Result<std::byte*> CudaBuilder::scratch(int which, int64_t bytes) {
  device::Memory& memory = scratch_[which];
  if (static_cast<int64_t>(memory.bytes().size()) < bytes) {
    NIBBLE_TRY(ring_->finish());  // nobody reads the old one any more
    memory = device::Memory();
    NIBBLE_TRY(memory, device::cuda_memory(bytes));
  }
  return memory.data();
}

Result<int*> CudaBuilder::flags(const std::string& name) {
  if (flag_block_ == nullptr) {
    NIBBLE_TRY(std::byte * block, keep(kMaxFlags * int64_t{sizeof(int)}));
    NIBBLE_TRY(cuda_ok(cudaMemset(block, 0, kMaxFlags * sizeof(int)), "loading"));
    NIBBLE_TRY(cuda_ok(cudaDeviceSynchronize(), "loading"));
    flag_block_ = reinterpret_cast<int*>(block);
  }
  flag_names_.push_back(name);
  NIBBLE_CHECK(flag_names_.size() <= kMaxFlags, name);
  return flag_block_ + flag_names_.size() - 1;
}

Result<void> CudaBuilder::settle() {
  NIBBLE_CHECK(ring_->idle());
  NIBBLE_TRY(ring_->finish());
  NIBBLE_TRY(upload_constants());
  std::vector<int> values(flag_names_.size());
  NIBBLE_TRY(cuda_ok(
      cudaMemcpy(values.data(), flag_block_, values.size() * sizeof(int), cudaMemcpyDeviceToHost),
      "loading"));
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] & kernels::cuda::kPackNan) {
      return Error(Code::kCorruptInput, cat(flag_names_[i], ": a NaN code or scale"));
    }
    if (values[i] & kernels::cuda::kPackTooLarge) {
      return Error(Code::kUnsupported,
                   cat(flag_names_[i],
                       ": an E8M0 scale above 2^1 (MXFP4) or 2^7 (MXFP8); the CUDA "
                       "kernels take smaller ones, the CPU all"));
    }
  }
  return {};
}

Result<std::vector<float>> CudaBuilder::read_vector(const Weight& weight) {
  std::vector<std::byte> bytes(static_cast<size_t>(weight.codes.bytes));
  NIBBLE_TRY(recipe_.index().read(*weight.codes.tensor, weight.codes.begin, bytes));
  formats::MatrixView view = weight.meta;
  view.codes = bytes.data();
  std::vector<float> values(static_cast<size_t>(view.rows * view.cols));
  formats::decode_rows(view, 0, view.rows, values.data());
  count(weight.codes.bytes);
  return values;
}

Result<const float*> CudaBuilder::vector(const WeightKey& key) {
  const Weight* weight = recipe_.find(key);
  if (weight == nullptr) return static_cast<const float*>(nullptr);
  NIBBLE_TRY(const std::vector<float> values, read_vector(*weight));
  return constant(values);
}

Result<const std::byte*> CudaBuilder::rows(const WeightKey& key, const Weight& weight) {
  const int64_t bytes = weight.codes.bytes;
  const auto part_at = [&](int64_t at) { return std::min(ring_->slot_bytes(), bytes - at); };
  for (int64_t at = 0; at < bytes; at += ring_->slot_bytes()) {
    ring_->enqueue({{key, &weight, RingRead::Part::kCodes, at, part_at(at), 0}}, part_at(at));
  }
  NIBBLE_TRY(std::byte * to, keep(bytes));
  for (int64_t at = 0; at < bytes; at += ring_->slot_bytes()) {
    const int64_t part = part_at(at);
    NIBBLE_TRY(std::byte * staged, ring_->take());
    NIBBLE_TRY(cuda_ok(cudaMemcpyAsync(to + at, staged, static_cast<size_t>(part),
                                       cudaMemcpyDeviceToDevice, stream()),
                       "loading"));
    count(part);
  }
  return to;
}

// The whole scale plane of a matrix, into staging of its own; null for formats without one, and for
// those whose scales are factors of rows.
Result<std::byte*> CudaBuilder::stage_linear_scales(const WeightKey& key, const Weight& weight) {
  const formats::MatrixView& v = weight.meta;
  const int64_t plane = formats::scale_plane_bytes(v);
  if (plane == 0 || scales_rows(v.format)) return static_cast<std::byte*>(nullptr);
  const bool wide = v.format == FormatId::kFp8Block;
  const int64_t bytes = wide ? plane / formats::scale_bytes(v.scale_kind) * 4 : plane;
  if (bytes > ring_->slot_bytes()) {
    return Error(Code::kUnsupported, cat(key_text(key), ": a scale plane of ", bytes, " bytes"));
  }
  NIBBLE_TRY(std::byte * to, scratch(0, bytes));
  const auto part = wide ? RingRead::Part::kScalesF32 : RingRead::Part::kScales;
  NIBBLE_TRY(std::byte * staged, ring_->fill({{key, &weight, part, 0, bytes, 0}}, bytes));
  NIBBLE_TRY(cuda_ok(
      cudaMemcpyAsync(to, staged, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()),
      "loading"));
  count(weight.stored_scale_bytes());
  return to;
}

// One matrix of a stack, from its row `first_row` on: scales first, then codes, as many rows at a
// time as a slot holds.
Result<void> CudaBuilder::pack_rows(const WeightKey& key, const Weight& weight,
                                    const LinearWeight& whole, int64_t first_row, std::byte* packed,
                                    int* bad) {
  const formats::MatrixView& v = weight.meta;
  const bool blocks = v.format == FormatId::kFp8Block;
  NIBBLE_TRY(std::byte * scales, stage_linear_scales(key, weight));
  const int64_t scale_unit = blocks ? 128 : 1;  // rows that share a row of scales
  const int64_t scale_row =                     // staged bytes of it
      blocks ? (v.cols + 127) / 128 * 4 : formats::scale_plane_bytes(v) / v.rows;
  const int64_t row_bytes = formats::code_row_bytes(v.format, v.cols);
  const int64_t step = ring_->slot_bytes() / row_bytes / 128 * 128;
  NIBBLE_CHECK(step > 0, "rows of ", row_bytes, " bytes in slots of ", ring_->slot_bytes());
  for (int64_t row = 0; row < v.rows; row += step) {
    const int64_t bytes = std::min(step, v.rows - row) * row_bytes;
    ring_->enqueue({{key, &weight, RingRead::Part::kCodes, row * row_bytes, bytes, 0}}, bytes);
  }
  for (int64_t row = 0; row < v.rows; row += step) {
    LinearPiece piece;
    piece.format = whole.format;
    piece.out = whole.out;
    piece.cols = whole.cols;
    piece.row_begin = first_row + row;
    piece.rows = std::min(step, v.rows - row);
    NIBBLE_TRY(std::byte * staged, ring_->take());
    piece.codes = reinterpret_cast<uint8_t*>(staged);
    if (scales != nullptr) {
      piece.scales = reinterpret_cast<uint8_t*>(scales + row / scale_unit * scale_row);
    }
    NIBBLE_TRY(kernels::cuda::pack_linear(piece, packed, bad, stream()));
    count(piece.rows * row_bytes);
  }
  return {};
}

// What each row's sum is multiplied with, appended; nothing for formats where it is 1.
Result<void> CudaBuilder::append_factors(const WeightKey& key, const Weight& weight,
                                         std::vector<float>& factors) {
  const formats::MatrixView& v = weight.meta;
  if (v.format == FormatId::kNvfp4) {
    factors.insert(factors.end(), static_cast<size_t>(v.rows),
                   v.global * kernels::cuda::register_unit(v.format));
  }
  if (!scales_rows(v.format)) return {};
  std::vector<std::byte> bytes(static_cast<size_t>(formats::scale_plane_bytes(v)));
  NIBBLE_TRY(recipe_.index().read(*weight.scales.tensor, weight.scales.begin, bytes));
  NIBBLE_TRY(recipe::check_scales(key, weight, bytes));
  for (int64_t r = 0; r < v.rows; ++r) {
    const int64_t index = v.format == FormatId::kFp8Tensor ? 0 : r;
    factors.push_back(formats::scale_value(v.scale_kind, bytes.data(), index));
  }
  count(weight.stored_scale_bytes());
  return {};
}

Result<LinearWeight> CudaBuilder::linear(
    const std::vector<std::pair<WeightKey, const Weight*>>& stack,
    const std::vector<WeightKey>& biases) {
  LinearWeight out;
  out.format = stack[0].second->meta.format;
  out.cols = stack[0].second->meta.cols;
  for (const auto& [key, weight] : stack) out.out += weight->meta.rows;
  NIBBLE_TRY(std::byte * packed,
             keep(kernels::cuda::linear_packed_bytes(out.format, out.out, out.cols)));
  NIBBLE_TRY(int* bad, flags(key_text(stack[0].first)));
  std::vector<float> factors, bias;
  int64_t first_row = 0;
  for (const auto& [key, weight] : stack) {
    NIBBLE_TRY(pack_rows(key, *weight, out, first_row, packed, bad));
    NIBBLE_TRY(append_factors(key, *weight, factors));
    first_row += weight->meta.rows;
  }
  for (const WeightKey& key : biases) {
    const Weight* weight = recipe_.find(key);
    if (weight == nullptr) continue;
    NIBBLE_TRY(const std::vector<float> values, read_vector(*weight));
    bias.insert(bias.end(), values.begin(), values.end());
  }
  NIBBLE_CHECK(bias.empty() || static_cast<int64_t>(bias.size()) == out.out, bias.size());
  out.packed = packed;
  if (!factors.empty()) {
    NIBBLE_TRY(out.factor, constant(factors));
  }
  if (!bias.empty()) {
    NIBBLE_TRY(out.bias, constant(bias));
  }
  return out;
}

void CudaBuilder::count(int64_t source_bytes) {
  done_ += source_bytes;
  report(false);
}

void CudaBuilder::report(bool last) {
  if (!progress_) return;
  const auto now = std::chrono::steady_clock::now();
  if (!last && now - reported_ < std::chrono::milliseconds(100)) return;
  reported_ = now;
  progress_({done_, total_, std::chrono::duration<double>(now - start_).count()});
}

LoadReport CudaBuilder::finish(int64_t resident) {
  report(true);
  LoadReport summary;
  summary.source_bytes = total_;
  summary.resident_bytes = resident;
  summary.scales = std::move(scales_);
  summary.staging_peak_bytes = plan::kCudaSlots * ring_->slot_bytes();
  summary.reading_seconds = ring_->reading_seconds();
  summary.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return summary;
}

}  // namespace nibble::load
