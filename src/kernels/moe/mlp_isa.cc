// Activation between the two products and the weighted sum after them.
#include "kernels/cpu/vec.h"
#include "kernels/moe/mlp_ops.h"

namespace nibble::kernels::NIBBLE_ISA_NS {
namespace {

inline F32x16 negate(F32x16 x) { return sub(set1(-0.0f), x); }

/// x * sigmoid(alpha * x)
inline F32x16 swish(F32x16 x, F32x16 alpha) {
  const F32x16 e = exp(negate(mul(alpha, x)));
  return div(x, add(set1(1.0f), e));
}

inline F32x16 apply(const MlpShape& shape, F32x16 gate, F32x16 up) {
  if (shape.activation == MlpActivation::kSilu) return mul(swish(gate, set1(1.0f)), up);
  // min(limit, x) keeps a NaN x.
  const F32x16 limit = set1(shape.limit);
  gate = min(limit, gate);
  up = max(set1(-shape.limit), min(limit, up));
  if (shape.activation == MlpActivation::kSiluLimit) return mul(swish(gate, set1(1.0f)), up);
  return mul(add(up, set1(1.0f)), swish(gate, set1(shape.alpha)));
}

inline F32x16 load_bias(const float* bias, int64_t lanes) {
  return lanes == kLanes ? load(bias) : load_first(bias, lanes);
}

void activate(const MlpShape& shape, const float* gate, const float* up, int64_t rows,
              const float* gate_bias, const float* up_bias, int64_t lanes, PackKind kind,
              std::byte* out) {
  const F32x16 gate_add = gate_bias != nullptr ? load_bias(gate_bias, lanes) : set1(0.0f);
  const F32x16 up_add = up_bias != nullptr ? load_bias(up_bias, lanes) : set1(0.0f);
  for (int64_t t = 0; t < rows; ++t) {
    F32x16 g = load(gate + 16 * t);
    F32x16 u = load(up + 16 * t);
    if (gate_bias != nullptr) g = add(g, gate_add);
    if (up_bias != nullptr) u = add(u, up_add);
    F32x16 h = apply(shape, g, u);
    if (lanes < kLanes) {
      float buffer[kLanes];
      store(buffer, h);
      h = load_first(buffer, lanes);
    }
    std::byte* to = out + t * packed_row_bytes(kind);
    if (kind == PackKind::kF32) {
      store(reinterpret_cast<float*>(to), h);
      continue;
    }
    uint16_t rounded[kLanes];
    if (kind == PackKind::kBf16) {
      store_bf16(reinterpret_cast<uint16_t*>(to), h);
    } else {
      store_bf16(rounded, h);
      store(reinterpret_cast<float*>(to), load_bf16(rounded));
    }
  }
}

void combine(const float* d, int64_t d_stride, const int32_t* positions, const float* weights,
             int64_t slots, int64_t width, float* y) {
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    F32x16 sum = set1(0.0f);
    for (int64_t s = 0; s < slots; ++s) {
      sum = fma(set1(weights[s]), load(d + positions[s] * d_stride + c), sum);
    }
    store(y + c, sum);
  }
  for (; c < width; ++c) {
    float sum = 0.0f;
    for (int64_t s = 0; s < slots; ++s) {
      sum = std::fma(weights[s], d[positions[s] * d_stride + c], sum);
    }
    y[c] = sum;
  }
}

}  // namespace

const MlpOps& mlp_ops() {
  static constexpr MlpOps kOps = {activate, combine};
  return kOps;
}

}  // namespace nibble::kernels::NIBBLE_ISA_NS
