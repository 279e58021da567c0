// libFuzzer: the input is a template, rendered with a small conversation under small limits.
#include <cstdint>
#include <string_view>

#include "base/json.h"
#include "text/jinja_eval.h"
#include "text/jinja_parser.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace jinja = nibble::text::jinja;
  const auto block = jinja::parse_template({reinterpret_cast<const char*>(data), size});
  if (!block) return 0;
  static const nibble::OrderedJson kVariables = nibble::OrderedJson::parse(R"({
    "messages": [{"role": "user", "content": "hi\u00e9"},
                 {"role": "assistant", "content": null, "tool_calls": [{"a": [1, 2.5, true]}]}],
    "tools": [{"name": "f", "parameters": {"x": {"type": "string"}}}],
    "add_generation_prompt": true, "bos_token": "<s>"})");
  jinja::Limits limits;
  limits.steps = 20'000;
  limits.bytes = 4 * 1024 * 1024;
  const auto out = jinja::render_template(*block, kVariables, limits);
  return out && out->size() > 5 * 1024 * 1024 ? __builtin_trap(), 0 : 0;
}
