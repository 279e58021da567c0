#include "base/log.h"

#include <mutex>
#include <utility>

namespace nibble {
namespace {
std::mutex& sink_mutex() {
  static std::mutex mutex;
  return mutex;
}
LogSink& sink() {
  static LogSink instance;
  return instance;
}
}  // namespace

void set_log_sink(LogSink new_sink) {
  std::lock_guard lock(sink_mutex());
  sink() = std::move(new_sink);
}

void log_line(LogLevel level, std::string_view line) {
  std::lock_guard lock(sink_mutex());
  if (sink()) sink()(level, line);
}

}  // namespace nibble
