#include "kernels/repack/repack.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "formats/element.h"
#include "kernels/cpu/tile16.h"

namespace nibble::kernels {
namespace {

using formats::FormatId;
using formats::MatrixView;
using formats::ScaleKind;

constexpr int64_t kLineBytes = 64;  // sixteen dwords, one a lane

template <typename T>
T read(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <typename T>
void write(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof(T));
}

/// Dword `line` of a lane within a block.
std::byte* dword_at(std::byte* block, int64_t line, int64_t lane) {
  return block + line * kLineBytes + lane * 4;
}
const std::byte* dword_at(const std::byte* block, int64_t line, int64_t lane) {
  return block + line * kLineBytes + lane * 4;
}

/// Nibbles 0..7 (low first) to 0, 2, 4, 6, 1, 3, 5, 7; and back.
uint32_t split_nibbles(uint32_t x) {
  auto compress = [](uint32_t v) {
    v &= 0x0F0F0F0Fu;
    v = (v | v >> 4) & 0x00FF00FFu;
    return (v | v >> 8) & 0xFFFFu;
  };
  return compress(x) | compress(x >> 4) << 16;
}
uint32_t join_nibbles(uint32_t x) {
  auto spread = [](uint32_t v) {
    v = (v | v << 8) & 0x00FF00FFu;
    return (v | v << 4) & 0x0F0F0F0Fu;
  };
  return spread(x & 0xFFFFu) | spread(x >> 16) << 4;
}

/// Bytes 0, 1, 2, 3 to 0, 2, 1, 3: its own inverse.
uint32_t swap_middle(uint32_t x) {
  return (x & 0xFF0000FFu) | (x & 0x0000FF00u) << 8 | (x & 0x00FF0000u) >> 8;
}

// One block of one row: `bytes` of row codes (fewer than a whole block at the tail) to the lane's
// dwords, and back.

uint32_t as_stored(uint32_t x) { return x; }  // BF16 pairs and FP32

template <uint32_t (*kTurn)(uint32_t)>
void put_dwords(const std::byte* row, int64_t bytes, std::byte* block, int64_t lane) {
  for (int64_t line = 0; line * 4 < bytes; ++line) {
    uint32_t word = 0;
    std::memcpy(&word, row + line * 4, static_cast<size_t>(std::min<int64_t>(4, bytes - line * 4)));
    write(dword_at(block, line, lane), kTurn(word));
  }
}
/// The same for all sixteen rows of a whole block of `lines` dwords: what nearly all of a load is.
template <uint32_t (*kTurn)(uint32_t)>
void put_dword_lines(const std::byte* rows, int64_t row_bytes, int64_t lines, std::byte* block) {
  for (int64_t line = 0; line < lines; ++line) {
    uint32_t words[kTileRows];
    for (int64_t i = 0; i < kTileRows; ++i)
      words[i] = read<uint32_t>(rows + i * row_bytes + line * 4);
    for (uint32_t& word : words) word = kTurn(word);
    std::memcpy(block + line * kLineBytes, words, kLineBytes);
  }
}

void get_nibbles(const std::byte* block, int64_t lane, std::byte* row, int64_t bytes) {
  for (int64_t line = 0; line * 4 < bytes; ++line) {
    const uint32_t word = join_nibbles(read<uint32_t>(dword_at(block, line, lane)));
    std::memcpy(row + line * 4, &word, static_cast<size_t>(std::min<int64_t>(4, bytes - line * 4)));
  }
}

void get_bytes(const std::byte* block, int64_t lane, std::byte* row, int64_t bytes) {
  for (int64_t line = 0; line * 4 < bytes; ++line) {
    const uint32_t word = swap_middle(read<uint32_t>(dword_at(block, line, lane)));
    std::memcpy(row + line * 4, &word, static_cast<size_t>(std::min<int64_t>(4, bytes - line * 4)));
  }
}

void get_dwords(const std::byte* block, int64_t lane, std::byte* row, int64_t bytes) {
  for (int64_t line = 0; line * 4 < bytes; ++line) {
    std::memcpy(row + line * 4, dword_at(block, line, lane),
                static_cast<size_t>(std::min<int64_t>(4, bytes - line * 4)));
  }
}

void put_halves_as_f32(const std::byte* row, int64_t bytes, std::byte* block, int64_t lane) {
  for (int64_t col = 0; col * 2 < bytes; ++col) {
    write(dword_at(block, col, lane), formats::decode_f16(read<uint16_t>(row + col * 2)));
  }
}

/// NF3 geometry is whole groups of 32 columns: 12 bytes of codes.
void put_nf3(const std::byte* row, int64_t bytes, std::byte* block, int64_t lane) {
  NIBBLE_CHECK(bytes == 12, bytes);
  uint32_t words[3] = {};
  for (int col = 0; col < 32; ++col) {
    const int bit = col * 3;
    const uint32_t low = static_cast<uint32_t>(row[bit / 8]);
    const uint32_t high = bit % 8 > 5 ? static_cast<uint32_t>(row[bit / 8 + 1]) : 0u;
    const uint32_t code = ((low | high << 8) >> (bit % 8)) & 7u;
    const int pair = col / 2;
    const int half = col % 2 * 16;
    if (pair < 15) {
      words[pair / 5] |= code << (half + 3 * (pair % 5));
    } else {
      for (int i = 0; i < 3; ++i) words[i] |= ((code >> i) & 1u) << (half + 15);
    }
  }
  for (int i = 0; i < 3; ++i) write(dword_at(block, i, lane), words[i]);
}
void get_nf3(const std::byte* block, int64_t lane, std::byte* row, int64_t bytes) {
  NIBBLE_CHECK(bytes == 12, bytes);
  uint32_t words[3];
  for (int i = 0; i < 3; ++i) words[i] = read<uint32_t>(dword_at(block, i, lane));
  std::memset(row, 0, 12);
  for (int col = 0; col < 32; ++col) {
    const int pair = col / 2;
    const int half = col % 2 * 16;
    uint32_t code = 0;
    if (pair < 15) {
      code = (words[pair / 5] >> (half + 3 * (pair % 5))) & 7u;
    } else {
      for (int i = 0; i < 3; ++i) code |= ((words[i] >> (half + 15)) & 1u) << i;
    }
    const int bit = col * 3;
    const uint32_t shifted = code << (bit % 8);
    row[bit / 8] |= static_cast<std::byte>(shifted & 0xFFu);
    if (bit % 8 > 5) row[bit / 8 + 1] |= static_cast<std::byte>(shifted >> 8);
  }
}

/// How rows of a format enter a block: one lane, and if the format is made of dwords, all sixteen.
struct Put {
  void (*lane)(const std::byte* row, int64_t bytes, std::byte* block, int64_t lane);
  void (*lines)(const std::byte* rows, int64_t row_bytes, int64_t lines, std::byte* block);
};

Put put_of(FormatId format) {
  switch (format) {
    case FormatId::kNvfp4:
    case FormatId::kMxfp4: return {put_dwords<split_nibbles>, put_dword_lines<split_nibbles>};
    case FormatId::kNf3: return {put_nf3, nullptr};
    case FormatId::kF32:
    case FormatId::kBf16: return {put_dwords<as_stored>, put_dword_lines<as_stored>};
    case FormatId::kF16: return {put_halves_as_f32, nullptr};
    case FormatId::kMxfp8:
    case FormatId::kFp8Block:
    case FormatId::kFp8Channel:
    case FormatId::kFp8Tensor: return {put_dwords<swap_middle>, put_dword_lines<swap_middle>};
  }
  return {};
}

void get_block(FormatId format, const std::byte* block, int64_t lane, std::byte* row,
               int64_t bytes) {
  switch (format) {
    case FormatId::kNvfp4:
    case FormatId::kMxfp4: return get_nibbles(block, lane, row, bytes);
    case FormatId::kNf3: return get_nf3(block, lane, row, bytes);
    case FormatId::kF32:
    case FormatId::kF16:
    case FormatId::kBf16: return get_dwords(block, lane, row, bytes);
    case FormatId::kMxfp8:
    case FormatId::kFp8Block:
    case FormatId::kFp8Channel:
    case FormatId::kFp8Tensor: return get_bytes(block, lane, row, bytes);
  }
}

void put_wide_scale(ScaleKind kind, uint32_t bits, std::byte* plane, int64_t index) {
  if (kind == ScaleKind::kF32) return write(plane + index * 4, bits);
  if (kind == ScaleKind::kBf16) {
    return write(plane + index * 2, static_cast<uint16_t>(bits >> 16));
  }
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  plane[index] = nan ? std::byte{0xFF} : static_cast<std::byte>(bits >> 23);  // 2^-127: exponent 0
}

bool byte_scales(FormatId format) {
  return format == FormatId::kNvfp4 || format == FormatId::kMxfp4 || format == FormatId::kMxfp8 ||
         format == FormatId::kNf3;
}

/// Calls visit(index in src plane, byte offset in the tiled plane) for every stored scale that the
/// tiles hold; for wide kinds a stored scale may be visited by several rows.
template <typename Visit>
void for_each_scale(const MatrixView& view, Visit&& visit) {
  const int64_t stride = tile_scale_bytes(view);
  if (byte_scales(view.format)) {
    const int64_t groups = view.cols / formats::block_format(view.format).group_cols;
    for (int64_t row = 0; row < view.rows; ++row) {
      const int64_t base = row / kTileRows * stride + row % kTileRows;
      for (int64_t g = 0; g < groups; ++g) visit(row * groups + g, base + g * kTileRows);
    }
  } else if (view.format == FormatId::kFp8Block) {
    const int64_t across = scale_block_cols(view);
    for (int64_t row = 0; row < view.rows; ++row) {
      const int64_t base = row / kTileRows * stride + row % kTileRows * 4;
      const int64_t first = (view.origin_row + row) / view.block_rows * across;
      for (int64_t c = 0; c < across; ++c) visit(first + c, base + c * kTileRows * 4);
    }
  } else if (view.format == FormatId::kFp8Channel) {
    for (int64_t row = 0; row < view.rows; ++row) visit(row, row * 4);
  } else if (view.format == FormatId::kFp8Tensor) {
    visit(0, 0);
  }
}

Result<void> check_tileable(const MatrixView& src) {
  NIBBLE_TRY(formats::check_geometry(src));
  if (src.format != FormatId::kFp8Block || scale_block_cols(src) == 1) return {};
  if (src.block_cols % 16 != 0 || src.origin_col % 16 != 0) {
    return Error(Code::kUnsupported,
                 cat("fp8_block: blocks of ", src.block_cols, " columns from column ",
                     src.origin_col, " of a block, the CPU kernels need multiples of 16"));
  }
  return {};
}

}  // namespace

TiledBytes tile16_bytes(const MatrixView& src) {
  const int64_t tiles = tile_count(src.rows);
  TiledBytes bytes;
  bytes.codes = tiles * tile_code_bytes(src);
  bytes.scales = src.format == FormatId::kFp8Tensor ? 4 : tiles * tile_scale_bytes(src);
  return bytes;
}

Result<tensor::TensorRef> repack_tile16(const MatrixView& src, std::span<std::byte> codes,
                                        std::span<std::byte> scales) {
  NIBBLE_TRY(check_tileable(src));
  const TiledBytes sizes = tile16_bytes(src);
  NIBBLE_CHECK(static_cast<int64_t>(codes.size()) == sizes.codes, codes.size(), " ", sizes.codes);
  const bool codes_only = src.scales == nullptr && scales.empty();
  NIBBLE_CHECK(codes_only || static_cast<int64_t>(scales.size()) == sizes.scales, scales.size(),
               " ", sizes.scales);

  const int64_t row_bytes = formats::code_row_bytes(src.format, src.cols);
  const int64_t src_block = kBlockCols * formats::block_format(src.format).code_bits / 8;
  const int64_t dst_block = tile_block_bytes(src.format);
  const int64_t tile_bytes = tile_code_bytes(src);
  const Put put = put_of(src.format);
  for (int64_t tile = 0; tile < tile_count(src.rows); ++tile) {
    std::byte* out = codes.data() + tile * tile_bytes;
    const int64_t lanes = std::min(kTileRows, src.rows - tile * kTileRows);
    // Every dword is written but for padding lanes and the padding of the last block.
    if (lanes < kTileRows) {
      std::memset(out, 0, static_cast<size_t>(tile_bytes));
    } else {
      std::memset(out + tile_bytes - dst_block, 0, static_cast<size_t>(dst_block));
    }
    const std::byte* rows = src.codes + tile * kTileRows * row_bytes;
    for (int64_t b = 0; b * src_block < row_bytes; ++b) {
      const int64_t bytes = std::min(src_block, row_bytes - b * src_block);
      if (lanes == kTileRows && bytes == src_block && put.lines != nullptr) {
        put.lines(rows + b * src_block, row_bytes, src_block / 4, out + b * dst_block);
        continue;
      }
      for (int64_t lane = 0; lane < lanes; ++lane) {
        put.lane(rows + lane * row_bytes + b * src_block, bytes, out + b * dst_block, lane);
      }
    }
  }

  if (!scales.empty()) std::memset(scales.data(), 0, scales.size());
  if (codes_only) {
    // The owner keeps the scales in another form.
  } else if (byte_scales(src.format)) {
    for_each_scale(
        src, [&](int64_t from, int64_t to) { scales[static_cast<size_t>(to)] = src.scales[from]; });
  } else {
    for_each_scale(src, [&](int64_t from, int64_t to) {
      write(scales.data() + to, formats::scale_value(src.scale_kind, src.scales, from));
    });
  }

  tensor::TensorRef tiled;
  tiled.view = src;
  if (src.format == FormatId::kF16) tiled.view.format = FormatId::kF32;
  tiled.view.codes = codes.data();
  tiled.view.scales = scales.empty() ? nullptr : scales.data();
  tiled.layout = tensor::Layout::kTile16;
  return tiled;
}

void unpack_tile16(const tensor::TensorRef& tiled, std::span<std::byte> codes,
                   std::span<std::byte> scales) {
  const MatrixView& view = tiled.view;
  NIBBLE_CHECK(tiled.layout == tensor::Layout::kTile16);
  const int64_t row_bytes = formats::code_row_bytes(view.format, view.cols);
  NIBBLE_CHECK(static_cast<int64_t>(codes.size()) == view.rows * row_bytes, codes.size());
  NIBBLE_CHECK(static_cast<int64_t>(scales.size()) == formats::scale_plane_bytes(view),
               scales.size());

  const int64_t dst_block = kBlockCols * formats::block_format(view.format).code_bits / 8;
  const int64_t src_block = tile_block_bytes(view.format);
  for (int64_t row = 0; row < view.rows; ++row) {
    const std::byte* in = view.codes + row / kTileRows * tile_code_bytes(view);
    std::byte* out = codes.data() + row * row_bytes;
    for (int64_t b = 0; b * dst_block < row_bytes; ++b) {
      get_block(view.format, in + b * src_block, row % kTileRows, out + b * dst_block,
                std::min(dst_block, row_bytes - b * dst_block));
    }
  }
  if (byte_scales(view.format)) {
    for_each_scale(view, [&](int64_t to, int64_t from) {
      scales[static_cast<size_t>(to)] = view.scales[from];
    });
  } else {
    for_each_scale(view, [&](int64_t to, int64_t from) {
      put_wide_scale(view.scale_kind, read<uint32_t>(view.scales + from), scales.data(), to);
    });
  }
}

}  // namespace nibble::kernels
