#include "load/verify.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "load/scale_planes.h"

namespace nibble::load {
namespace {

using checkpoint::CheckpointIndex;
using checkpoint::TensorInfo;
using recipe::Container;

constexpr int64_t kChunkBytes = 4 << 20;
constexpr int64_t kBatch = 512;  // tasks between two calls of progress

std::span<const uint8_t> as_u8(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

/// The first byte where two equally long spans differ, or their size.
template <typename A, typename B>
size_t first_difference(const A& a, const B& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
}

/// What one task adds to the report.
struct Finding {
  VerifyReport counts;
  std::optional<Difference> difference;
};

/// Runs the tasks in batches, adds their findings in order, and stops at the first error.
template <typename Task>
Result<void> run_tasks(int64_t tasks, ThreadPool& pool, VerifyReport& report, int64_t total_bytes,
                       const std::function<void(const ConvertProgress&)>& progress,
                       const Task& task) {
  int64_t done_bytes = 0;
  for (int64_t begin = 0; begin < tasks; begin += kBatch) {
    const int64_t count = std::min(kBatch, tasks - begin);
    std::vector<std::optional<Result<Finding>>> findings(static_cast<size_t>(count));
    pool.parallel_for(count,
                      [&](int64_t i, int) { findings[static_cast<size_t>(i)] = task(begin + i); });
    for (std::optional<Result<Finding>>& slot : findings) {
      if (!*slot) return slot->error();
      const Finding& found = slot->value();
      const VerifyReport& add = found.counts;
      report.planes += add.planes;
      report.plane_bytes += add.plane_bytes;
      report.stored_planes += add.stored_planes;
      report.csf_bytes += add.csf_bytes;
      report.exceptions += add.exceptions;
      report.not_canonical += add.not_canonical;
      report.not_encodable += add.not_encodable;
      report.tensors += add.tensors;
      report.tensor_bytes += add.tensor_bytes;
      done_bytes += add.plane_bytes + add.tensor_bytes;
      if (!found.difference) continue;
      ++report.differing;
      if (!report.first) report.first = found.difference;
    }
    if (progress) progress({done_bytes, total_bytes});
  }
  return {};
}

Difference plane_difference(const std::string& tensor, size_t at, int64_t cols, uint8_t left,
                            uint8_t right) {
  Difference out;
  out.tensor = tensor;
  out.row = static_cast<int64_t>(at) / cols;
  out.column = static_cast<int64_t>(at) % cols;
  out.left = left;
  out.right = right;
  return out;
}

std::string plane_name(const QuantizedModule& module) {
  return module.expert < 0 ? module.scale : cat(module.scale, " expert ", module.expert);
}

/// One plane alone: legal if stored, and the same after a trip through the codec.
Result<Finding> check_plane(const Container& container, const QuantizedModule& module) {
  const recipe::PlaneShape shape = module.shape();
  Finding out;
  out.counts.planes = 1;
  out.counts.plane_bytes = shape.rows * shape.cols;
  std::vector<std::byte> plane;
  std::optional<recipe::StoredCsf> stored;
  if (module.weight.stored_csf()) {
    NIBBLE_TRY(stored, recipe::read_stored_csf(container.index, module.weight));
    plane.resize(static_cast<size_t>(out.counts.plane_bytes));
    NIBBLE_TRY(codec::decode_csf(
        stored->view, std::span(reinterpret_cast<uint8_t*>(plane.data()), plane.size())));
    out.counts.stored_planes = 1;
    out.counts.csf_bytes = stored->view.stored_bytes();
    out.counts.exceptions = stored->view.exception_count();
  } else {
    NIBBLE_TRY(plane, recipe::read_scale_plane(container.index, module.weight));
    if (!codec::check_csf_geometry(*module.kind(), shape.rows, shape.cols)) {
      out.counts.not_encodable = 1;
      return out;
    }
  }
  NIBBLE_TRY(const codec::CsfPlane encoded,
             codec::encode_csf(*module.kind(), shape.rows, shape.cols, as_u8(plane)));
  const codec::CsfView view = encoded.view();
  if (stored) {
    const bool canonical =
        std::ranges::equal(view.fixed(), stored->fixed) &&
        encoded.exceptions.size() * sizeof(uint32_t) == stored->exceptions.size() &&
        (stored->exceptions.empty() ||
         std::memcmp(encoded.exceptions.data(), stored->exceptions.data(),
                     stored->exceptions.size()) == 0);
    out.counts.not_canonical = canonical ? 0 : 1;
  } else {
    out.counts.csf_bytes = view.stored_bytes();
    out.counts.exceptions = view.exception_count();
  }
  std::vector<uint8_t> again(plane.size());
  NIBBLE_TRY(codec::decode_csf(view, again));
  const std::span<const uint8_t> bytes = as_u8(plane);
  if (const size_t at = first_difference(bytes, again); at < again.size()) {
    out.difference = plane_difference(plane_name(module), at, shape.cols, bytes[at], again[at]);
  }
  return out;
}

/// A checkpoint's tensors by their names in plain form.
struct Side {
  struct Entry {
    const TensorInfo* tensor = nullptr;           // plain
    const QuantizedModule* compressed = nullptr;  // or a stored stream
  };
  std::string path;
  Container container;
  std::vector<QuantizedModule> modules;
  std::map<std::string, Entry, std::less<>> entries;
};

Result<std::unique_ptr<Side>> open_side(const std::string& path) {
  NIBBLE_TRY(Container container, recipe::open_container(path));
  auto side = std::make_unique<Side>(Side{path, std::move(container), {}, {}});
  NIBBLE_TRY(side->modules, quantized_modules(side->container));
  std::map<const TensorInfo*, const QuantizedModule*> streams;
  for (const QuantizedModule& module : side->modules) {
    if (!module.weight.stored_csf()) continue;
    streams.emplace(module.weight.csf_fixed.tensor, &module);
    streams.emplace(module.weight.csf_exceptions.tensor, nullptr);
  }
  for (const TensorInfo& tensor : side->container.index.tensors()) {
    const auto found = streams.find(&tensor);
    if (found == streams.end()) {
      side->entries[tensor.name].tensor = &tensor;
    } else if (found->second != nullptr) {
      side->entries[found->second->scale].compressed = found->second;
    }
  }
  return side;
}

std::string form_text(const TensorInfo& tensor) {
  return cat(formats::dtype_name(tensor.dtype), " ", checkpoint::shape_text(tensor.shape));
}

Difference other_form(const std::string& name, std::string what) {
  Difference out;
  out.tensor = name;
  out.what = std::move(what);
  return out;
}

/// Row and column of a byte, elements of fewer bits than a byte counted from the byte's first.
void locate(const TensorInfo& tensor, int64_t byte, Difference& out) {
  const int64_t last = tensor.shape.empty() ? 1 : tensor.shape.back();
  const int64_t element = byte * 8 / formats::dtype_bits(tensor.dtype);
  out.row = element / last;
  out.column = element % last;
}

/// Two plain tensors of one name.
Result<std::optional<Difference>> compare_tensors(const Side& left, const TensorInfo& a,
                                                  const Side& right, const TensorInfo& b) {
  if (a.dtype != b.dtype || a.shape != b.shape) {
    return std::optional(other_form(a.name, cat(form_text(a), " against ", form_text(b))));
  }
  std::vector<std::byte> left_bytes, right_bytes;
  for (int64_t begin = 0; begin < a.bytes; begin += kChunkBytes) {
    const auto count = static_cast<size_t>(std::min(kChunkBytes, a.bytes - begin));
    left_bytes.resize(count);
    right_bytes.resize(count);
    NIBBLE_TRY(left.container.index.read(a, begin, left_bytes));
    NIBBLE_TRY(right.container.index.read(b, begin, right_bytes));
    if (std::memcmp(left_bytes.data(), right_bytes.data(), count) == 0) continue;
    const size_t at = first_difference(left_bytes, right_bytes);
    Difference out;
    out.tensor = a.name;
    locate(a, begin + static_cast<int64_t>(at), out);
    out.left = std::to_integer<int>(left_bytes[at]);
    out.right = std::to_integer<int>(right_bytes[at]);
    return std::optional(out);
  }
  return std::optional<Difference>();
}

/// The plane of an entry, whatever its form, and its shape.
Result<std::vector<std::byte>> plane_of(const Side& side, const Side::Entry& entry) {
  if (entry.compressed != nullptr) {
    return recipe::read_scale_plane(side.container.index, entry.compressed->weight);
  }
  std::vector<std::byte> bytes(static_cast<size_t>(entry.tensor->bytes));
  NIBBLE_TRY(side.container.index.read(*entry.tensor, 0, bytes));
  return bytes;
}

std::vector<int64_t> shape_of(const Side::Entry& entry) {
  if (entry.compressed == nullptr) return entry.tensor->shape;
  const recipe::PlaneShape shape = entry.compressed->shape();
  return {shape.rows, shape.cols};
}

/// One name of both sides, at least one of them compressed.
Result<std::optional<Difference>> compare_planes(const std::string& name, const Side& left,
                                                 const Side::Entry& a, const Side& right,
                                                 const Side::Entry& b) {
  const std::vector<int64_t> shape = shape_of(a);
  if (shape != shape_of(b)) {
    return std::optional(other_form(name, cat("shape ", checkpoint::shape_text(shape), " against ",
                                              checkpoint::shape_text(shape_of(b)))));
  }
  NIBBLE_TRY(const std::vector<std::byte> mine, plane_of(left, a));
  NIBBLE_TRY(const std::vector<std::byte> theirs, plane_of(right, b));
  if (mine.size() != theirs.size()) {
    return std::optional(other_form(name, cat(mine.size(), " bytes against ", theirs.size())));
  }
  const size_t at = first_difference(mine, theirs);
  if (at == mine.size()) return std::optional<Difference>();
  return std::optional(
      plane_difference(name, at, shape.back(), as_u8(mine)[at], as_u8(theirs)[at]));
}

Result<Finding> compare_name(const std::string& name, const Side& left, const Side& right) {
  Finding out;
  out.counts.tensors = 1;
  const auto a = left.entries.find(name), b = right.entries.find(name);
  if (a == left.entries.end() || b == right.entries.end()) {
    const bool here = a == left.entries.end();
    out.difference = other_form(name, cat("is missing in '", here ? left.path : right.path, "'"));
    return out;
  }
  const Side::Entry &mine = a->second, &theirs = b->second;
  if (mine.tensor != nullptr && theirs.tensor != nullptr) {
    out.counts.tensor_bytes = mine.tensor->bytes;
    NIBBLE_TRY(out.difference, compare_tensors(left, *mine.tensor, right, *theirs.tensor));
    return out;
  }
  const std::vector<int64_t> shape = shape_of(mine.compressed != nullptr ? mine : theirs);
  out.counts.tensor_bytes = shape[0] * shape[1];
  NIBBLE_TRY(out.difference, compare_planes(name, left, mine, right, theirs));
  return out;
}

Result<void> check_planes(const Side& side, ThreadPool& pool, VerifyReport& report,
                          const std::function<void(const ConvertProgress&)>& progress) {
  std::vector<const QuantizedModule*> planes;
  int64_t total = 0;
  for (const QuantizedModule& module : side.modules) {
    if (!module.kind()) continue;
    planes.push_back(&module);
    total += module.shape().rows * module.shape().cols;
  }
  return run_tasks(
      static_cast<int64_t>(planes.size()), pool, report, total, progress,
      [&](int64_t i) { return check_plane(side.container, *planes[static_cast<size_t>(i)]); });
}

}  // namespace

std::string difference_text(const Difference& d) {
  if (!d.what.empty()) return cat("'", d.tensor, "': ", d.what);
  return cat("'", d.tensor, "', row ", d.row, ", column ", d.column, ": byte ", d.left, " against ",
             d.right);
}

Result<VerifyReport> verify_checkpoint(
    const std::string& directory, ThreadPool& pool,
    const std::function<void(const ConvertProgress&)>& progress) {
  NIBBLE_TRY(const std::unique_ptr<Side> side, open_side(directory));
  VerifyReport report;
  NIBBLE_TRY(check_planes(*side, pool, report, progress));
  return report;
}

Result<VerifyReport> verify_against(const std::string& directory, const std::string& other,
                                    ThreadPool& pool,
                                    const std::function<void(const ConvertProgress&)>& progress) {
  NIBBLE_TRY(const std::unique_ptr<Side> left, open_side(directory));
  NIBBLE_TRY(const std::unique_ptr<Side> right, open_side(other));
  VerifyReport report;
  NIBBLE_TRY(check_planes(*left, pool, report, progress));
  std::vector<std::string> names;
  for (const auto& [name, entry] : left->entries) names.push_back(name);
  for (const auto& [name, entry] : right->entries) {
    if (!left->entries.contains(name)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  NIBBLE_TRY(run_tasks(static_cast<int64_t>(names.size()), pool, report,
                       left->container.index.total_bytes(), progress, [&](int64_t i) {
                         return compare_name(names[static_cast<size_t>(i)], *left, *right);
                       }));
  return report;
}

}  // namespace nibble::load
