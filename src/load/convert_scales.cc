#include "load/convert_scales.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <unordered_map>

#include "base/file.h"
#include "base/json.h"
#include "checkpoint/checkpoint_writer.h"
#include "codec/csf_inventory.h"
#include "load/scales_config.h"
#include "load/scales_group.h"
#include "load/side_files.h"

namespace nibble::load {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using codec::CsfPlane;
using formats::DType;
using recipe::Container;

constexpr std::string_view kMtpNotice =
    "experts outside the family's layers (MTP) and scales of another type stay plain";

class ScalesConverter {
 public:
  ScalesConverter(const Container& source, const std::vector<QuantizedModule>& modules,
                  const std::string& tensor_directory, const ConvertScalesOptions& options,
                  ThreadPool& pool, const std::function<void(const ConvertProgress&)>& progress)
      : source_(source),
        modules_(modules),
        writer_(tensor_directory, options.max_shard_bytes),
        max_shard_bytes_(options.max_shard_bytes),
        pool_(pool),
        progress_(progress) {}

  /// Every tensor, selected scales compressed.
  Result<void> compress(const ScalesSelection& selection, bool whole_module);
  /// Every tensor, stored streams decoded.
  Result<void> expand();

  ScalesReport report;
  std::set<std::string> compressed_modules;

 private:
  Result<void> copy(const TensorInfo& tensor);
  Result<void> add_stream(const std::string& scale, CsfPlane stream);
  Result<void> add_decoded(const QuantizedModule& module);
  DType scale_dtype(const QuantizedModule& module) const;
  void advance(int64_t bytes);
  Result<void> finish();

