// The whole CUDA loader without a GPU: the runtime is a stand-in (cuda_stand_in_testing.h), and so
// are the packing kernels, which only lay the rows they were given one after the other. So every
// byte of a checkpoint must arrive in its place, whatever the formats and however small the slots
// are.
#include "load/cuda_loader.h"

#include <gtest/gtest.h>

#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/packing.h"
#include "load/cuda_stand_in_testing.h"
#include "recipe/scale_plane.h"
#include "recipe/tiny_checkpoint_testing.h"

namespace nibble::kernels::cuda {

// Packed here: codes of all rows, then, from half of the room on, scales.

int64_t linear_packed_bytes(FormatId, int64_t out, int64_t cols) { return 16 * out * cols + 4096; }

Result<void> pack_linear(const LinearPiece& p, std::byte* packed, int*, cudaStream_t stream) {
  queue_on(stream, [p, packed] {
    const int64_t row = formats::code_row_bytes(p.format, p.cols);
    std::memcpy(packed + p.row_begin * row, p.codes, static_cast<size_t>(p.rows * row));
    if (p.scales == nullptr) return;
    std::byte* scales = packed + linear_packed_bytes(p.format, p.out, p.cols) / 2;
    if (p.format == FormatId::kFp8Block) {
      const int64_t width = (p.cols + 127) / 128 * 4;
      std::memcpy(scales + p.row_begin / 128 * width, p.scales,
                  static_cast<size_t>((p.rows + 127) / 128 * width));
    } else {
      const int64_t width = p.cols / group_cols(p.format);
      std::memcpy(scales + p.row_begin * width, p.scales, static_cast<size_t>(p.rows * width));
    }
  });
  return {};
}

namespace {
/// What launch_pack was given, by place of the packed expert: codes and scales of first, second.
struct Expert {
  std::vector<std::byte> codes[2], scales[2];
};
std::map<const uint8_t*, Expert> packed_experts;

std::vector<std::byte> bytes_of(const uint8_t* p, int64_t count) {
  const auto* from = reinterpret_cast<const std::byte*>(p);
  return {from, from + count};
}
}  // namespace

cudaError_t launch_pack(const PackArgs& a, int*, cudaStream_t stream) {
  queue_on(stream, [a] {
    const bool up = a.product == Product::kGateUp;
    const int64_t rows = up ? a.inter : a.hidden, cols = up ? a.hidden : a.inter;
    const int64_t codes = rows * formats::code_row_bytes(a.format, cols);
    const int64_t scales = a.format == FormatId::kBf16 ? 0
                           : a.format == FormatId::kFp8Block
                               ? (rows + 127) / 128 * ((cols + 127) / 128) * 4
                               : rows * (cols / group_cols(a.format));
    for (int64_t e = 0; e < a.experts; ++e) {
      Expert& out = packed_experts[a.packed + e * packed_bytes(a.format, a.product, a.hidden,
                                                               a.inter, a.scale_form)];
      for (int s = 0; s < (up ? 2 : 1); ++s) {
        const RowPlanes& planes = s == 0 ? a.first : a.second;
        out.codes[s] = bytes_of(planes.codes + e * codes, codes);
        if (scales > 0) out.scales[s] = bytes_of(planes.scales + e * scales, scales);
      }
    }
  });
  return cudaSuccess;
}

int64_t csf_encode_scratch_bytes(const CsfStack&) { return 64; }
Result<void> csf_encode(const CsfStack& stack, const uint8_t*, const CsfStreams& out, void*,
                        cudaStream_t stream) {
  queue_on(stream, [out, rows = stack.experts * stack.rows] { out.row_begin[rows] = 5; });
  return {};
}
Result<void> csf_index(const CsfIndexArgs& args, cudaStream_t) {
  EXPECT_NE(args.packed, nullptr);
  EXPECT_NE(args.exceptions, nullptr);
  return {};
}

}  // namespace nibble::kernels::cuda

