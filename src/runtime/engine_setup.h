// What Engine::create settles before a thread runs: options in effect, and the memory for them.
// Apart from the engine's loop so that its arithmetic and errors read (and test) alone.
#pragma once

#include "base/result.h"
#include "kernels/attention/kv_pages.h"
#include "model/model.h"
#include "runtime/engine.h"
#include "runtime/memory_block.h"

namespace nibble::runtime {

/// Replaces defaults and checks ranges. Errors: kInvalidArgument naming option, value and range.
Result<EngineOptions> resolve_options(const model::Model& model, const EngineOptions& options);

/// The engine's buffers, sized once by resolved options.
struct EngineMemory {
  MemoryBlock kv;         // [layers][pages][layer_page_bytes]
  MemoryBlock workspace;  // what forward() asks for
  MemoryBlock logits;     // [max_logit_rows, vocab] float
  MemoryBlock hidden;     // [max_logit_rows, hidden_size] float
  kernels::KvPages pages;
};

/// Errors: kResourceExhausted with the bytes of each part, their sum and what is available.
Result<EngineMemory> allocate_memory(const model::Model& model, const EngineOptions& options);

}  // namespace nibble::runtime
