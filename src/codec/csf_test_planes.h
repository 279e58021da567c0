// For this folder's tests: random scale planes of every awkward sort, and the spec's encoder and
// decoder written as plainly as the spec says them. Shares no code with the codec.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "codec/csf.h"

namespace nibble::codec::testing {

using Bytes = std::vector<uint8_t>;

constexpr int kPlaneSorts = 9;

/// One row of the given sort. Values are drawn around `centre`.
inline void fill_row(int sort, int centre, std::mt19937& rng, uint8_t* row, int64_t cols) {
  auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  for (int64_t c = 0; c < cols; ++c) {
    int v = centre;
    switch (sort) {
      case 0: break;                                       // constant
      case 1: v += below(2); break;                        // fits every window
      case 2: v += below(16); break;                       // fits NVFP4's window
      case 3: v += below(5) + below(5) + below(5); break;  // a hump
      case 4: v = below(256); break;                       // dense exceptions
      case 5: v = below(2) == 0 ? 0 : 255; break;          // both ends, ties
      case 6: v += below(3) * 16 + below(2); break;        // far clusters, ties
      case 7:
        v = below(10) == 0 ? below(256) : v + below(4);  // sparse outliers
        break;
      default:  // a ladder: chained ties
        v = (v + static_cast<int>(c) * (1 + centre % 17)) % 256;
    }
    row[c] = static_cast<uint8_t>(std::clamp(v, 0, 255));
  }
}

/// [rows, cols]. Sort -1: every row of a sort of its own.
inline Bytes random_plane(int sort, int64_t rows, int64_t cols, std::mt19937& rng) {
  Bytes plane(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    const int row_sort = sort >= 0 ? sort : static_cast<int>(rng() % kPlaneSorts);
    static constexpr int kCentres[] = {0, 1, 14, 100, 115, 238, 240, 241, 246, 254, 255};
    const int centre = rng() % 3 == 0 ? kCentres[rng() % 11] : static_cast<int>(rng() % 256);
    fill_row(row_sort, centre, rng, plane.data() + r * cols, cols);
  }
  return plane;
}

/// Section 2, step by step.
inline CsfPlane reference_encode(CsfKind kind, int64_t rows, int64_t cols, const Bytes& plane) {
  const int window = kind == CsfKind::kNvfp4 ? 16 : 2;
  const int64_t width = kind == CsfKind::kNvfp4 ? cols / 2 : (cols + 7) / 8;
  CsfPlane out{kind, rows, cols, Bytes(static_cast<size_t>(rows / 16 * 16 * (1 + width))), {}};
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = plane.data() + r * cols;
    int of[256] = {};
    for (int64_t c = 0; c < cols; ++c) ++of[row[c]];
    int base = 0, most = -1;
    for (int b = 0; b <= 256 - window; ++b) {
      int count = 0;
      for (int v = b; v <= b + window - 1; ++v) count += of[v];
      if (count > most) {
        most = count;
        base = b;
      }
    }
    uint8_t* slab = out.fixed.data() + r / 16 * 16 * (1 + width);
    slab[r % 16] = static_cast<uint8_t>(base);
    uint8_t* packed = slab + 16 + r % 16 * width;
    for (int64_t c = 0; c < cols; ++c) {
      int code = row[c] - base;
      if (code < 0 || code >= window) {
        code = 0;
        out.exceptions.push_back(uint32_t{row[c]} << 24 | static_cast<uint32_t>(r * cols + c));
      }
      const int64_t at = kind == CsfKind::kNvfp4 ? c / 2 : c / 8;
      const int64_t shift = kind == CsfKind::kNvfp4 ? c % 2 * 4 : c % 8;
      packed[at] = static_cast<uint8_t>(packed[at] | code << shift);
    }
  }
  return out;
}

