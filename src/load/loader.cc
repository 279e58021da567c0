#include "load/loader.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "formats/element.h"
#include "recipe/scale_plane.h"

namespace nibble::load {

using recipe::Weight;
using recipe::WeightKey;

/// Fills a WeightStore layer by layer; nobody sees the store before it is complete.
class StoreBuilder {
 public:
  StoreBuilder(const recipe::Recipe& recipe, const plan::PrecisionPlan& plan, ThreadPool& pool,
               const std::function<void(const LoadProgress&)>& progress)
      : recipe_(recipe), plan_(plan), pool_(pool), progress_(progress) {}

  Result<LoadedWeights> run();

 private:
  struct Task {  // one chunk of one weight
    const WeightKey* key;
    const Weight* weight;
    const plan::PlannedWeight* planned;
    int64_t row_begin, rows;
    std::byte* codes;   // resident planes of the whole weight
    std::byte* scales;  // null: none, or compressed already
    float* vector;      // or null
  };
  struct Candidate {  // a matrix whose scales may be compressed
    WeightKey key;
    codec::CsfTiles tiles;
  };
  using Compressed = std::map<WeightKey, const codec::CsfTiles*>;

  Result<void> load_layer(const std::vector<WeightKey>& keys);
  Result<Compressed> compress_scales(const std::vector<WeightKey>& keys);
  Result<void> encode(Candidate& candidate);
  Result<void> for_each(int64_t count, const std::function<Result<void>(int64_t, int)>& body);
  Result<void> reserve();
  std::vector<Task> place_layer(const std::vector<WeightKey>& keys, const Compressed& compressed);
  tensor::TensorRef& place_matrix(const WeightKey& key, const Compressed& compressed,
                                  std::byte* codes, std::byte* scales);
  Result<void> run_task(const Task& task, int worker);
  Result<void> load_vector(const Task& task);
  std::span<std::byte> buffer(int worker, int64_t bytes);
  void place_rows(const Task& task, std::span<const std::byte> codes,
                  const std::vector<std::byte>& scales);
  Result<void> place_tiles(const Task& task, std::span<const std::byte> codes,
                           const std::vector<std::byte>& scales);
  void report(bool last) { progress_.report(done_.load(), total_, last); }

  void stage(int64_t bytes) {
    const int64_t now = staged_.fetch_add(bytes) + bytes;
    int64_t peak = staged_peak_.load();
    while (now > peak && !staged_peak_.compare_exchange_weak(peak, now)) {
    }
  }

  const recipe::Recipe& recipe_;
  const plan::PrecisionPlan& plan_;
  ThreadPool& pool_;
  ProgressMeter progress_;
  std::shared_ptr<WeightStore> store_ = std::make_shared<WeightStore>();
  std::atomic<int64_t> staged_{0}, staged_peak_{0}, done_{0};
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    int64_t bytes = 0;
  };
  std::vector<Buffer> buffers_{static_cast<size_t>(pool_.threads())};
  std::byte* next_plane_ = nullptr;
  int64_t total_ = 0;
  std::vector<ScaleReport> scales_;
};

namespace {

int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Bytes of scales that rows [0, rows) of this weight own, for formats whose scale rows follow rows.
int64_t scale_bytes_of_rows(const formats::MatrixView& meta, int64_t rows) {
  formats::MatrixView part = meta;
  part.rows = rows;
  return formats::scale_plane_bytes(part);
}

}  // namespace

Result<void> StoreBuilder::load_vector(const Task& task) {
  const recipe::Plane& plane = task.weight->codes;
  std::vector<std::byte> bytes(static_cast<size_t>(plane.bytes));
  NIBBLE_TRY(recipe_.index().read(*plane.tensor, plane.begin, bytes));
  formats::MatrixView view = task.weight->meta;
  view.codes = bytes.data();
  formats::decode_rows(view, 0, view.rows, task.vector);
  done_ += plane.bytes;
  return {};
}

void StoreBuilder::place_rows(const Task& task, std::span<const std::byte> codes,
                              const std::vector<std::byte>& scales) {
  const int64_t row_bytes =
      formats::code_row_bytes(task.weight->meta.format, task.weight->meta.cols);
  std::memcpy(task.codes + task.row_begin * row_bytes, codes.data(), codes.size());
  if (task.row_begin == 0 && !scales.empty()) {
    std::memcpy(task.scales, scales.data(), scales.size());
  }
}

