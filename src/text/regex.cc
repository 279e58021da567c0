#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <utility>

namespace nibble::text {

RegexScratch::RegexScratch()
    : match_data_(pcre2_match_data_create(2, nullptr)),
      match_context_(pcre2_match_context_create(nullptr)),
      jit_stack_(pcre2_jit_stack_create(32 * 1024, 8 * 1024 * 1024, nullptr)) {
  auto* context = static_cast<pcre2_match_context*>(match_context_);
  pcre2_jit_stack_assign(context, nullptr, jit_stack_);
  pcre2_set_match_limit(context, 50'000'000);
  pcre2_set_heap_limit(context, 256 * 1024);  // KiB
}

RegexScratch::~RegexScratch() {
  pcre2_jit_stack_free(static_cast<pcre2_jit_stack*>(jit_stack_));
  pcre2_match_context_free(static_cast<pcre2_match_context*>(match_context_));
  pcre2_match_data_free(static_cast<pcre2_match_data*>(match_data_));
}

Regex::Regex(Regex&& other) noexcept
    : code_(std::exchange(other.code_, nullptr)), jit_(other.jit_) {}

Regex& Regex::operator=(Regex&& other) noexcept {
  std::swap(code_, other.code_);
  std::swap(jit_, other.jit_);
  return *this;
}

Regex::~Regex() { pcre2_code_free(static_cast<pcre2_code*>(code_)); }

Result<Regex> Regex::compile(std::string_view oniguruma_pattern) {
  NIBBLE_TRY(const std::string pattern, pcre_from_oniguruma(oniguruma_pattern));
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context, 100);
  int code = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* compiled =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK, &code, &offset, context);
  pcre2_compile_context_free(context);
  if (compiled == nullptr) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(code, text, sizeof(text));
    return Error(Code::kCorruptInput, cat("pattern '", oniguruma_pattern.substr(0, 200),
                                          "': ", reinterpret_cast<const char*>(text), " at byte ",
                                          offset, " of '", pattern.substr(0, 200), "'"));
  }
  const bool jit = pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE) == 0;
  return Regex(compiled, jit);
}

bool Regex::find(std::string_view text, size_t from, RegexScratch& scratch, Span& match) const {
  auto* data = static_cast<pcre2_match_data*>(scratch.match_data_);
  auto* context = static_cast<pcre2_match_context*>(scratch.match_context_);
  const auto* code = static_cast<const pcre2_code*>(code_);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int rc = 0;
  if (jit_) {
    rc = pcre2_jit_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, data, context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter keeps its stack on the heap
      rc = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data,
                       context);
    }
  } else {
    rc = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, data, context);
  }
  if (rc < 0) return false;
  const PCRE2_SIZE* ovector = pcre2_get_ovector_pointer(data);
  match = {ovector[0], std::max(ovector[0], ovector[1])};
  return true;
}

}  // namespace nibble::text
