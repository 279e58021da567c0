// The core of `nibble convert`: one checkpoint to another, weight by weight, in bounded memory.
// Decides from headers what becomes what (convert_plan), writes the names and shapes of the chosen
// dialect (convert_spell) and the config that declares them (convert_config). Numbers are the
// formats folder's quantizers. Source: spec: containers, sections 2, 4 and 7; formats, section 3.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "recipe/recipe.h"

namespace nibble::load {

enum class ConvertTarget : uint8_t { kKeep, kBf16, kNvfp4, kMxfp4, kMxfp8, kNf3 };
/// kHybrid is the two-tier form (section 7), the only one with a name for NF3.
enum class ConvertDialect : uint8_t { kModelOpt, kCompressedTensors, kHybrid };

/// "keep", "bf16", "nvfp4", "mxfp4", "mxfp8", "nf3"; "modelopt", "compressed-tensors", "hybrid".
std::optional<ConvertTarget> convert_target_from_name(std::string_view name);
std::optional<ConvertDialect> convert_dialect_from_name(std::string_view name);
std::string_view convert_dialect_name(ConvertDialect dialect);

struct ConvertOptions {
  ConvertTarget experts = ConvertTarget::kKeep;  // routed experts, those of MTP layers too
  ConvertTarget others = ConvertTarget::kKeep;   // attention q, k, v, o; dense MLP; shared experts;
                                                 // the MTP projection. kKeep or kMxfp8
  ConvertTarget head = ConvertTarget::kKeep;     // kKeep or kMxfp8
  /// Absent: the source's own where it can hold the result, else ModelOpt, compressed-tensors, or
  /// hybrid, whichever can first.
  std::optional<ConvertDialect> dialect = std::nullopt;
  /// Leaves out an MTP layer's own embedding and head where they are byte-equal to the model's.
  bool drop_mtp_copies = true;
  /// Allows a quantized source to be decoded and quantized again. Decoding to BF16 is always
  /// allowed.
  bool requantize = false;
  int64_t max_shard_bytes = 4'000'000'000;
};

struct ConvertProgress {
  int64_t source_bytes_done = 0, source_bytes_total = 0;
};

struct ConvertReport {
  struct Flow {
    int64_t weights = 0, elems = 0, source_bytes = 0, written_bytes = 0;
  };
  std::map<std::string, Flow> flows;  // "bf16 to nvfp4"; weights that are copied: "bf16 kept"
  std::string dialect;                // empty if nothing is quantized, or all is as stored
  int64_t source_bytes = 0, written_bytes = 0;
  double seconds = 0;
  std::vector<std::string> notices;  // dropped copies, second rounding, globals moved, ...
};

/// Writes `destination`, which must not exist; it appears whole or not at all (a killed run leaves
/// only `<destination>.partial-<pid>`, which does not open). Routers, norms, biases, embeddings and
/// whatever stays plain are byte-equal; a weight that is in its target format already keeps its
/// codes and scales. Tokenizer, template and other small files beside the weights are copied.
/// The bytes depend on source and options alone, not on the number of threads. Peak memory: one
/// shard, plus one tensor, or gate and up of one expert as float.
/// `progress` may be empty; it is called from this thread after every tensor or expert.
/// Errors, before any weight is read: kInvalidArgument (a target that a part cannot take, columns
/// that break a group, a destination that exists), kUnsupported (a dialect without a form for a
/// format, and which one has; a second rounding without `requantize`). Later: kCorruptInput naming
/// weight and index at a NaN or infinity, kIo.
Result<ConvertReport> convert_checkpoint(
    const recipe::Recipe& recipe, const std::string& destination, const ConvertOptions& options,
    ThreadPool& pool, const std::function<void(const ConvertProgress&)>& progress);

}  // namespace nibble::load
