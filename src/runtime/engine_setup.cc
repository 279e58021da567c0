#include "runtime/engine_setup.h"

#include <algorithm>
#include <limits>

namespace nibble::runtime {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// a * b, or the largest int64 where that is too large: bigger than any memory either way.
int64_t saturating_product(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

int64_t saturating_sum(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

Result<void> check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return Error(Code::kInvalidArgument,
               cat(name, " must be in [", low, ", ", high, "], not ", value));
}

}  // namespace

Result<EngineOptions> resolve_options(const model::Model& model, const EngineOptions& options) {
  EngineOptions resolved = options;
  const int64_t max_positions = model.config().max_positions;
  if (resolved.max_context == 0) resolved.max_context = max_positions;
  NIBBLE_TRY(
      check_range("max_context", resolved.max_context, 1, std::min(max_positions, kMaxInt32)));
  if (resolved.kv_tokens == 0) resolved.kv_tokens = resolved.max_context;
  const int64_t page_tokens = model.kv_geometry(options.activations).page_tokens;
  NIBBLE_TRY(check_range("kv_tokens", resolved.kv_tokens, 1, kMaxInt32 * page_tokens));
  resolved.kv_tokens = (resolved.kv_tokens + page_tokens - 1) / page_tokens * page_tokens;
  NIBBLE_TRY(check_range("max_batch_tokens", resolved.max_batch_tokens, 1, kMaxInt32));
  NIBBLE_TRY(check_range("max_logit_rows", resolved.max_logit_rows, 1, kMaxInt32));
  NIBBLE_TRY(check_range("max_sequences", resolved.max_sequences, 1, kMaxInt32));
  resolved.max_sequences =
      std::min({resolved.max_sequences, resolved.max_batch_tokens, resolved.max_logit_rows});
  NIBBLE_TRY(check_range("threads", resolved.threads, 0, 4096));
  if (resolved.threads == 0) resolved.threads = usable_cores();
  return resolved;
}

Result<EngineMemory> allocate_memory(model::Model& model, const EngineOptions& options) {
  EngineMemory memory;
  memory.pages.geometry = model.kv_geometry(options.activations);
  memory.pages.pages = options.kv_tokens / memory.pages.geometry.page_tokens;
  const int64_t kv = saturating_product(options.kv_tokens, memory.pages.geometry.bytes_per_token());
  const int64_t workspace =
      model.workspace_bytes(options.max_batch_tokens, options.max_logit_rows, options.threads);
  const int64_t row_bytes = static_cast<int64_t>(sizeof(float));
  const int64_t logits =
      saturating_product(options.max_logit_rows, model.config().vocab_size * row_bytes);
  const int64_t hidden =
      saturating_product(options.max_logit_rows, model.config().hidden_size * row_bytes);
  const int64_t host_kv = model.place() == model::Place::kHost ? kv : 0;
  const int64_t all =
      saturating_sum(saturating_sum(host_kv, workspace), saturating_sum(logits, hidden));
  const int64_t available = device::available_memory_bytes();
  const std::string need = cat(
      "KV pages for ", options.kv_tokens, " positions (", kv, " bytes), workspace (", workspace,
      ") and outputs (", saturating_sum(logits, hidden), ") need ", all, " bytes of host memory");
  if (available >= 0 && all > available) {
    return Error(Code::kResourceExhausted, cat(need, ", but ", available, " are available"));
  }
  NIBBLE_TRY(memory.kv, model.allocate_pages(kv), need);
  NIBBLE_TRY(memory.workspace, device::Memory::host(workspace), need);
  NIBBLE_TRY(memory.logits, device::Memory::host(logits), need);
  NIBBLE_TRY(memory.hidden, device::Memory::host(hidden), need);
  memory.pages.data = memory.kv.data();
  return memory;
}

}  // namespace nibble::runtime
