// The core of `nibble convert --scales csf|plain`: writes the scale planes of FP4 experts as stored
// CSF, or back as plain tensors; every other tensor keeps its bytes. Works from names and headers,
// so any checkpoint of a known dialect will do, whatever its model family.
// Leaves to others: the codec (codec), reading stored CSF (recipe).
// Source: spec: containers, sections 2.1 and 3; csf, sections 1 and 2.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "load/convert.h"

namespace nibble::load {

enum class ScalesForm : uint8_t { kPlain, kCsf };
/// kModelOpt: NVFP4 in ordinary shards, declared per experts module. kManifest: the older container
/// of its own for NVFP4 or MXFP4, with names of one of its families.
enum class ScalesContainer : uint8_t { kModelOpt, kManifest };

struct ConvertScalesOptions {
  ScalesForm form = ScalesForm::kCsf;
  /// Of a csf result. Absent: ModelOpt for NVFP4 experts, manifest for MXFP4 ones.
  std::optional<ScalesContainer> container = std::nullopt;
  /// Of a manifest. Empty: the one whose names and sizes fit, else the first whose names fit.
  std::string family = {};
  int64_t max_shard_bytes = 4'000'000'000;
};

struct ScalesReport {
  /// One projection of the experts of one module (a MoE layer).
  struct Group {
    std::string module, projection;
    int64_t planes = 0, plain_bytes = 0, csf_bytes = 0, exceptions = 0;
    bool compressed = false;  // in the result
    std::string why_plain;    // if it is not
    double ratio() const {
      return plain_bytes == 0 ? 1
                              : static_cast<double>(csf_bytes) / static_cast<double>(plain_bytes);
    }
  };
  std::vector<Group> groups;
  std::string container;  // "modelopt", "manifest deepseek_v41", "plain"
  int64_t planes_changed = 0, tensors_copied = 0;
  int64_t source_bytes = 0, written_bytes = 0;
  double seconds = 0;
  std::vector<std::string> notices;
};

/// Reads `source` (any container) and writes `destination`, which must not exist: it appears whole
/// or not at all (a killed run leaves `<destination>.partial-<pid>`, which does not open). To csf:
/// every group whose streams are smaller than its planes is compressed; in the ModelOpt form a
/// module is compressed as a whole or not. To plain: every stored stream is decoded; configs that
/// nibble put aside when compressing come back byte for byte. Tensors keep names, types, shapes and
/// bytes; the shard layout may differ. The result depends on source and options alone. Peak memory:
/// one shard, and the scales of one experts module. Errors: kInvalidArgument (destination exists,
/// scales already in that form, unknown family), kUnsupported (a dialect or names that no container
/// takes), those of recipe::open_container.
Result<ScalesReport> convert_scales(const std::string& source, const std::string& destination,
                                    const ConvertScalesOptions& options, ThreadPool& pool,
                                    const std::function<void(const ConvertProgress&)>& progress);

}  // namespace nibble::load