namespace nibble::load {
namespace {

using formats::FormatId;
using kernels::cuda::LinearWeight;
using kernels::cuda::MoeWeights;
using kernels::cuda::Product;
using recipe::Role;
using recipe::Weight;
using testing::TinyOptions;

std::vector<std::byte> stored_codes(const recipe::Recipe& recipe, const Weight& w) {
  std::vector<std::byte> bytes(static_cast<size_t>(w.codes.bytes));
  recipe.index().read(*w.codes.tensor, w.codes.begin, bytes).value();
  return bytes;
}
std::vector<std::byte> stored_scales(const recipe::Recipe& recipe, const Weight& w) {
  return recipe::read_scale_plane(recipe.index(), w).value();
}

void expect_bytes(const std::byte* got, const std::vector<std::byte>& want,
                  const std::string& what) {
  EXPECT_EQ(std::memcmp(got, want.data(), want.size()), 0) << what;
}

void expect_linear(const recipe::Recipe& recipe, const LinearWeight& got,
                   const std::vector<recipe::WeightKey>& stack) {
  const std::byte* codes = got.packed;
  const std::byte* scales =
      got.packed + kernels::cuda::linear_packed_bytes(got.format, got.out, got.cols) / 2;
  for (const recipe::WeightKey& key : stack) {
    const Weight& w = plan::source_weight(recipe, key);
    EXPECT_EQ(got.format, w.meta.format);
    const std::vector<std::byte> want = stored_codes(recipe, w);
    expect_bytes(codes, want, key_text(key) + " codes");
    codes += want.size();
    if (w.scales.tensor == nullptr || got.format == FormatId::kFp8Channel ||
        got.format == FormatId::kFp8Tensor) {
      continue;
    }
    const std::vector<std::byte> plane = stored_scales(recipe, w);
    expect_bytes(scales, plane, key_text(key) + " scales");
    scales += plane.size();
  }
}

void expect_experts(const recipe::Recipe& recipe, const MoeWeights& got, int32_t layer, Role gate,
                    Role up, Role down, const std::vector<int32_t>& experts) {
  const formats::MatrixView& g = recipe.find({layer, gate, experts[0]})->meta;
  const auto place = [&](const kernels::cuda::ExpertMatrices& m, Product product, size_t i) {
    return reinterpret_cast<const uint8_t*>(m.tiles) +
           static_cast<int64_t>(i) *
               kernels::cuda::packed_bytes(m.format, product, g.cols, g.rows, m.scale_form);
  };
  for (size_t i = 0; i < experts.size(); ++i) {
    const struct {
      Role role;
      const kernels::cuda::Expert* packed;
      int source;
    } parts[] = {
        {gate, &kernels::cuda::packed_experts.at(place(got.gate_up, Product::kGateUp, i)), 0},
        {up, &kernels::cuda::packed_experts.at(place(got.gate_up, Product::kGateUp, i)), 1},
        {down, &kernels::cuda::packed_experts.at(place(got.down, Product::kDown, i)), 0}};
    for (const auto& part : parts) {
      const recipe::WeightKey key{layer, part.role, experts[i]};
      const Weight& w = *recipe.find(key);
      EXPECT_EQ(part.packed->codes[part.source], stored_codes(recipe, w)) << key_text(key);
      if (w.scales.tensor == nullptr) continue;
      EXPECT_EQ(part.packed->scales[part.source], stored_scales(recipe, w)) << key_text(key);
    }
  }
}

void expect_loaded(const TinyOptions& tiny, plan::Scales scales, bool expect_csf) {
  testing::TempDir dir;
  testing::write_tiny(dir.path(), testing::tiny_tensors(tiny), testing::tiny_config(tiny));
  const recipe::Recipe recipe = std::move(recipe::read_recipe(dir.path()).value());
  plan::PlanOptions options;
  options.scales = scales;
  const plan::CudaPlan plan = plan::make_cuda_plan(recipe, options).value();
  kernels::cuda::packed_experts.clear();
  ThreadPool pool(2);
  const LoadedCudaWeights loaded = std::move(load_cuda_weights(recipe, plan, 0, pool, {}).value());
  EXPECT_LE(loaded.report.staging_peak_bytes, plan.host_staging_bytes);
  EXPECT_GT(loaded.report.staging_peak_bytes, 0);
  EXPECT_GT(loaded.report.reading_seconds, 0);
  EXPECT_LE(loaded.report.reading_seconds, loaded.report.seconds);
  const CudaWeights& w = *loaded.weights;
  expect_bytes(static_cast<const std::byte*>(w.embedding.data),
               stored_codes(recipe, *recipe.find({-1, Role::kEmbedding, -1})), "embedding");
  expect_linear(recipe, w.head, {{-1, Role::kHead, -1}});
  int64_t compressed = 0;
  ASSERT_EQ(static_cast<int64_t>(w.layers.size()), tiny.layers);
  for (int32_t i = 0; i < static_cast<int32_t>(w.layers.size()); ++i) {
    const CudaLayer& layer = w.layers[static_cast<size_t>(i)];
    std::vector<recipe::WeightKey> qkv = {{i, Role::kQ, -1}, {i, Role::kK, -1}, {i, Role::kV, -1}};
    size_t next = 0;
    for (const CudaQkvPart& part : layer.qkv) {
      std::vector<recipe::WeightKey> stack;
      int64_t rows = 0;
      while (rows < part.weight.out) {
        rows += recipe.find(qkv[next])->meta.rows;
        stack.push_back(qkv[next++]);
      }
      expect_linear(recipe, part.weight, stack);
    }
    EXPECT_EQ(next, 3u);
    expect_linear(recipe, layer.o, {{i, Role::kO, -1}});
    if (!layer.routed) {
      expect_experts(recipe, layer.mlp, i, Role::kDenseGate, Role::kDenseUp, Role::kDenseDown,
                     {-1});
      continue;
    }
    expect_bytes(static_cast<const std::byte*>(layer.router.rows),
                 stored_codes(recipe, *recipe.find({i, Role::kRouter, -1})), "router");
    expect_experts(recipe, layer.mlp, i, Role::kSharedGate, Role::kSharedUp, Role::kSharedDown,
                   {-1});
    const auto& groups = plan.groups[static_cast<size_t>(i)];
    ASSERT_EQ(layer.groups.size(), groups.size());
    int32_t number = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      expect_experts(recipe, layer.groups[g], i, Role::kExpertGate, Role::kExpertUp,
                     Role::kExpertDown, groups[g].experts);
      compressed += layer.groups[g].down.scale_form == kernels::cuda::ScaleForm::kCsf ? 1 : 0;
      for (const int32_t e : groups[g].experts) {
        if (layer.rank != nullptr) {
          EXPECT_EQ(layer.rank[e], number);
        }
        ++number;
      }
    }
  }
  EXPECT_EQ(compressed > 0, expect_csf);
}

TEST(CudaLoader, EveryByteArrivesInItsPlace) {
  for (const FormatId format : {FormatId::kBf16, FormatId::kNvfp4, FormatId::kMxfp4,
                                FormatId::kMxfp8, FormatId::kFp8Block}) {
    SCOPED_TRACE(formats::block_format(format).name);
    TinyOptions tiny;
    tiny.attention_bias = true;
    tiny.dense_layers = 1;
    tiny.layers = 3;
    tiny.format = [format](const std::string& module) {
      const bool attention = module.find("self_attn") != std::string::npos;
      return testing::tiny_is_mlp(module) || attention ? format : FormatId::kBf16;
    };
    expect_loaded(tiny, plan::Scales::kPlain, false);
  }
}

TEST(CudaLoader, MixesTiersAndCompressedScales) {
  TinyOptions tiny;
  tiny.hidden = 1024;
  tiny.inner = 512;
  tiny.experts = 24;
  tiny.format = [](const std::string& module) {
    if (module.find("k_proj") != std::string::npos) return FormatId::kMxfp8;
    if (module.find("o_proj") != std::string::npos) return FormatId::kFp8Channel;
    const size_t at = module.find(".experts.");
    if (at != std::string::npos && module.find("shared") == std::string::npos) {
      return std::stoi(module.substr(at + 9)) % 3 == 0 ? FormatId::kMxfp8 : FormatId::kNvfp4;
    }
    return testing::tiny_is_mlp(module) ? FormatId::kMxfp4 : FormatId::kBf16;
  };
  expect_loaded(tiny, plan::Scales::kPlain, false);
  expect_loaded(tiny, plan::Scales::kCsf, true);
}

TEST(CudaLoader, MatricesLargerThanASlot) {
  TinyOptions tiny;
  tiny.vocab = 20000;  // embedding and head of 20 MB
  tiny.hidden = 512;
  tiny.experts = 64;  // 37 MB of BF16 in a projection pair
  tiny.inner = 288;
  tiny.layers = 2;
  tiny.dense_layers = 1;
  tiny.dense_inner = 10240;  // gate and up of 21 MB must share one
  tiny.format = [](const std::string&) { return FormatId::kBf16; };
  expect_loaded(tiny, plan::Scales::kPlain, false);
}

TEST(CudaLoader, BadScalesAreNamed) {
  TinyOptions tiny;
  testing::TempDir dir;
  testing::TinyTensors tensors = testing::tiny_tensors(tiny);
  tensors.at("model.layers.1.mlp.experts.3.up_proj.weight_scale").bytes[17] = std::byte{0x7F};
  testing::write_tiny(dir.path(), tensors, testing::tiny_config(tiny));
  const recipe::Recipe recipe = std::move(recipe::read_recipe(dir.path()).value());
  const plan::CudaPlan plan = plan::make_cuda_plan(recipe, {}).value();
  ThreadPool pool(2);
  const Result<LoadedCudaWeights> loaded = load_cuda_weights(recipe, plan, 0, pool, {});
  ASSERT_FALSE(loaded);
  EXPECT_NE(loaded.error().message().find("layer 1 expert 3 up"), std::string::npos)
      << loaded.error().message();
}

}  // namespace
}  // namespace nibble::load
