// What becomes what: every stored tensor of a checkpoint is copied, dropped, or consumed by weights
// that are written anew. Decided from headers; no weight is read here but to compare MTP copies.
#pragma once

#include <string>
#include <vector>

#include "load/convert.h"

namespace nibble::load {

/// NF3 is written in its biased dialect.
constexpr int kNf3BiasLog2 = 4;

/// One quantized or converted weight of the result.
struct ConvertItem {
  recipe::WeightKey key;
  const recipe::Weight* weight = nullptr;
  std::string module;                                   // name in the result, without ".weight"
  formats::FormatId target = {};                        // format in the result
  bool same = false;                                    // the stored planes are taken as they are
  const checkpoint::TensorInfo* input_scale = nullptr;  // to be copied along
  const checkpoint::TensorInfo* global_divisor = nullptr;  // the stored G of the same dialect
};

/// Done one after the other: either a tensor to copy, or items that share one NVFP4 global.
struct ConvertStep {
  const checkpoint::TensorInfo* copy = nullptr;
  std::vector<ConvertItem> items;
};

/// A module of the result as its config has to declare it.
struct ResultModule {
  std::string name;
  recipe::WeightKey key;
  formats::FormatId format = {};
  formats::MatrixView meta;  // bias and levels of NF3
  bool input_scale = false;
};

struct ConvertPlan {
  ConvertDialect dialect = ConvertDialect::kModelOpt;
  bool verbatim = false;                // nothing is converted: the config too is copied
  std::vector<ConvertStep> steps;       // by layer
  std::vector<ResultModule> quantized;  // by key
  std::vector<ResultModule> plain;      // matrices but embeddings
  int64_t source_bytes = 0;             // of all steps
  std::vector<std::string> notices;
};

Result<ConvertPlan> plan_conversion(const recipe::Recipe& recipe, const ConvertOptions& options);

bool is_plain(formats::FormatId format);
bool is_routed_expert(recipe::Role role);

}  // namespace nibble::load