/// Section 1.
inline Bytes reference_decode(const CsfPlane& stored) {
  const bool nvfp4 = stored.kind == CsfKind::kNvfp4;
  const int64_t cols = stored.cols, width = nvfp4 ? cols / 2 : (cols + 7) / 8;
  Bytes plane;
  for (int64_t r = 0; r < stored.rows; ++r) {
    const uint8_t* slab = stored.fixed.data() + r / 16 * 16 * (1 + width);
    const uint8_t* packed = slab + 16 + r % 16 * width;
    for (int64_t c = 0; c < cols; ++c) {
      const int code = nvfp4 ? packed[c / 2] >> c % 2 * 4 & 15 : packed[c / 8] >> c % 8 & 1;
      plane.push_back(static_cast<uint8_t>(slab[r % 16] + code));
    }
  }
  for (const uint32_t word : stored.exceptions) {
    plane[word & 0xFFFFFF] = static_cast<uint8_t>(word >> 24);
  }
  return plane;
}

/// A legal stream that the encoder would not write: bases anywhere in range, any code under an
/// exception, exceptions that repeat what the codes say.
inline CsfPlane random_legal_stream(CsfKind kind, int64_t rows, int64_t cols, std::mt19937& rng) {
  const Bytes plane = random_plane(-1, rows, cols, rng);
  CsfPlane out = reference_encode(kind, rows, cols, plane);
  const int64_t width = kind == CsfKind::kNvfp4 ? cols / 2 : (cols + 7) / 8;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* slab = out.fixed.data() + r / 16 * 16 * (1 + width);
    const unsigned bases = kind == CsfKind::kNvfp4 ? 241 : 255;
    slab[r % 16] = static_cast<uint8_t>(rng() % bases);
    for (int64_t i = 0; i < width; ++i) {
      uint8_t& byte = slab[16 + r % 16 * width + i];
      byte = static_cast<uint8_t>(rng());
      const int64_t used = cols - 8 * i;
      if (kind == CsfKind::kMxfp4 && used < 8) {
        byte = static_cast<uint8_t>(byte & ((1 << used) - 1));
      }
    }
  }
  out.exceptions.clear();
  const unsigned rarity = 1 + static_cast<unsigned>(rng() % 12);
  for (uint32_t i = 0; i < plane.size(); ++i) {
    if (rng() % rarity == 0) out.exceptions.push_back(uint32_t{plane[i]} << 24 | i);
  }
  return out;
}

/// The sub-plane [r0, r1) x [c0, c1).
inline Bytes slice(const Bytes& plane, int64_t cols, int64_t r0, int64_t r1, int64_t c0,
                   int64_t c1) {
  Bytes out;
  for (int64_t r = r0; r < r1; ++r) {
    out.insert(out.end(), plane.begin() + r * cols + c0, plane.begin() + r * cols + c1);
  }
  return out;
}

inline Bytes decode(const CsfPlane& stored, CsfIsa isa = csf_isa()) {
  Bytes out(static_cast<size_t>(stored.rows * stored.cols));
  NIBBLE_CHECK(decode_csf(stored.view(), out, isa).has_value());
  return out;
}

inline CsfPlane encode(CsfKind kind, int64_t rows, int64_t cols, const Bytes& plane,
                       CsfIsa isa = csf_isa()) {
  Result<CsfPlane> out = encode_csf(kind, rows, cols, plane, isa);
  NIBBLE_CHECK(out.has_value());
  return *std::move(out);
}

/// Runs the reader's checks over a plane that is already in memory.
inline Result<CsfView> reread(const CsfPlane& stored, int64_t rows, int64_t cols) {
  const int64_t slabs = stored.rows / 16;
  const std::vector<int64_t> fixed_shape = {
      slabs, slabs == 0 ? 0 : static_cast<int64_t>(stored.fixed.size()) / slabs};
  const std::vector<int64_t> exception_shape = {static_cast<int64_t>(stored.exceptions.size())};
  CsfStored facts;
  facts.fixed_shape = fixed_shape;
  facts.exception_shape = exception_shape;
  facts.fixed = stored.fixed;
  facts.exceptions = {reinterpret_cast<const uint8_t*>(stored.exceptions.data()),
                      stored.exceptions.size() * 4};
  return read_csf(stored.kind, rows, cols, facts);
}

}  // namespace nibble::codec::testing
