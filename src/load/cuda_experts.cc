// One projection of a group of experts on its way to the GPU. Scale planes of all its experts come
// first and stay staged on the device; if they are to be compressed, they are encoded there and the
// form is chosen by what they encode to; then codes arrive slot by slot and are packed in that
// form.
#include <algorithm>
#include <cmath>

#include "formats/element.h"
#include "kernels/cuda/csf_encode.h"
#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/packing.h"
#include "load/cuda_builder.h"

namespace nibble::load {

using formats::FormatId;
using kernels::cuda::CsfIndexArgs;
using kernels::cuda::CsfStack;
using kernels::cuda::CsfStreams;
using kernels::cuda::ExpertMatrices;
using kernels::cuda::MoeWeights;
using kernels::cuda::PackArgs;
using kernels::cuda::Product;
using kernels::cuda::ScaleForm;
using recipe::Role;
using recipe::Weight;
using recipe::WeightKey;

namespace {

int64_t round16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace

struct CudaBuilder::Projection {
  int32_t layer = 0;
  Product product = Product::kDown;
  int sources = 1;  // gate and up, or down
  Role roles[2] = {};
  std::vector<WeightKey> keys[2];
  std::vector<const Weight*> of[2];
  formats::MatrixView meta;  // of the first expert; the rows of every source are equal
  int64_t hidden = 0, inter = 0;
  int64_t scale_bytes = 0, code_bytes = 0;  // of one matrix, as staged
  int64_t scale_batch = 1, code_batch = 1;  // experts of a slot
  std::byte* scales[2] = {};
  // With scales compressed:
  CsfStack stack;
  CsfStreams streams[2];
  uint32_t count[2] = {};
  ExpertMatrices out;
  std::byte* packed = nullptr;