  const Container& source_;
  const std::vector<QuantizedModule>& modules_;
  checkpoint::CheckpointWriter writer_;
  int64_t max_shard_bytes_;
  ThreadPool& pool_;
  const std::function<void(const ConvertProgress&)>& progress_;
  int64_t done_ = 0;
};

void ScalesConverter::advance(int64_t bytes) {
  done_ += bytes;
  if (progress_) progress_({done_, source_.index.total_bytes()});
}

Result<void> ScalesConverter::copy(const TensorInfo& tensor) {
  std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
  NIBBLE_TRY(source_.index.read(tensor, 0, bytes));
  NIBBLE_TRY(writer_.add(tensor.name, tensor.dtype, tensor.shape, std::move(bytes)));
  ++report.tensors_copied;
  advance(tensor.bytes);
  return {};
}

Result<void> ScalesConverter::add_stream(const std::string& scale, CsfPlane stream) {
  const auto as_bytes = [](const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  // A manifest names one shard for both.
  if (writer_.buffered_bytes() + stream.view().stored_bytes() > max_shard_bytes_) {
    NIBBLE_TRY(writer_.flush_shard());
  }
  NIBBLE_TRY(writer_.add(
      codec::csf_fixed_name(stream.kind, scale), DType::kU8,
      {stream.rows / codec::kCsfSlabRows, codec::csf_slab_bytes(stream.kind, stream.cols)},
      as_bytes(stream.fixed)));
  NIBBLE_TRY(writer_.add(codec::csf_exceptions_name(stream.kind, scale), DType::kU32,
                         {static_cast<int64_t>(stream.exceptions.size())},
                         as_bytes(stream.exceptions)));
  ++report.planes_changed;
  advance(stream.rows * stream.cols);
  return {};
}

DType ScalesConverter::scale_dtype(const QuantizedModule& module) const {
  if (source_.manifest) return source_.manifest->scale_dtype;
  return module.kind() == codec::CsfKind::kNvfp4 ? DType::kF8E4M3 : DType::kU8;
}

Result<void> ScalesConverter::add_decoded(const QuantizedModule& module) {
  NIBBLE_TRY(std::vector<std::byte> plane, recipe::read_scale_plane(source_.index, module.weight));
  const recipe::PlaneShape shape = module.shape();
  NIBBLE_TRY(
      writer_.add(module.scale, scale_dtype(module), {shape.rows, shape.cols}, std::move(plane)));
  ++report.planes_changed;
  advance(module.weight.stored_scale_bytes());
  return {};
}

Result<void> ScalesConverter::finish() {
  NIBBLE_TRY(writer_.finish());
  report.source_bytes = source_.index.total_bytes();
  report.written_bytes = writer_.total_bytes();
  if (!source_.index.orphans().empty()) {
    report.notices.push_back(cat(source_.index.orphans().size(),
                                 " tensors that the source's index does not name were left out"));
  }
  return {};
}

Result<void> ScalesConverter::compress(const ScalesSelection& selection, bool whole_module) {
  std::unordered_map<std::string_view, const ScalesSelection::Module*> module_of;
  for (const ScalesSelection::Module& module : selection.modules) {
    for (const QuantizedModule* plane : module.planes) module_of.emplace(plane->scale, &module);
  }
  // Tensors come by name, so the scales of one module come together and one is held at a time.
  const ScalesSelection::Module* current = nullptr;
  EncodedModule encoded;
  for (const TensorInfo& tensor : source_.index.tensors()) {
    const auto found = module_of.find(tensor.name);
    if (found == module_of.end()) {
      NIBBLE_TRY(copy(tensor));
      continue;
    }
    if (found->second != current) {
      current = found->second;
      NIBBLE_TRY(encoded, encode_module(source_.index, *current, whole_module, pool_));
      if (!encoded.streams.empty()) compressed_modules.insert(current->name);
      for (const ScalesReport::Group& group : encoded.groups) report.groups.push_back(group);
    }
    const auto stream = encoded.streams.find(tensor.name);
    if (stream == encoded.streams.end()) {
      NIBBLE_TRY(copy(tensor));
    } else {
      NIBBLE_TRY(add_stream(tensor.name, std::move(stream->second)));
      encoded.streams.erase(stream);
    }
  }
  return finish();
}

Result<void> ScalesConverter::expand() {
  std::unordered_map<const TensorInfo*, const QuantizedModule*> streams;
  for (const QuantizedModule& module : modules_) {
    if (!module.weight.stored_csf()) continue;
    streams.emplace(module.weight.csf_fixed.tensor, &module);
    streams.emplace(module.weight.csf_exceptions.tensor, nullptr);  // goes with its partner
  }
  for (const TensorInfo& tensor : source_.index.tensors()) {
    const auto found = streams.find(&tensor);
    if (found == streams.end()) {
      NIBBLE_TRY(copy(tensor));
    } else if (found->second != nullptr) {
      NIBBLE_TRY(add_decoded(*found->second));
    }
  }
  return finish();
}

/// num_hidden_layers, 0 if the config does not say.
Result<int64_t> decoder_layers(const Json& config) {
  const Json* text = json_find(config, "text_config");
  return json_int(text != nullptr && text->is_object() ? *text : config, "num_hidden_layers", 0);
}

/// source_names of the finished shards in root/tensors.
Result<std::map<std::string, std::string>> source_names(codec::CsfKind kind,
                                                        const std::string& root) {
  NIBBLE_TRY(const CheckpointIndex index, CheckpointIndex::open(root + "/tensors"));
  std::map<std::string, std::string> out;
  for (const TensorInfo& tensor : index.tensors()) {
    const std::string source(recipe::csf_source_name(kind, tensor.name));
    const std::string& shard = index.shards()[static_cast<size_t>(tensor.shard)];
    const auto [entry, first] = out.emplace(source, shard);
    if (!first && entry->second != shard) {
      return Error(Code::kInvalidArgument,
                   cat("shard size: the two streams of '", source, "' do not fit into one shard"));
    }
  }
  return out;
}

struct Job {
  const Container& source;
  const std::vector<QuantizedModule>& modules;
  const ConvertScalesOptions& options;
  ThreadPool& pool;
  const std::function<void(const ConvertProgress&)>& progress;
};

Error nothing_shrinks(const ScalesReport& report) {
  std::string why = report.groups.empty() ? "" : report.groups.front().why_plain;
  return Error(Code::kUnsupported, cat("no scale plane can be compressed: ", why));
}

Result<ScalesReport> to_modelopt(const Job& job, const std::string& staged) {
  NIBBLE_TRY(const recipe::Quantization quant, job.source.quantization());
  if (quant.method() != recipe::QuantMethod::kModelOpt || job.source.manifest) {
    return Error(Code::kUnsupported,
                 "stored csf in ordinary shards is a ModelOpt form, and this is no ModelOpt "
                 "checkpoint; write one first, with --dialect modelopt");
  }
  NIBBLE_TRY(const ScalesSelection selection, select_modelopt(job.modules));
  ScalesConverter converter(job.source, job.modules, staged, job.options, job.pool, job.progress);
  NIBBLE_TRY(converter.compress(selection, /*whole_module=*/true));
  if (converter.compressed_modules.empty()) return nothing_shrinks(converter.report);
  NIBBLE_TRY(copy_side_files(job.source.files_directory, staged));
  NIBBLE_TRY(
      write_modelopt_csf_configs(job.source, job.modules, converter.compressed_modules, staged));
  converter.report.container = "modelopt";
  return std::move(converter.report);
}

Result<ScalesReport> to_manifest(const Job& job, const std::string& staged,
                                 const std::string& destination) {
  NIBBLE_TRY(const int64_t layers, decoder_layers(job.source.config));
  NIBBLE_TRY(const ScalesSelection selection,
             select_manifest(job.modules, job.options.family, layers));
  std::error_code code;
  std::filesystem::create_directory(staged + "/tensors", code);
  if (code) return Error(Code::kIo, cat("cannot create '", staged, "/tensors'"));
  ScalesConverter converter(job.source, job.modules, staged + "/tensors", job.options, job.pool,
                            job.progress);
  NIBBLE_TRY(converter.compress(selection, /*whole_module=*/false));
  if (converter.compressed_modules.empty()) return nothing_shrinks(converter.report);
  const recipe::CsfFamily& family = *recipe::find_csf_family(selection.family);
  recipe::CsfManifest facts;
  facts.kind = family.kind;
  facts.family = selection.family;
  facts.scale_dtype = selection.modules.front().planes.front()->weight.scales.tensor->dtype;
  NIBBLE_TRY(facts.source_names, source_names(facts.kind, staged));
  std::string final_root = std::filesystem::absolute(destination, code).lexically_normal().string();
  while (final_root.size() > 1 && final_root.back() == '/') final_root.pop_back();
  if (code) return Error(Code::kIo, cat("cannot resolve '", destination, "': ", code.message()));
  NIBBLE_TRY(write_manifest_files(job.source, facts, staged, final_root));
  const auto selected = std::count_if(job.modules.begin(), job.modules.end(),
                                      [](const auto& m) { return m.fp4() && m.kind(); });
  int64_t taken = 0;
  for (const ScalesSelection::Module& module : selection.modules) {
    taken += static_cast<int64_t>(module.planes.size());
  }
  if (taken < selected) {
    converter.report.notices.push_back(
        cat(selected - taken, " FP4 matrices are not of the family's experts: ", kMtpNotice));
  }
  converter.report.container = "manifest " + selection.family;
  return std::move(converter.report);
}

Result<ScalesReport> to_plain(const Job& job, const std::string& staged) {
  ScalesConverter converter(job.source, job.modules, staged, job.options, job.pool, job.progress);
  NIBBLE_TRY(converter.expand());
  const bool own_files =
      job.source.manifest.has_value() && directory_exists(job.source.manifest->root + "/metadata");
  NIBBLE_TRY(copy_side_files(
      own_files ? job.source.manifest->root + "/metadata" : job.source.files_directory, staged));
  NIBBLE_TRY(const std::string notice, write_plain_configs(job.source, staged));
  if (!notice.empty()) converter.report.notices.push_back(notice);
  converter.report.container = "plain";
  return std::move(converter.report);
}

ScalesContainer default_container(const std::vector<QuantizedModule>& modules) {
  const bool nvfp4 = std::any_of(modules.begin(), modules.end(), [](const QuantizedModule& m) {
    return m.weight.meta.format == formats::FormatId::kNvfp4;
  });
  return nvfp4 ? ScalesContainer::kModelOpt : ScalesContainer::kManifest;
}

}  // namespace

Result<ScalesReport> convert_scales(const std::string& source, const std::string& destination,
                                    const ConvertScalesOptions& options, ThreadPool& pool,
                                    const std::function<void(const ConvertProgress&)>& progress) {
  const auto start = std::chrono::steady_clock::now();
  if (options.max_shard_bytes < 1) {
    return Error(Code::kInvalidArgument, cat("shard size ", options.max_shard_bytes));
  }
  NIBBLE_TRY(const Container container, recipe::open_container(source));
  NIBBLE_TRY(const std::vector<QuantizedModule> modules, quantized_modules(container));
  const bool any_csf = std::any_of(modules.begin(), modules.end(),
                                   [](const QuantizedModule& m) { return m.weight.stored_csf(); });
  const bool to_csf = options.form == ScalesForm::kCsf;
  if (any_csf == to_csf) {
    return Error(Code::kInvalidArgument,
                 cat("'", source, "' ", any_csf ? "already stores" : "does not store",
                     " compressed (csf) scales"));
  }
  NIBBLE_TRY(StagedDirectory staged, StagedDirectory::create(destination));
  const Job job{container, modules, options, pool, progress};
  const ScalesContainer form = options.container.value_or(default_container(modules));
  Result<ScalesReport> report = !to_csf ? to_plain(job, staged.path())
                                : form == ScalesContainer::kModelOpt
                                    ? to_modelopt(job, staged.path())
                                    : to_manifest(job, staged.path(), destination);
  if (!report) return report;
  NIBBLE_TRY(staged.commit());
  report->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace nibble::load
