// Arbitrary bytes as a stored stream: the reader refuses them, or everything that takes a proved
// view works on it. Input: kind, rows/16, cols, exception count (one byte each), column range and
// padding (three bytes), then fixed and exceptions.
#include <algorithm>

#include "codec/csf_cut.h"
#include "codec/csf_resident.h"
#include "codec/csf_tile16.h"

namespace nibble::codec {
namespace {

void require(bool ok, const char* what) { NIBBLE_CHECK(ok, what); }

// The stream fuzzers rarely find by chance: bases, tail bits and positions folded into range.
void make_legal(CsfPlane& plane) {
  const int64_t slab_bytes = csf_slab_bytes(plane.kind, plane.cols);
  const int64_t width = csf_row_bytes(plane.kind, plane.cols), used = plane.cols % 8;
  for (int64_t r = 0; r < plane.rows; ++r) {
    uint8_t* slab = plane.fixed.data() + r / 16 * slab_bytes;
    slab[r % 16] = static_cast<uint8_t>(slab[r % 16] % (csf_max_base(plane.kind) + 1));
    uint8_t& last = slab[16 + (r % 16 + 1) * width - 1];
    if (plane.kind == CsfKind::kMxfp4 && used != 0) {
      last = static_cast<uint8_t>(last & ((1 << used) - 1));
    }
  }
  const auto cells = static_cast<uint32_t>(plane.rows * plane.cols);
  for (uint32_t& word : plane.exceptions) word = (word & 0xFF000000) | csf_position(word) % cells;
  auto position_less = [](uint32_t a, uint32_t b) { return csf_position(a) < csf_position(b); };
  auto position_equal = [](uint32_t a, uint32_t b) { return csf_position(a) == csf_position(b); };
  auto& words = plane.exceptions;
  std::stable_sort(words.begin(), words.end(), position_less);
  words.erase(std::unique(words.begin(), words.end(), position_equal), words.end());
}

std::vector<uint8_t> decoded(const CsfView& view, CsfIsa isa) {
  std::vector<uint8_t> out(static_cast<size_t>(view.rows() * view.cols()));
  require(decode_csf(view, out, isa).has_value(), "decode");
  return out;
}

void use(const CsfView& view, int64_t c0, int64_t c1, int64_t pad) {
  const std::vector<uint8_t> plane = decoded(view, CsfIsa::kScalar);
  for (const CsfIsa isa : csf_isas()) {
    require(decoded(view, isa) == plane, "ISAs disagree");
    const Result<CsfPlane> again = encode_csf(view.kind(), view.rows(), view.cols(), plane, isa);
    require(again && decoded(again->view(), isa) == plane, "encode");
    require(is_canonical_csf(again->view()), "canonical");
  }
  const CsfCut cut{0, view.rows(), c0, c1, pad == 0 ? 0 : view.rows() + 16 * (pad % 4), 0};
  if (const Result<CsfPlane> part = cut_csf(view, cut)) {
    const std::vector<uint8_t> kept = decoded(part->view(), csf_isa());
    for (int64_t r = 0; r < view.rows(); ++r) {
      require(std::equal(kept.begin() + r * part->cols, kept.begin() + (r + 1) * part->cols,
                         plane.begin() + r * view.cols() + c0),
              "cut");
    }
  }
  if (view.kind() == CsfKind::kMxfp4) require(clamp_csf_247(view).has_value(), "clamp");
  const CsfView twice[] = {view, view};
  require(stack_csf(twice).has_value(), "stack");
  const CsfTiles tiles = stored_to_tiles(view);
  std::vector<uint8_t> scratch(static_cast<size_t>(csf_tile_scratch_bytes(view.cols())));
  for (int64_t t = 0; t < view.slabs(); ++t) {
    decode_csf_tile(csf_tile(tiles, t), scratch.data());
    for (int64_t i = 0; i < 16 * view.cols(); ++i) {
      const int64_t row = t * 16 + i % 16, col = i / 16;
      require(
          scratch[static_cast<size_t>(i)] == plane[static_cast<size_t>(row * view.cols() + col)],
          "tile");
    }
  }
  const CsfPlane back = tiles_to_stored(tiles);
  require(std::ranges::equal(back.fixed, view.fixed()), "tiles back");
  if (const Result<CsfResident> resident = make_csf_resident(twice)) {
    require(resident_to_stored(*resident, 1) == back, "resident back");
    const Result<CsfWordIndex> index = make_csf_word_index(twice);
    require(index.has_value(), "index");
    for (int64_t tile = 0; tile < index->tiles(); ++tile) csf_index_word(*index, tile, 127);
  }
}

void fuzz(std::span<const uint8_t> data) {
  if (data.size() < 8) return;
  const CsfKind kind = data[0] & 1 ? CsfKind::kMxfp4 : CsfKind::kNvfp4;
  const int64_t rows = 16 * (data[1] % 9), cols = data[2] % 80;
  const int64_t c0 = data[4] % 80, c1 = data[5] % 80, pad = data[6];
  const bool fold = data[0] & 2;
  std::span<const uint8_t> rest = data.subspan(8);
  const bool sized = check_csf_geometry(kind, rows, cols).has_value();
  const int64_t want = sized ? csf_fixed_bytes(kind, rows, cols) : 0;
  CsfPlane plane{kind, rows, cols, {}, {}};
  plane.fixed.assign(rest.begin(), rest.begin() + std::min<int64_t>(std::ssize(rest), want));
  rest = rest.subspan(plane.fixed.size());
  if (fold) plane.fixed.resize(static_cast<size_t>(want));
  plane.exceptions.resize(std::min<size_t>(rest.size() / 4, data[3]));
  if (!plane.exceptions.empty()) {
    std::memcpy(plane.exceptions.data(), rest.data(), 4 * plane.exceptions.size());
  }
  if (fold && sized) make_legal(plane);
  const int64_t fixed_shape[] = {rows / 16, sized ? csf_slab_bytes(kind, cols) : 1};
  const int64_t exception_shape[] = {std::ssize(plane.exceptions)};
  CsfStored stored{true, true, fixed_shape, exception_shape, plane.fixed, {}};
  stored.exceptions = {reinterpret_cast<const uint8_t*>(plane.exceptions.data()),
                       4 * plane.exceptions.size()};
  const Result<CsfView> view = read_csf(kind, rows, cols, stored);
  require(view.has_value() || !fold || !sized, "a legal stream was refused");
  if (view) use(*view, c0, c1, pad);
}

}  // namespace
}  // namespace nibble::codec

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  nibble::codec::fuzz({data, size});
  return 0;
}
