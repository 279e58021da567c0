// How each dialect names and shapes the planes of one quantized weight. Spec: containers, sections
// 2, 4 and 7.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "formats/quantize.h"
#include "load/convert.h"

namespace nibble::load {

struct SpelledTensor {
  std::string name;
  formats::DType dtype = {};
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

/// The tensors of `module`, whose planes are moved out of `matrix` (format, sizes and global from
/// its meta). divisor: compressed-tensors' stored G where the source has it; else it is derived.
/// The dialect must have a form for the format, and the global a divisor: the plan has checked.
std::vector<SpelledTensor> spell(ConvertDialect dialect, const std::string& module,
                                 formats::QuantizedMatrix matrix, std::optional<float> divisor);

/// G with F32(1 / G) == global, bit for bit. About one FP32 value in seven has none.
std::optional<float> divisor_of(float global);

/// compressed-tensors stores the global as a divisor, so an NVFP4 matrix written for it has to use
/// a global that has one: the smallest amax >= `amax` (at least 1e-8) whose global F32(amax / 2688)
/// does. At most a few units in the last place away; never smaller, so nothing saturates earlier.
float amax_with_divisor(float amax);

}  // namespace nibble::load
