#include "load/convert.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_writer.h"
#include "formats/element.h"
#include "formats/quantize.h"
#include "load/convert_config.h"
#include "load/convert_plan.h"
#include "load/convert_spell.h"
#include "load/side_files.h"

namespace nibble::load {
namespace {

using checkpoint::TensorInfo;
using formats::FormatId;
using formats::QuantizedMatrix;

constexpr std::array<std::pair<std::string_view, ConvertTarget>, 6> kTargetNames = {{
    {"keep", ConvertTarget::kKeep},
    {"bf16", ConvertTarget::kBf16},
    {"nvfp4", ConvertTarget::kNvfp4},
    {"mxfp4", ConvertTarget::kMxfp4},
    {"mxfp8", ConvertTarget::kMxfp8},
    {"nf3", ConvertTarget::kNf3},
}};
constexpr std::array<std::pair<std::string_view, ConvertDialect>, 3> kDialectNames = {{
    {"modelopt", ConvertDialect::kModelOpt},
    {"compressed-tensors", ConvertDialect::kCompressedTensors},
    {"hybrid", ConvertDialect::kHybrid},
}};

class Converter {
 public:
  Converter(const recipe::Recipe& recipe, const ConvertPlan& plan, std::string directory,
            const ConvertOptions& options, ThreadPool& pool,
            const std::function<void(const ConvertProgress&)>& progress)
      : recipe_(recipe),
        plan_(plan),
        writer_(directory, options.max_shard_bytes),
        directory_(std::move(directory)),
        pool_(pool),
        progress_(progress) {}

  Result<ConvertReport> run();

 private:
  Result<std::vector<std::byte>> read(const recipe::Plane& plane) const;
  Result<void> copy_tensor(const TensorInfo& tensor);
  Result<QuantizedMatrix> stored(const ConvertItem& item) const;
  Result<std::vector<float>> decoded(const ConvertItem& item) const;
  Result<void> convert_items(const std::vector<ConvertItem>& items);
  Result<std::optional<float>> shared_amax(const std::vector<ConvertItem>& items,
                                           const std::vector<std::vector<float>>& values);
  Result<QuantizedMatrix> quantized(const ConvertItem& item, const std::vector<float>& values,
                                    std::optional<float> amax) const;
  Result<void> write_item(const ConvertItem& item, QuantizedMatrix matrix);
  Result<void> write_configs();
  void advance(int64_t source_bytes);

  const recipe::Recipe& recipe_;
  const ConvertPlan& plan_;
  checkpoint::CheckpointWriter writer_;
  std::string directory_;
  ThreadPool& pool_;
  const std::function<void(const ConvertProgress&)>& progress_;
  ConvertReport report_;
  int64_t done_ = 0, moved_globals_ = 0;
};

Result<std::vector<std::byte>> Converter::read(const recipe::Plane& plane) const {
  std::vector<std::byte> bytes(static_cast<size_t>(plane.bytes));
  if (plane.tensor != nullptr) {
    NIBBLE_TRY(recipe_.index().read(*plane.tensor, plane.begin, bytes));
  }
  return bytes;
}

void Converter::advance(int64_t source_bytes) {
  done_ += source_bytes;
  if (progress_) progress_({done_, plan_.source_bytes});
}

Result<void> Converter::copy_tensor(const TensorInfo& tensor) {
  NIBBLE_TRY(std::vector<std::byte> bytes, read({&tensor, 0, tensor.bytes}));
  ConvertReport::Flow& flow = report_.flows[cat(formats::dtype_name(tensor.dtype), " copied")];
  ++flow.weights;
  flow.elems += checkpoint::element_count(tensor);
  flow.source_bytes += tensor.bytes;
  flow.written_bytes += tensor.bytes;
  NIBBLE_TRY(writer_.add(tensor.name, tensor.dtype, tensor.shape, std::move(bytes)));
  advance(tensor.bytes);
  return {};
}

Result<QuantizedMatrix> Converter::stored(const ConvertItem& item) const {
  QuantizedMatrix matrix;
  matrix.meta = item.weight->meta;
  NIBBLE_TRY(matrix.codes, read(item.weight->codes));
  NIBBLE_TRY(matrix.scales, read(item.weight->scales));
  return matrix;
}

Result<std::vector<float>> Converter::decoded(const ConvertItem& item) const {
  constexpr int64_t kRows = 16;  // of one task
  NIBBLE_TRY(const QuantizedMatrix matrix, stored(item));
  const formats::MatrixView view = matrix.view();
  std::vector<float> values(static_cast<size_t>(view.rows * view.cols));
  pool_.parallel_for((view.rows + kRows - 1) / kRows, [&](int64_t task, int) {
    const int64_t row = task * kRows;
    formats::decode_rows(view, row, std::min(kRows, view.rows - row),
                         values.data() + row * view.cols);
  });
  return values;
}

Result<std::optional<float>> Converter::shared_amax(const std::vector<ConvertItem>& items,
                                                    const std::vector<std::vector<float>>& values) {
  float amax = 0;
  bool any = false;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].same || items[i].target != FormatId::kNvfp4) continue;
    NIBBLE_TRY(const float own, formats::finite_amax(values[i], items[i].module, &pool_));
    amax = std::max(amax, own);
    any = true;
  }
  if (!any) return std::optional<float>();
  if (plan_.dialect == ConvertDialect::kCompressedTensors) {
    const float moved = amax_with_divisor(amax);
    if (moved != std::max(amax, 1e-8f)) ++moved_globals_;
    amax = moved;
  }
  return std::optional<float>(amax);
}

