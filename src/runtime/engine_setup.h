// What Engine::create settles before a thread runs: options in effect, and the memory for them.
// Apart from the engine's loop so that its arithmetic and errors read (and test) alone.
#pragma once

#include "base/result.h"
#include "device/memory.h"
#include "kernels/attention/kv_pages.h"
#include "model/model.h"
#include "runtime/engine.h"

namespace nibble::runtime {

/// Replaces defaults and checks ranges. Errors: kInvalidArgument naming option, value and range.
Result<EngineOptions> resolve_options(const model::Model& model, const EngineOptions& options);

/// The engine's buffers, sized once by resolved options.
struct EngineMemory {
  device::Memory kv;         // [layers][pages][layer_page_bytes], where the model wants it
  device::Memory workspace;  // what forward() asks for
  device::Memory logits;     // [max_logit_rows, vocab] float
  device::Memory hidden;     // [max_logit_rows, hidden_size] float
  kernels::KvPages pages;
};

/// Errors: kResourceExhausted with the bytes of each part, their sum and what is available.
Result<EngineMemory> allocate_memory(model::Model& model, const EngineOptions& options);

}  // namespace nibble::runtime