  int64_t experts() const { return static_cast<int64_t>(of[0].size()); }
  bool has_scales() const { return scale_bytes > 0; }
  /// Staged codes of n experts of one source.
  int64_t stacked_codes(int64_t n) const { return round16(n * code_bytes); }
};

// Everything this projection reads, in the order that stage_scales() and pack() take it.
Result<void> CudaBuilder::enqueue(Projection& p) {
  p.scale_bytes = staged_scale_bytes(p.meta);
  p.code_bytes = p.meta.rows * formats::code_row_bytes(p.meta.format, p.meta.cols);
  p.scale_batch = p.has_scales() ? ring_->slot_bytes() / p.scale_bytes : 1;
  p.code_batch = (ring_->slot_bytes() - 32) / (p.sources * p.code_bytes);
  if (p.scale_batch == 0 || p.code_batch == 0) {
    return Error(Code::kUnsupported,
                 cat(key_text(p.keys[0][0]), ": codes of ", p.code_bytes, " and scales of ",
                     p.scale_bytes, " bytes, the loading ring's slots hold ", ring_->slot_bytes()));
  }
  for (int s = 0; s < p.sources && p.has_scales(); ++s) {
    for (int64_t e = 0; e < p.experts(); e += p.scale_batch) {
      const int64_t n = std::min(p.scale_batch, p.experts() - e);
      std::vector<RingRead> reads;
      for (int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<size_t>(e + i);
        reads.push_back({p.keys[s][at], p.of[s][at], staged_scale_part(p.meta), 0, p.scale_bytes,
                         i * p.scale_bytes});
      }
      ring_->enqueue(std::move(reads), n * p.scale_bytes);
    }
  }
  for (int64_t e = 0; e < p.experts(); e += p.code_batch) {
    const int64_t n = std::min(p.code_batch, p.experts() - e);
    std::vector<RingRead> reads;
    for (int s = 0; s < p.sources; ++s) {
      for (int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<size_t>(e + i);
        reads.push_back({p.keys[s][at], p.of[s][at], RingRead::Part::kCodes, 0, p.code_bytes,
                         s * p.stacked_codes(n) + i * p.code_bytes});
      }
    }
    ring_->enqueue(std::move(reads), p.sources * p.stacked_codes(n));
  }
  return {};
}

Result<void> CudaBuilder::stage_scales(Projection& p) {
  if (!p.has_scales()) return {};
  for (int s = 0; s < p.sources; ++s) {
    NIBBLE_TRY(p.scales[s], scratch(kScales + s, p.experts() * p.scale_bytes));
    for (int64_t e = 0; e < p.experts(); e += p.scale_batch) {
      const int64_t n = std::min(p.scale_batch, p.experts() - e);
      NIBBLE_TRY(take_to(p.scales[s] + e * p.scale_bytes, n * p.scale_bytes));
      for (int64_t i = 0; i < n; ++i) {
        count(p.of[s][static_cast<size_t>(e + i)]->stored_scale_bytes());
      }
    }
  }
  return {};
}

Result<void> CudaBuilder::encode(Projection& p, int s) {
  const int64_t cells = p.experts() * p.stack.rows * p.stack.cols;
  CsfStreams& out = p.streams[s];
  out.capacity = cells / 6 + 1;  // with more it would not save a tenth
  NIBBLE_TRY(std::byte * fixed,
             scratch(kFixed + s, p.experts() * codec::csf_fixed_bytes(p.stack.kind, p.stack.rows,
                                                                      p.stack.cols)));
  NIBBLE_TRY(std::byte * words, scratch(kExceptions + s, 4 * out.capacity));
  NIBBLE_TRY(std::byte * begin, scratch(kRowBegin + s, 4 * (p.experts() * p.stack.rows + 1)));
  NIBBLE_TRY(std::byte * work, scratch(kEncode, kernels::cuda::csf_encode_scratch_bytes(p.stack)));
  out.fixed = reinterpret_cast<uint8_t*>(fixed);
  out.exceptions = reinterpret_cast<uint32_t*>(words);
  out.row_begin = reinterpret_cast<uint32_t*>(begin);
  return kernels::cuda::csf_encode(p.stack, reinterpret_cast<const uint8_t*>(p.scales[s]), out,
                                   work, stream());
}

// Chooses the form of the scales; with kCsf the streams are ready for csf_index.
Result<void> CudaBuilder::decide(Projection& p) {
  if (!compress() || !kernels::cuda::has_csf(p.meta.format)) return {};
  p.stack.kind = kernels::cuda::csf_kind_of(p.meta.format);
  p.stack.experts = p.experts();
  p.stack.rows = p.meta.rows;
  p.stack.cols = p.meta.cols / kernels::cuda::group_cols(p.meta.format);
  if (!codec::check_csf_geometry(p.stack.kind, p.stack.rows, p.stack.cols)) return {};
  for (int s = 0; s < p.sources; ++s) NIBBLE_TRY(encode(p, s));
  bool fits = true;
  int64_t exceptions = 0;
  for (int s = 0; s < p.sources; ++s) {
    NIBBLE_TRY(
        cuda_ok(cudaMemcpyAsync(&p.count[s], p.streams[s].row_begin + p.experts() * p.stack.rows, 4,
                                cudaMemcpyDeviceToHost, stream()),
                "loading"));
  }
  NIBBLE_TRY(ring_->finish());
  for (int s = 0; s < p.sources; ++s) {
    fits = fits && p.count[s] <= p.streams[s].capacity;
    exceptions += p.count[s];
  }
  ScaleReport report;
  report.layer = p.layer;
  report.role = p.roles[0];
  report.most_kept = 0.9;
  report.planes = p.experts() * p.sources;
  report.scales = report.planes * p.scale_bytes;
  const auto bytes = [&](ScaleForm form) {
    return p.experts() *
           kernels::cuda::packed_scale_bytes(p.meta.format, p.product, p.hidden, p.inter, form);
  };
  report.plain_bytes = bytes(ScaleForm::kPlain);
  report.exceptions = exceptions;
  report.csf_bytes = bytes(ScaleForm::kCsf) + 4 * exceptions;
  scales_.push_back(report);
  if (fits && report.compressed()) p.out.scale_form = ScaleForm::kCsf;
  return {};
}

Result<void> CudaBuilder::pack(Projection& p) {
  const int64_t packed_bytes =
      kernels::cuda::packed_bytes(p.meta.format, p.product, p.hidden, p.inter, p.out.scale_form);
  NIBBLE_TRY(p.packed, keep(p.experts() * packed_bytes));
  int* bad = flags(cat("layer ", p.layer, ' ', recipe::role_name(p.roles[0])));
  for (int64_t e = 0; e < p.experts(); e += p.code_batch) {
    const int64_t n = std::min(p.code_batch, p.experts() - e);
    NIBBLE_TRY(std::byte * staged, ring_->take());
    PackArgs args;
    args.format = p.meta.format;
    args.product = p.product;
    args.experts = n;
    args.hidden = p.hidden;
    args.inter = p.inter;
    for (int s = 0; s < p.sources; ++s) {
      kernels::cuda::RowPlanes& planes = s == 0 ? args.first : args.second;
      planes.codes = reinterpret_cast<uint8_t*>(staged + s * p.stacked_codes(n));
      if (p.has_scales()) {
        planes.scales = reinterpret_cast<uint8_t*>(p.scales[s] + e * p.scale_bytes);
      }
    }
    args.packed = reinterpret_cast<uint8_t*>(p.packed + e * packed_bytes);
    args.scale_form = p.out.scale_form;
    if (p.meta.format == FormatId::kFp8Block) {
      args.block_rows = p.meta.block_rows;
      args.block_cols = p.meta.block_cols;
    }
    NIBBLE_TRY(cuda_ok(kernels::cuda::launch_pack(args, bad, stream()), "packing experts"));
    count(p.sources * n * p.code_bytes);
  }
  return {};
}

Result<void> CudaBuilder::index(Projection& p) {
  CsfIndexArgs args;
  args.format = p.meta.format;
  args.product = p.product;
  args.experts = p.experts();
  args.hidden = p.hidden;
  args.inter = p.inter;
  args.first = {p.streams[0], p.meta.rows, 0};
  if (p.sources == 2) args.second = {p.streams[1], p.meta.rows, 0};
  args.packed = reinterpret_cast<uint8_t*>(p.packed);
  NIBBLE_TRY(std::byte * words, keep(4 * (int64_t{p.count[0]} + p.count[1]) + 16));
  args.exceptions = reinterpret_cast<uint32_t*>(words);
  NIBBLE_TRY(kernels::cuda::csf_index(args, stream()));
  p.out.exceptions = args.exceptions;
  return {};
}

Result<void> CudaBuilder::declare(int32_t layer, Product product, Role first, Role second,
                                  const std::vector<int32_t>& experts, ExpertMatrices* out) {
  auto p = std::make_shared<Projection>();
  p->layer = layer;
  p->product = product;
  p->sources = product == Product::kGateUp ? 2 : 1;
  p->roles[0] = first;
  p->roles[1] = second;
  for (int s = 0; s < p->sources; ++s) {
    for (const int32_t e : experts) {
      p->keys[s].push_back({layer, p->roles[s], e});
      p->of[s].push_back(recipe_.find(p->keys[s].back()));
      NIBBLE_CHECK(p->of[s].back() != nullptr, key_text(p->keys[s].back()));
    }
  }
  p->meta = p->of[0][0]->meta;
  p->hidden = product == Product::kGateUp ? p->meta.cols : p->meta.rows;
  p->inter = product == Product::kGateUp ? p->meta.rows : p->meta.cols;
  p->out.format = p->meta.format;
  if (p->meta.format == FormatId::kNf3) {
    for (size_t i = 0; i < 8; ++i) p->out.levels[i] = formats::encode_bf16(p->meta.nf3_levels[i]);
  }
  NIBBLE_TRY(enqueue(*p));
  defer([this, p, out]() -> Result<void> {
    NIBBLE_TRY(*out, place(*p));
    return {};
  });
  return {};
}

Result<ExpertMatrices> CudaBuilder::place(Projection& p) {
  NIBBLE_TRY(stage_scales(p));
  NIBBLE_TRY(decide(p));
  NIBBLE_TRY(pack(p));
  if (p.out.scale_form == ScaleForm::kCsf) NIBBLE_TRY(index(p));
  p.out.tiles = p.packed;
  return p.out;
}

Result<void> CudaBuilder::experts(int32_t layer, Role gate, Role up, Role down,
                                  const std::vector<int32_t>& experts, MoeWeights* out) {
  out->experts = static_cast<int64_t>(experts.size());
  NIBBLE_TRY(declare(layer, Product::kGateUp, gate, up, experts, &out->gate_up));
  NIBBLE_TRY(declare(layer, Product::kDown, down, down, experts, &out->down));
  const auto factors = [&](Role role) {
    std::vector<float> values;
    for (const int32_t e : experts) {
      const formats::MatrixView& v = recipe_.find({layer, role, e})->meta;
      float factor = kernels::cuda::register_unit(v.format);
      if (v.format == FormatId::kNvfp4) factor *= v.global;
      if (v.format == FormatId::kNf3) factor = std::ldexp(factor, -v.nf3_bias_log2);
      values.push_back(factor);
    }
    return constant(values);
  };
  NIBBLE_TRY(out->gate_factor, factors(gate));
  NIBBLE_TRY(out->up_factor, factors(up));
  NIBBLE_TRY(out->down_factor, factors(down));
  return {};
}

}  // namespace nibble::load