// Tiles of a chunk are contiguous in both resident planes, so a chunk is repacked as a matrix of
// its own: rows [row_begin, row_begin + rows), row_begin a multiple of 16.
Result<void> StoreBuilder::place_tiles(const Task& task, std::span<const std::byte> codes,
                                       const std::vector<std::byte>& scales) {
  formats::MatrixView before = task.weight->meta;
  before.rows = task.row_begin;
  formats::MatrixView part = task.weight->meta;
  part.rows = task.rows;
  part.codes = codes.data();
  part.scales = scales.empty() ? nullptr : scales.data();
  if (part.scales == nullptr) {
    // Plain formats, or scales that are compressed already.
  } else if (part.format == formats::FormatId::kFp8Block) {
    const int64_t first = part.origin_row + task.row_begin;
    const int64_t block_row = first / part.block_rows;
    part.origin_row = first % part.block_rows;
    const int64_t blocks = (part.origin_col + part.cols + part.block_cols - 1) / part.block_cols;
    part.scales += block_row * blocks * formats::scale_bytes(part.scale_kind);
  } else if (task.row_begin > 0) {
    part.scales += scale_bytes_of_rows(task.weight->meta, task.row_begin);
  }
  const kernels::TiledBytes offset =
      task.row_begin == 0 ? kernels::TiledBytes{} : kernels::tile16_bytes(before);
  const kernels::TiledBytes size = kernels::tile16_bytes(part);
  std::span<std::byte> to_scales;
  if (task.scales != nullptr) {
    to_scales = {task.scales + offset.scales, static_cast<size_t>(size.scales)};
  }
  const Result<tensor::TensorRef> tiled = kernels::repack_tile16(
      part, {task.codes + offset.codes, static_cast<size_t>(size.codes)}, to_scales);
  if (!tiled) return tiled.error().with_context(key_text(*task.key));
  return {};
}

// Room for `bytes` of codes that belongs to this worker until the load ends: a fresh buffer for
// every chunk would cost more in page faults than the read itself.
std::span<std::byte> StoreBuilder::buffer(int worker, int64_t bytes) {
  Buffer& own = buffers_[static_cast<size_t>(worker)];
  if (own.bytes < bytes) {
    stage(bytes - own.bytes);
    own.data.reset();
    own.data = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
    own.bytes = bytes;
  }
  return {own.data.get(), static_cast<size_t>(bytes)};
}

Result<void> StoreBuilder::run_task(const Task& task, int worker) {
  if (task.vector != nullptr) return load_vector(task);
  const Weight& weight = *task.weight;
  const int64_t row_bytes = formats::code_row_bytes(weight.meta.format, weight.meta.cols);
  const int64_t code_bytes = task.rows * row_bytes;
  const int64_t scale_bytes = task.scales != nullptr ? formats::scale_plane_bytes(weight.meta) : 0;
  stage(scale_bytes);
  std::vector<std::byte> scales;
  if (task.scales != nullptr) {
    NIBBLE_TRY(scales, recipe::read_scale_plane(recipe_.index(), weight));
    if (task.row_begin == 0) NIBBLE_TRY(recipe::check_scales(*task.key, weight, scales));
  }
  const std::span<std::byte> codes = buffer(worker, code_bytes);
  NIBBLE_TRY(recipe_.index().read(*weight.codes.tensor,
                                  weight.codes.begin + task.row_begin * row_bytes, codes));
  if (task.planned->layout == tensor::Layout::kRows) {
    place_rows(task, codes, scales);
  } else {
    NIBBLE_TRY(place_tiles(task, codes, scales));
  }
  staged_ -= scale_bytes;
  done_ += code_bytes + (task.row_begin == 0 ? scale_bytes : 0);
  return {};
}

// Runs body(0..count) on the pool; the error is that of the first failing index: the same every
// run.
Result<void> StoreBuilder::for_each(int64_t count,
                                    const std::function<Result<void>(int64_t, int)>& body) {
  return pool_.try_parallel_for(count, [&](int64_t i, int worker) {
    Result<void> done = body(i, worker);
    if (worker == 0) report(false);
    return done;
  });
}

Result<void> StoreBuilder::encode(Candidate& candidate) {
  const int64_t bytes =
      formats::scale_plane_bytes(plan::source_weight(recipe_, candidate.key).meta);
  stage(bytes);
  NIBBLE_TRY(candidate.tiles, encode_scales(recipe_, candidate.key));
  staged_ -= bytes;
  done_ += bytes;
  return {};
}

// Encodes the scales of this layer's candidates; a projection whose streams would not be smaller
// than its planes keeps them plain. What is kept moves into the store.
Result<StoreBuilder::Compressed> StoreBuilder::compress_scales(const std::vector<WeightKey>& keys) {
  std::vector<Candidate> candidates;
  for (const WeightKey& key : keys) {
    if (plan_.weights.at(key).may_compress) candidates.push_back({key, {}});
  }
  NIBBLE_TRY(for_each(static_cast<int64_t>(candidates.size()),
                      [&](int64_t i, int) { return encode(candidates[static_cast<size_t>(i)]); }));
  std::map<recipe::Role, ScaleReport> projections;
  for (const Candidate& c : candidates) {
    ScaleReport& report = projections[c.key.role];
    report.layer = c.key.layer;
    report.role = c.key.role;
    report.add(plan_.weights.at(c.key), c.tiles);
  }
  Compressed kept;
  for (Candidate& c : candidates) {
    if (!projections.at(c.key.role).compressed()) {
      done_ -= formats::scale_plane_bytes(plan::source_weight(recipe_, c.key).meta);
      continue;
    }
    store_->csf_.push_back(std::move(c.tiles));
    kept[c.key] = &store_->csf_.back();
  }
  for (const auto& [role, report] : projections) scales_.push_back(report);
  return kept;
}

