// Test and bench material: one MoE layer with random weights on the device, and its reference
// result. Not part of the library.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/moe_layer.h"
#include "kernels/cuda/packing.h"
#include "kernels/cuda/test_device.h"

namespace nibble::kernels::cuda {

using test::bf16_to_float;
using test::DeviceBuffer;
using test::must;

/// Formats of a layer's projections and the form of their scales.
struct LayerFormats {
  FormatId gate_up = FormatId::kNvfp4, down = FormatId::kNvfp4;
  ScaleForm scales = ScaleForm::kPlain;
  bool spiky = false;  // one scale in twelve is anything: compressed tiles run out of room
};

/// One projection of all experts on the device, packed from random checkpoint planes: any codes;
/// scales spread around 1 so that CSF has 1 to 2 % exceptions (NVFP4) or 0.5 % (MX). The planes are
/// those of `seed`, whatever the form of the scales.
class PackedProjection {
 public:
  PackedProjection(FormatId format, const LayerFormats& formats, Product product,
                   const MoeShape& shape, uint64_t seed);
  ExpertMatrices view() const;
  /// Bytes that a kernel reads, over all experts.
  int64_t bytes() const;
  FormatId format;
  DeviceBuffer tiles;

 private:
  ScaleForm form_;
  DeviceBuffer exceptions_;
  int64_t exception_count_ = 0;
};

/// Random packed weights of all experts of one layer, with per-expert factors that give gate, up
/// and down outputs near 1 for inputs near 1.
struct LayerWeights {
  LayerWeights(const MoeShape& shape, const LayerFormats& formats, uint64_t seed);
  MoeWeights view() const;
  MoeShape shape;
  LayerFormats formats;
  PackedProjection gate_up, down;
  DeviceBuffer factors;  // gate, up, down [3][experts]
  DeviceBuffer biases;   // gate, up [experts][inter], down [experts][hidden]; used with kGptOss
  std::vector<float> host_factors, host_biases;
};

/// x [tokens, hidden] BF16 of normal values; with experts = top_k = 1 no ids or weights, else ids
/// distinct in a token, uniform; weights sum to 1.
struct LayerInput {
  LayerInput(const MoeShape& shape, int64_t tokens, uint64_t seed);
  int64_t active_experts() const;
  MoeArgs args(DeviceBuffer& y) const;
  int64_t tokens;
  bool dense;
  std::vector<uint16_t> host_x;
  std::vector<int32_t> host_ids;
  std::vector<float> host_weights;
  DeviceBuffer x, ids, weights;
};

/// One token's exact result (plain scales): weights unpacked, decoded by formats::decode_rows,
/// products in double; nothing is rounded but the checkpoint's own values.
std::vector<double> reference_token(const LayerWeights& layer, const LayerInput& input,
                                    int64_t token);

std::vector<float> download_floats(const DeviceBuffer& buffer, int64_t count);
/// Norm of the difference over the norm of the reference; NaN if any value is NaN.
double relative_error(const float* y, const std::vector<double>& reference);

/// "qwen", "glm", "tp8", "gptoss", "a3b" or "E,H,I,K". Errors: kInvalidArgument.
Result<MoeShape> parse_shape(const std::string& shape);
/// "nvfp4", ... or "nvfp4+mxfp4" (gate_up + down). Errors: kInvalidArgument.
Result<LayerFormats> parse_formats(const std::string& name);

void fill_random(uint8_t* data, int64_t bytes, uint64_t seed);
/// Scale bytes as PackedProjection has them.
void fill_scales(uint8_t* data, int64_t rows, int64_t cols, bool e8m0, uint64_t seed);

}  // namespace nibble::kernels::cuda
