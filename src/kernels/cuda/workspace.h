// The scratch of one layer call: one function sizes and carves it. Host code and kernels share the
// view.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/moe_layer.h"

namespace nibble::kernels::cuda {

constexpr int kMinTileTokens = 16;  // smallest token tile of any geometry: bounds the tile count

/// Up to kMaxTileTokens rows of one expert, the unit that row blocks are multiplied with.
struct TokenTile {
  int expert;     // number inside its group
  int row_begin;  // in the sorted rows; a multiple of 8
  int rows;       // valid rows; storage is padded to a multiple of 8
  int unused;
};

/// Places in MoeWorkspace::counters, which the route kernel sets.
constexpr int kGroupTiles = 0;  // [kMaxGroups + 1] first tile of each group
constexpr int kNextItem = 8;    // [2 * kMaxGroups] items taken in each launch, but for the first
                                // of each CTA, which is the CTA's number
constexpr int kCounters = 16;

/// The counters of Geometry::kFew. All are zero between launches.
struct FewCounters {
  int arrived;       // CTAs whose share of the first product is written
  unsigned through;  // CTAs that have seen all arrive
};

static_assert(sizeof(FewCounters) <= kMoeZeroedBytes);

/// Sorted rows: the slots (token * top_k + k) grouped by expert, every expert's group starting at a
/// multiple of 8. `capacity` rows exist; padding rows hold leftovers that nothing reads back.
struct MoeWorkspace {
  FewCounters* few = nullptr;  // first, so that all layers sharing the memory agree on its place
  int64_t capacity = 0;
  int* counters = nullptr;     // [kCounters]
  TokenTile* tiles = nullptr;  // [max_tiles]
  int* done = nullptr;         // [max_tiles] row blocks of the first product finished
  int* slot_of_row = nullptr;  // [capacity]
  int* row_of_slot = nullptr;  // [tokens * top_k]
  int* unit_of_row = nullptr;  // [capacity] where the token's activations begin in x, / 16 bytes
  // BF16, columns as column_slot says. For Geometry::kWide [chunks(hidden)][capacity][128], sorted
  // and swizzled (chunk_offset); else [tokens][chunks(hidden)][128].
  uint8_t* x = nullptr;
  uint8_t* h = nullptr;        // [chunks(inter)][capacity][128] sorted and swizzled
  uint16_t* shares = nullptr;  // [tokens * top_k][hidden] BF16, router weight applied
  int64_t bytes = 0;
};

/// With base == nullptr only sizes.
MoeWorkspace carve_workspace(const MoeShape& shape, int64_t tokens, std::byte* base);

/// Byte offset of 16-byte unit `unit` of sorted row `row` in chunk `chunk`: the 128-byte swizzle of
/// wgmma, so that rows reach shared memory by plain bulk copies.
NIBBLE_HD inline int64_t chunk_offset(int64_t capacity, int64_t chunk, int64_t row, int unit) {
  return (chunk * capacity + row) * kRowBytes + 16 * (unit ^ static_cast<int>(row & 7));
}

}  // namespace nibble::kernels::cuda