Result<QuantizedMatrix> Converter::quantized(const ConvertItem& item,
                                             const std::vector<float>& values,
                                             std::optional<float> amax) const {
  const int64_t rows = item.weight->meta.rows, cols = item.weight->meta.cols;
  using formats::MxRounding;
  switch (item.target) {
    case FormatId::kNvfp4:
      return formats::quantize_nvfp4(values, rows, cols, item.module, amax,
                                     formats::Nvfp4Profile::kDivide, &pool_);
    case FormatId::kMxfp4:
      return formats::quantize_mxfp4(values, rows, cols, item.module, MxRounding::kCeil, &pool_);
    case FormatId::kMxfp8:
      return formats::quantize_mxfp8(values, rows, cols, item.module, MxRounding::kCeil, &pool_);
    case FormatId::kNf3:
      return formats::quantize_nf3(values, rows, cols, item.module, kNf3BiasLog2, {}, &pool_);
    default: break;
  }
  NIBBLE_CHECK(item.target == FormatId::kBf16, static_cast<int>(item.target));
  NIBBLE_TRY(const float ignored, formats::finite_amax(values, item.module, &pool_));
  static_cast<void>(ignored);
  QuantizedMatrix matrix;
  matrix.meta.format = FormatId::kBf16;
  matrix.meta.rows = rows;
  matrix.meta.cols = cols;
  matrix.codes.resize(values.size() * sizeof(uint16_t));
  pool_.parallel_for(rows, [&](int64_t row, int) {
    for (int64_t i = row * cols; i < (row + 1) * cols; ++i) {
      const uint16_t bits = formats::encode_bf16(values[static_cast<size_t>(i)]);
      std::memcpy(matrix.codes.data() + static_cast<size_t>(i) * sizeof(bits), &bits, sizeof(bits));
    }
  });
  return matrix;
}

Result<void> Converter::write_item(const ConvertItem& item, QuantizedMatrix matrix) {
  std::optional<float> divisor;
  if (item.global_divisor != nullptr) {
    float value = 0;
    NIBBLE_TRY(recipe_.index().read(*item.global_divisor, 0,
                                    std::as_writable_bytes(std::span(&value, 1))));
    divisor = value;
  }
  const std::string_view target = formats::block_format(item.target).name;
  const std::string_view source = formats::block_format(item.weight->meta.format).name;
  ConvertReport::Flow& flow =
      report_.flows[item.same ? cat(target, " kept") : cat(source, " to ", target)];
  const int64_t source_bytes = item.weight->codes.bytes + item.weight->scales.bytes;
  ++flow.weights;
  flow.elems += item.weight->meta.rows * item.weight->meta.cols;
  flow.source_bytes += source_bytes;
  std::vector<SpelledTensor> tensors =
      spell(plan_.dialect, item.module, std::move(matrix), divisor);
  for (SpelledTensor& tensor : tensors) {
    flow.written_bytes += static_cast<int64_t>(tensor.bytes.size());
    NIBBLE_TRY(writer_.add(std::move(tensor.name), tensor.dtype, std::move(tensor.shape),
                           std::move(tensor.bytes)));
  }
  if (item.input_scale != nullptr) {
    const TensorInfo& scale = *item.input_scale;
    NIBBLE_TRY(std::vector<std::byte> bytes, read({&scale, 0, scale.bytes}));
    NIBBLE_TRY(writer_.add(scale.name, scale.dtype, scale.shape, std::move(bytes)));
  }
  advance(source_bytes);
  return {};
}

