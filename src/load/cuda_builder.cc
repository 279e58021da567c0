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
  for (const auto& [key, weight] : recipe_.weights()) {
    if (key.layer >= recipe_.config().layers) continue;
    total_ += weight.codes.bytes + weight.stored_scale_bytes();
  }
  NIBBLE_TRY(ring_, CudaRing::create(recipe_.index(), pool_, plan_.staging));
  NIBBLE_TRY(std::byte * flag_block, keep(kMaxFlags * int64_t{sizeof(int)}));
  flag_block_ = reinterpret_cast<int*>(flag_block);
  NIBBLE_TRY(
      cuda_ok(cudaMemsetAsync(flag_block_, 0, kMaxFlags * sizeof(int), stream()), "loading"));
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

int* CudaBuilder::flags(const std::string& name) {
  flag_names_.push_back(name);
  NIBBLE_CHECK(flag_names_.size() <= kMaxFlags, name);
  return flag_block_ + flag_names_.size() - 1;
}

Result<void> CudaBuilder::take_to(std::byte* to, int64_t bytes) {
  NIBBLE_TRY(const std::byte* staged, ring_->take());
  return cuda_ok(
      cudaMemcpyAsync(to, staged, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()),
      "loading");
}

void CudaBuilder::defer(std::function<Result<void>()> step) {
  ++declared_;
  steps_.push_back(std::move(step));
}

Result<void> CudaBuilder::place(int64_t count) {
  while (declared_ - static_cast<int64_t>(steps_.size()) < count) {
    const std::function<Result<void>()> step = std::move(steps_.front());
    steps_.pop_front();
    NIBBLE_TRY(step());
  }
  return {};
}

