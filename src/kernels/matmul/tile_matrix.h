// A weight matrix with its tile kernel picked: what matmul.cc and moe.cc run.
#pragma once

#include "base/check.h"
#include "codec/csf_tile16.h"
#include "kernels/exec.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/tile_ops.h"
#include "tensor/tensor_ref.h"

namespace nibble::kernels {

inline const TileOps& tile_ops_of(device::Isa isa) {
#define NIBBLE_PICK_TILE_OPS(ns, value) \
  if (isa == value) return ns::tile_ops();
  NIBBLE_FOR_EACH_ISA(NIBBLE_PICK_TILE_OPS)
#undef NIBBLE_PICK_TILE_OPS
  NIBBLE_CHECK(false, "ISA ", device::isa_name(isa), " is not in this build");
}

/// One matrix with its kernel picked.
class TileMatrix {
 public:
  TileMatrix(const TileOps& ops, Activations activations, const tensor::TensorRef& w)
      : ref_(&w), view_(&w.view), kind_(pack_kind(ops, activations, w.view.format)) {
    NIBBLE_CHECK(w.layout == tensor::Layout::kTile16);
    fn_ = ops.tile_fn(w.view, kind_ == PackKind::kBf16);
    code_bytes_ = tile_code_bytes(w.view);
    scale_bytes_ = tile_scale_bytes(w.view);
    compressed_ = w.scale_encoding == tensor::ScaleEncoding::kCsf;
    if (compressed_) {
      csf_row_fn_ = ops.csf_row_fn(w.view, kind_ == PackKind::kBf16);
      const codec::CsfTile any = csf_tile(0);
      slab_bytes_ = codec::csf_slab_bytes(any.kind, any.cols);
    }
  }

  /// The activations this matrix multiplies with. FP32 weights (and F16 ones, widened) keep FP32.
  static PackKind pack_kind(const TileOps& ops, Activations activations, formats::FormatId format) {
    if (activations == Activations::kF32 || format == formats::FormatId::kF32) {
      return PackKind::kF32;
    }
    return ops.bf16_dot ? PackKind::kBf16 : PackKind::kRounded;
  }
  PackKind pack_kind() const { return kind_; }
  int64_t tiles() const { return tile_count(view_->rows); }
  /// True rows of a tile: 16 but for the last.
  int64_t lanes(int64_t tile) const {
    const int64_t left = view_->rows - tile * kTileRows;
    return left < kTileRows ? left : kTileRows;
  }

  void run(int64_t tile, const std::byte* x, int64_t x_block_stride, int64_t rows,
           float* sums) const {
    TileArgs args;
    args.view = view_;
    args.codes = view_->codes + tile * code_bytes_;
    args.x = x;
    args.x_block_stride = x_block_stride;
    args.rows = rows;
    args.sums = sums;
    if (compressed_) {
      const codec::CsfTile csf = csf_tile(tile);
      if (rows > 1 || csf_row_fn_ == nullptr) return run_decoded(csf, args);
      // One row reads the stream as it goes.
      args.scales = reinterpret_cast<const std::byte*>(csf.fixed);
      args.exceptions = csf.exceptions;
      args.exceptions_end = csf.exceptions + csf.exception_count;
      return csf_row_fn_(args);
    }
    args.scales = view_->scales + tile * scale_bytes_;
    fn_(args);
  }

 private:
  codec::CsfTile csf_tile(int64_t tile) const {
    const bool nvfp4 = view_->format == formats::FormatId::kNvfp4;
    codec::CsfTile csf;
    csf.kind = nvfp4 ? codec::CsfKind::kNvfp4 : codec::CsfKind::kMxfp4;
    csf.cols = view_->cols / (nvfp4 ? 16 : 32);
    csf.fixed = reinterpret_cast<const uint8_t*>(view_->scales) + tile * slab_bytes_;
    const uint32_t begin = ref_->exception_begin[tile];
    csf.exceptions = ref_->exceptions + begin;
    csf.exception_count = ref_->exception_begin[tile + 1] - begin;
    return csf;
  }

  /// Decodes this tile's scales, exceptions and all, and goes on as with plain ones. The scales
  /// have the same bits, so the sums have. Not inlined: its frame is large.
  [[gnu::noinline]] void run_decoded(const codec::CsfTile& csf, TileArgs& args) const {
    alignas(64) uint8_t scales[csf_scratch_bytes];
    codec::decode_csf_tile(csf, scales);
    args.scales = reinterpret_cast<const std::byte*>(scales);
    fn_(args);
  }

  static constexpr int64_t csf_scratch_bytes = codec::csf_tile_scratch_bytes(kMaxCsfColumns);
  const tensor::TensorRef* ref_;
  const formats::MatrixView* view_;
  bool compressed_ = false;
  PackKind kind_;
  TileFn fn_ = nullptr, csf_row_fn_ = nullptr;
  int64_t code_bytes_ = 0, scale_bytes_ = 0, slab_bytes_ = 0;
};

/// Rows of a row block for this k: their packed activations should stay in the L2 cache (half of
/// 1 MiB) while the weights stream by. A multiple of 8.
inline int64_t row_block(int64_t k) {
  const int64_t fit = (int64_t{512} << 10) / (block_count(k) * 128) / 8 * 8;
  return fit < 16 ? 16 : fit > kMaxRowBlock ? kMaxRowBlock : fit;
}

}  // namespace nibble::kernels