Result<void> Converter::convert_items(const std::vector<ConvertItem>& items) {
  std::vector<std::vector<float>> values(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].same) continue;
    NIBBLE_TRY(values[i], decoded(items[i]));
  }
  NIBBLE_TRY(const std::optional<float> amax, shared_amax(items, values));
  for (size_t i = 0; i < items.size(); ++i) {
    NIBBLE_TRY(QuantizedMatrix matrix,
               items[i].same ? stored(items[i]) : quantized(items[i], values[i], amax));
    values[i] = {};
    NIBBLE_TRY(write_item(items[i], std::move(matrix)));
  }
  return {};
}

Result<void> Converter::write_configs() {
  const std::string& source = recipe_.index().directory();
  if (plan_.verbatim) {
    for (const char* name : {"config.json", "hf_quant_config.json"}) {
      NIBBLE_TRY(copy_small_file(cat(source, "/", name), cat(directory_, "/", name)));
    }
    return {};
  }
  NIBBLE_TRY(const ConvertedConfig config, converted_config(recipe_.raw_config(), plan_));
  NIBBLE_TRY(write_file_atomic(directory_ + "/config.json", json_dump(config.config, 2) + "\n"));
  if (!config.hf_quant_config) return {};
  return write_file_atomic(directory_ + "/hf_quant_config.json",
                           json_dump(*config.hf_quant_config, 2) + "\n");
}

Result<ConvertReport> Converter::run() {
  const auto start = std::chrono::steady_clock::now();
  report_.notices = plan_.notices;
  for (const ConvertStep& step : plan_.steps) {
    if (step.copy != nullptr) NIBBLE_TRY(copy_tensor(*step.copy));
    NIBBLE_TRY(convert_items(step.items));
  }
  NIBBLE_TRY(writer_.finish());
  NIBBLE_TRY(copy_side_files(recipe_.index().directory(), directory_));
  NIBBLE_TRY(write_configs());
  if (moved_globals_ > 0) {
    report_.notices.push_back(cat(moved_globals_,
                                  " global scales were raised by a few units in the last place, to "
                                  "ones that compressed-tensors' divisor can express"));
  }
  if (!plan_.verbatim && !plan_.quantized.empty()) {
    report_.dialect = convert_dialect_name(plan_.dialect);
  }
  report_.source_bytes = plan_.source_bytes;
  report_.written_bytes = writer_.total_bytes();
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::move(report_);
}

}  // namespace

std::optional<ConvertTarget> convert_target_from_name(std::string_view name) {
  for (const auto& [text, target] : kTargetNames) {
    if (text == name) return target;
  }
  return std::nullopt;
}

std::optional<ConvertDialect> convert_dialect_from_name(std::string_view name) {
  for (const auto& [text, dialect] : kDialectNames) {
    if (text == name) return dialect;
  }
  return std::nullopt;
}

std::string_view convert_dialect_name(ConvertDialect dialect) {
  return kDialectNames[static_cast<size_t>(dialect)].first;
}

Result<ConvertReport> convert_checkpoint(
    const recipe::Recipe& recipe, const std::string& destination, const ConvertOptions& options,
    ThreadPool& pool, const std::function<void(const ConvertProgress&)>& progress) {
  for (const auto& [key, weight] : recipe.weights()) {
    if (weight.stored_csf()) {
      return Error(Code::kUnsupported, cat(recipe::key_text(key),
                                           " has compressed (csf) scales; write them plain first, "
                                           "with --scales plain"));
    }
  }
  NIBBLE_TRY(const ConvertPlan plan, plan_conversion(recipe, options));
  // Checked now, so that a config that cannot be written costs no conversion.
  if (!plan.verbatim) {
    NIBBLE_TRY(const ConvertedConfig config, converted_config(recipe.raw_config(), plan));
  }
  NIBBLE_TRY(StagedDirectory staged, StagedDirectory::create(destination));
  Converter converter(recipe, plan, staged.path(), options, pool, progress);
  NIBBLE_TRY(ConvertReport report, converter.run());
  NIBBLE_TRY(staged.commit());
  return report;
}

}  // namespace nibble::load