Result<void> CudaBuilder::settle() {
  NIBBLE_TRY(place(declared_));
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

void CudaBuilder::rows(const WeightKey& key, const Weight& weight, const void** out) {
  const int64_t bytes = weight.codes.bytes, slot = ring_->slot_bytes();
  for (int64_t at = 0; at < bytes; at += slot) {
    const int64_t part = std::min(slot, bytes - at);
    ring_->enqueue({{key, &weight, RingRead::Part::kCodes, at, part, 0}}, part);
  }
  defer([this, bytes, slot, out]() -> Result<void> {
    NIBBLE_TRY(std::byte * to, keep(bytes));
    for (int64_t at = 0; at < bytes; at += slot) {
      const int64_t part = std::min(slot, bytes - at);
      NIBBLE_TRY(take_to(to + at, part));
      count(part);
    }
    *out = to;
    return {};
  });
}

/// A matrix of a linear layer whose reads are enqueued: the whole scale plane, if it has one that
/// is not a factor of rows, then codes, as many rows at a time as a slot holds.
struct CudaBuilder::Matrix {
  const Weight* weight = nullptr;
  int64_t scale_bytes = 0;  // as staged
  int64_t scale_unit = 1;   // rows that share a row of scales
  int64_t scale_row = 0;    // staged bytes of it
  int64_t row_bytes = 0, step = 0;
};

Result<CudaBuilder::Matrix> CudaBuilder::enqueue(const WeightKey& key, const Weight& weight) {
  const formats::MatrixView& v = weight.meta;
  const bool blocks = v.format == FormatId::kFp8Block;
  Matrix m;
  m.weight = &weight;
  if (!scales_rows(v.format)) {
    m.scale_bytes = staged_scale_bytes(v);
    m.scale_unit = blocks ? 128 : 1;
    m.scale_row = blocks ? (v.cols + 127) / 128 * 4 : m.scale_bytes / v.rows;
  }
  m.row_bytes = formats::code_row_bytes(v.format, v.cols);
  m.step = ring_->slot_bytes() / m.row_bytes / 128 * 128;
  if (m.step == 0 || m.scale_bytes > ring_->slot_bytes()) {
    return Error(Code::kUnsupported,
                 cat(key_text(key), ": rows of ", m.row_bytes, " bytes and a scale plane of ",
                     m.scale_bytes, ", the loading slots hold ", ring_->slot_bytes()));
  }
  if (m.scale_bytes > 0) {
    ring_->enqueue({{key, &weight, staged_scale_part(v), 0, m.scale_bytes, 0}}, m.scale_bytes);
  }
  for (int64_t row = 0; row < v.rows; row += m.step) {
    const int64_t bytes = std::min(m.step, v.rows - row) * m.row_bytes;
    ring_->enqueue({{key, &weight, RingRead::Part::kCodes, row * m.row_bytes, bytes, 0}}, bytes);
  }
  return m;
}

// Into staging of their own; null for a matrix without.
Result<std::byte*> CudaBuilder::stage_scales(const Matrix& m) {
  if (m.scale_bytes == 0) return static_cast<std::byte*>(nullptr);
  NIBBLE_TRY(std::byte * to, scratch(kLinearScales, m.scale_bytes));
  NIBBLE_TRY(take_to(to, m.scale_bytes));
  count(m.weight->stored_scale_bytes());
  return to;
}

// One matrix of a stack, from its row `first_row` on.
Result<void> CudaBuilder::pack_rows(const Matrix& m, const LinearWeight& whole, int64_t first_row,
                                    std::byte* packed, int* bad) {
  NIBBLE_TRY(std::byte * scales, stage_scales(m));
  const int64_t rows = m.weight->meta.rows;
  for (int64_t row = 0; row < rows; row += m.step) {
    LinearPiece piece;
    piece.format = whole.format;
    piece.out = whole.out;
    piece.cols = whole.cols;
    piece.row_begin = first_row + row;
    piece.rows = std::min(m.step, rows - row);
    NIBBLE_TRY(std::byte * staged, ring_->take());
    piece.codes = reinterpret_cast<uint8_t*>(staged);
    if (scales != nullptr) {
      piece.scales = reinterpret_cast<uint8_t*>(scales + row / m.scale_unit * m.scale_row);
    }
    NIBBLE_TRY(kernels::cuda::pack_linear(piece, packed, bad, stream()));
    count(piece.rows * m.row_bytes);
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

Result<void> CudaBuilder::linear(std::vector<std::pair<WeightKey, const Weight*>> stack,
                                 const std::vector<WeightKey>& biases, LinearWeight* out) {
  std::vector<Matrix> matrices;
  out->format = stack[0].second->meta.format;
  out->cols = stack[0].second->meta.cols;
  for (const auto& [key, weight] : stack) {
    NIBBLE_TRY(Matrix matrix, enqueue(key, *weight));
    matrices.push_back(matrix);
    out->out += weight->meta.rows;
  }
  std::vector<float> factors, bias;
  for (const auto& [key, weight] : stack) NIBBLE_TRY(append_factors(key, *weight, factors));
  for (const WeightKey& key : biases) {
    const Weight* weight = recipe_.find(key);
    if (weight == nullptr) continue;
    NIBBLE_TRY(const std::vector<float> values, read_vector(*weight));
    bias.insert(bias.end(), values.begin(), values.end());
  }
  NIBBLE_CHECK(bias.empty() || static_cast<int64_t>(bias.size()) == out->out, bias.size());
  if (!factors.empty()) {
    NIBBLE_TRY(out->factor, constant(factors));
  }
  if (!bias.empty()) {
    NIBBLE_TRY(out->bias, constant(bias));
  }
  int* bad = flags(key_text(stack[0].first));
  defer([this, matrices = std::move(matrices), bad, out]() -> Result<void> {
    NIBBLE_TRY(std::byte * packed,
               keep(kernels::cuda::linear_packed_bytes(out->format, out->out, out->cols)));
    int64_t first_row = 0;
    for (const Matrix& matrix : matrices) {
      NIBBLE_TRY(pack_rows(matrix, *out, first_row, packed, bad));
      first_row += matrix.weight->meta.rows;
    }
    out->packed = packed;
    return {};
  });
  return {};
}

void CudaBuilder::count(int64_t source_bytes) {
  done_ += source_bytes;
  report(false);
}

LoadReport CudaBuilder::finish(int64_t resident) {
  report(true);
  LoadReport summary;
  summary.source_bytes = total_;
  summary.resident_bytes = resident;
  summary.scales = std::move(scales_);
  summary.staging_peak_bytes = ring_->host_bytes();
  summary.reading_seconds = ring_->reading_seconds();
  summary.seconds = progress_.seconds();
  return summary;
}

}  // namespace nibble::load
