// Text and token inputs of the measuring subcommands, and prompt logits as they stream by.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "runtime/engine.h"

namespace nibble::cli {

/// "1,2,3", or a file with ids separated by commas or white space.
Result<std::vector<int32_t>> read_tokens(const std::string& source);

/// Runs `tokens` alone from position 0 and hands over every position's logits, in order.
Result<void> prompt_logits(
    runtime::Engine& engine, std::span<const int32_t> tokens,
    std::function<void(int64_t, std::span<const float>, std::span<const float>)> sink);

}  // namespace nibble::cli
