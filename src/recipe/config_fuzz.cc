// Arbitrary text as config.json and, behind a zero byte, as hf_quant_config.json: the parsers
// either refuse it or give a config whose sizes are within their limits and a quantization that
// answers for any module.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "recipe/config.h"
#include "recipe/families/family.h"
#include "recipe/quantization.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t zero = text.find('\0');
  const auto config = parse_json(text.substr(0, zero), "config.json");
  if (!config) return 0;
  std::optional<Json> hf_quant;
  if (zero != std::string_view::npos) {
    auto second = parse_json(text.substr(zero + 1), "hf_quant_config.json");
    if (second) hf_quant = std::move(*second);
  }
  const recipe::Family* family = recipe::find_family("glm4_moe");
  NIBBLE_CHECK(family != nullptr);
  const auto parsed = family->parse_config(*config, hf_quant ? &*hf_quant : nullptr);
  if (parsed) {
    NIBBLE_CHECK(parsed->hidden_size > 0 && parsed->hidden_size <= 1 << 20);
    NIBBLE_CHECK(parsed->heads % parsed->kv_heads == 0);
    NIBBLE_CHECK(parsed->top_k > 0 && parsed->top_k <= parsed->experts);
    NIBBLE_CHECK(parsed->rotary_dim > 0 && parsed->rotary_dim <= parsed->head_dim);
  }
  const auto quant = recipe::Quantization::from_config(*config, hf_quant ? &*hf_quant : nullptr);
  if (!quant) return 0;
  for (const char* module :
       {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.up_proj",
        "model.language_model.layers.1.mlp.gate", "mtp.layers.0.mlp.experts.0.gate_proj", ""}) {
    const auto declared = quant->declared(module);
    if (!declared) continue;
    const auto block = quant->fp8_block(*declared);
    NIBBLE_CHECK(block[0] > 0 && block[1] > 0);
    NIBBLE_CHECK(!declared->known || declared->form != nullptr || !declared->because.empty());
  }
  return 0;
}