tensor::TensorRef& StoreBuilder::place_matrix(const WeightKey& key, const Compressed& compressed,
                                              std::byte* codes, std::byte* scales) {
  const Weight& weight = plan::source_weight(recipe_, key);
  const plan::PlannedWeight& planned = plan_.weights.at(key);
  tensor::TensorRef& ref = store_->matrices_[key];
  ref.view = weight.meta;
  ref.view.codes = codes;
  ref.view.scales = planned.planes.scales > 0 ? scales : nullptr;
  ref.layout = planned.layout;
  if (planned.layout == tensor::Layout::kTile16 && weight.meta.format == formats::FormatId::kF16) {
    ref.view.format = formats::FormatId::kF32;  // widened by repacking, exactly
  }
  store_->bytes_ += planned.planes.codes;
  if (const auto csf = compressed.find(key); csf != compressed.end()) {
    const codec::CsfTiles& tiles = *csf->second;
    ref.scale_encoding = tensor::ScaleEncoding::kCsf;
    ref.view.scales = reinterpret_cast<const std::byte*>(tiles.fixed.data());
    ref.exceptions = tiles.exceptions.data();
    ref.exception_begin = tiles.exception_begin.data();
    store_->bytes_ += csf_resident_bytes(tiles);
  } else {
    store_->bytes_ += planned.planes.scales;
  }
  return ref;
}

// Address space for every plane, taken at once: pages become resident only as planes are written,
// and huge pages (page faults are a fifth of a load otherwise) waste at most one in all.
Result<void> StoreBuilder::reserve() {
  int64_t bytes = 0;
  for (const auto& [key, planned] : plan_.weights) {
    if (plan::is_vector(key.role)) continue;
    bytes += round64(planned.planes.codes) + round64(planned.planes.scales);
  }
  store_->block_ = allocate_aligned(bytes);
  if (store_->block_ == nullptr) {
    return Error(Code::kResourceExhausted,
                 cat("cannot allocate ", bytes, " bytes for the weights"));
  }
  next_plane_ = store_->block_.get();
  return {};
}

std::vector<StoreBuilder::Task> StoreBuilder::place_layer(const std::vector<WeightKey>& keys,
                                                          const Compressed& compressed) {
  std::vector<Task> tasks;
  for (const WeightKey& key : keys) {
    const Weight& weight = plan::source_weight(recipe_, key);
    const plan::PlannedWeight& planned = plan_.weights.at(key);
    if (plan::is_vector(key.role)) {
      std::vector<float>& values = store_->vectors_[key];
      values.resize(static_cast<size_t>(weight.meta.rows * weight.meta.cols));
      tasks.push_back(
          {&key, &weight, &planned, 0, weight.meta.rows, nullptr, nullptr, values.data()});
      store_->bytes_ += planned.resident_bytes();
      continue;
    }
    const bool plain = compressed.count(key) == 0;
    std::byte* codes = next_plane_;
    next_plane_ += round64(planned.planes.codes);
    std::byte* scales = plain && planned.planes.scales > 0 ? next_plane_ : nullptr;
    if (plain) next_plane_ += round64(planned.planes.scales);
    place_matrix(key, compressed, codes, scales);
    for (int64_t row = 0; row < weight.meta.rows; row += planned.chunk_rows) {
      tasks.push_back({&key, &weight, &planned, row,
                       std::min(planned.chunk_rows, weight.meta.rows - row), codes, scales,
                       nullptr});
    }
  }
  return tasks;
}

Result<void> StoreBuilder::load_layer(const std::vector<WeightKey>& keys) {
  NIBBLE_TRY(const Compressed compressed, compress_scales(keys));
  const std::vector<Task> tasks = place_layer(keys, compressed);
  return for_each(static_cast<int64_t>(tasks.size()), [&](int64_t i, int worker) {
    return run_task(tasks[static_cast<size_t>(i)], worker);
  });
}

Result<LoadedWeights> StoreBuilder::run() {
  std::map<int32_t, std::vector<WeightKey>> layers;
  for (const auto& [key, planned] : plan_.weights) {
    layers[key.layer].push_back(key);
    total_ += planned.source_bytes;
  }
  NIBBLE_TRY(reserve());
  for (const auto& [layer, keys] : layers) NIBBLE_TRY(load_layer(keys));
  report(true);
  LoadReport summary;
  summary.source_bytes = total_;
  summary.scales = std::move(scales_);
  summary.resident_bytes = store_->bytes();
  summary.staging_peak_bytes = staged_peak_.load();
  summary.seconds = progress_.seconds();
  return LoadedWeights{store_, summary};
}

Result<LoadedWeights> load_weights(const recipe::Recipe& recipe, const plan::PrecisionPlan& plan,
                                   ThreadPool& pool,
                                   const std::function<void(const LoadProgress&)>& progress) {
  if (plan.options.ranks != 1) {
    return Error(Code::kInvalidArgument, cat("a plan of ", plan.options.ranks,
                                             " ranks is for inspection; loading takes 1"));
  }
  return StoreBuilder(recipe, plan, pool, progress).run();
}

}  // namespace nibble::load
