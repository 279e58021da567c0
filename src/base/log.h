// The log sink: library code writes here and never to stdout or stderr. The CLI installs a sink
// that prints to stderr; without one, lines are dropped.
#pragma once

#include <functional>
#include <string_view>

namespace nibble {

enum class LogLevel { kInfo, kWarning };
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Replaces the process-wide sink. Call it before threads that log exist.
void set_log_sink(LogSink sink);
/// Thread-safe: lines never interleave.
void log_line(LogLevel level, std::string_view line);

}  // namespace nibble
