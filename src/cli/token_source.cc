#include "cli/token_source.h"

#include <charconv>

#include "base/file.h"

namespace nibble::cli {

Result<std::vector<int32_t>> read_tokens(const std::string& source) {
  std::string text = source;
  if (text.find_first_not_of("0123456789, ") != std::string::npos) {
    NIBBLE_TRY(text, read_text_file(source));
  }
  std::vector<int32_t> ids;
  const char* p = text.data();
  const char* end = p + text.size();
  while (p != end) {
    if (*p == ',' || *p == ' ' || *p == '\n' || *p == '\t' || *p == '\r') {
      ++p;
      continue;
    }
    int32_t id = 0;
    const auto [next, code] = std::from_chars(p, end, id);
    if (code != std::errc() || id < 0) {
      return Error(Code::kInvalidArgument,
                   cat("'", source, "': expected token ids, found '",
                       std::string(p, std::min<ptrdiff_t>(end - p, 12)), "'"));
    }
    ids.push_back(id);
    p = next;
  }
  if (ids.empty()) return Error(Code::kInvalidArgument, cat("'", source, "' holds no token ids"));
  return ids;
}

Result<void> prompt_logits(
    runtime::Engine& engine, std::span<const int32_t> tokens,
    std::function<void(int64_t, std::span<const float>, std::span<const float>)> sink) {
  runtime::Request request;
  request.prompt.assign(tokens.begin(), tokens.end());
  request.max_tokens = 0;
  request.callbacks.on_prompt_logits = std::move(sink);
  std::string failure;
  request.callbacks.on_finish = [&failure](runtime::FinishReason reason, const std::string& error) {
    if (reason == runtime::FinishReason::kError) failure = error;
  };
  NIBBLE_TRY(const runtime::RequestId id, engine.submit(std::move(request)));
  engine.wait(id);
  if (!failure.empty()) return Error(Code::kInternal, failure);
  return {};
}

}  // namespace nibble::cli
