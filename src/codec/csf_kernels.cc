// Scalar inner loops (the reference for every other table) and the choice of the table. The codec
// stands below `device`, so it probes the CPU itself; NIBBLE_ISA means the same in both.
#include "codec/csf_kernels.h"

#include <algorithm>
#include <cstdlib>

namespace nibble::codec {
namespace {

int best_base(const uint8_t* row, int64_t n, int window) {
  // Four tables, so that equal neighbours do not wait for each other's increment.
  uint32_t counts[4][256] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[i % 4][row[i]];
  auto of = [&](int v) {
    return int64_t{counts[0][v]} + counts[1][v] + counts[2][v] + counts[3][v];
  };
  int64_t covered = 0;
  for (int v = 0; v < window; ++v) covered += of(v);
  int64_t most = covered;
  int best = 0;
  for (int base = 1; base + window <= 256; ++base) {
    covered += of(base + window - 1) - of(base - 1);
    if (covered > most) {
      most = covered;
      best = base;
    }
  }
  return best;
}

// Code of one byte, or 0 and one more exception word.
uint8_t code_of(uint8_t value, int base, int window, uint32_t position, uint32_t* words,
                int64_t& count) {
  const int delta = value - base;
  if (delta >= 0 && delta < window) return static_cast<uint8_t>(delta);
  words[count++] = uint32_t{value} << 24 | position;
  return 0;
}

int64_t pack_nvfp4(const uint8_t* row, int64_t n, int base, uint32_t position, uint8_t* packed,
                   uint32_t* words) {
  int64_t found = 0;
  for (int64_t c = 0; c < n; c += 2) {
    const uint32_t at = position + static_cast<uint32_t>(c);
    const uint8_t low = code_of(row[c], base, 16, at, words, found);
    const uint8_t high = code_of(row[c + 1], base, 16, at + 1, words, found);
    packed[c / 2] = static_cast<uint8_t>(low | high << 4);
  }
  return found;
}

int64_t pack_mxfp4(const uint8_t* row, int64_t n, int base, uint32_t position, uint8_t* packed,
                   uint32_t* words) {
  int64_t found = 0;
  for (int64_t c = 0; c < n; c += 8) {
    unsigned bits = 0;
    for (int64_t i = c; i < std::min(c + 8, n); ++i) {
      const uint32_t at = position + static_cast<uint32_t>(i);
      const unsigned code = code_of(row[i], base, 2, at, words, found);
      bits |= code << (i - c);
    }
    packed[c / 8] = static_cast<uint8_t>(bits);
  }
  return found;
}

void unpack_nvfp4(const uint8_t* slab, int64_t cols, uint8_t* out) {
  const uint8_t* packed = slab + 16;
  for (int r = 0; r < 16; ++r) {
    const uint8_t base = slab[r];
    for (int64_t j = 0; j < cols / 2; ++j) {
      out[2 * j] = static_cast<uint8_t>(base + (packed[j] & 15));
      out[2 * j + 1] = static_cast<uint8_t>(base + (packed[j] >> 4));
    }
    packed += cols / 2;
    out += cols;
  }
}

void unpack_mxfp4(const uint8_t* slab, int64_t cols, uint8_t* out) {
  const uint8_t* packed = slab + 16;
  for (int r = 0; r < 16; ++r) {
    const uint8_t base = slab[r];
    for (int64_t c = 0; c < cols; ++c) {
      out[c] = static_cast<uint8_t>(base + (packed[c / 8] >> (c % 8) & 1));
    }
    packed += (cols + 7) / 8;
    out += cols;
  }
}

void tile_nvfp4(const uint8_t* bases, const uint8_t* groups, int64_t groups_count, uint8_t* out) {
  for (int64_t j = 0; j < groups_count; ++j, groups += 16, out += 32) {
    for (int r = 0; r < 16; ++r) {
      out[r] = static_cast<uint8_t>(bases[r] + (groups[r] & 15));
      out[16 + r] = static_cast<uint8_t>(bases[r] + (groups[r] >> 4));
    }
  }
}

void tile_mxfp4(const uint8_t* bases, const uint8_t* groups, int64_t groups_count, uint8_t* out) {
  for (int64_t j = 0; j < groups_count; ++j, groups += 16) {
    for (int bit = 0; bit < 8; ++bit, out += 16) {
      for (int r = 0; r < 16; ++r) {
        out[r] = static_cast<uint8_t>(bases[r] + (groups[r] >> bit & 1));
      }
    }
  }
}

std::span<const CsfIsa> probe() {
  static constexpr CsfIsa kAll[] = {CsfIsa::kScalar, CsfIsa::kAvx2, CsfIsa::kAvx512};
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2")) return std::span(kAll, 1);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  return std::span(kAll, avx512 ? 3 : 2);
#else
  return std::span(kAll, 1);
#endif
}

CsfIsa choose() {
  CsfIsa wanted = csf_isas().back();
  if (const char* name = std::getenv("NIBBLE_ISA")) {
    if (std::string_view(name) == "scalar") wanted = CsfIsa::kScalar;
    if (std::string_view(name) == "avx2") wanted = CsfIsa::kAvx2;
  }
  return std::min(wanted, csf_isas().back());
}

}  // namespace

constinit const CsfKernels kCsfScalar = {best_base,    pack_nvfp4, pack_mxfp4, unpack_nvfp4,
                                         unpack_mxfp4, tile_nvfp4, tile_mxfp4};

std::string_view csf_isa_name(CsfIsa isa) {
  switch (isa) {
    case CsfIsa::kScalar: return "scalar";
    case CsfIsa::kAvx2: return "avx2";
    case CsfIsa::kAvx512: return "avx512";
  }
  return "unknown";
}

std::span<const CsfIsa> csf_isas() {
  static const std::span<const CsfIsa> found = probe();
  return found;
}

CsfIsa csf_isa() {
  static const CsfIsa chosen = choose();
  return chosen;
}

const CsfKernels& csf_kernels(CsfIsa isa) {
  NIBBLE_CHECK(isa <= csf_isas().back(), "this host lacks ", csf_isa_name(isa));
#if defined(__x86_64__)
  if (isa == CsfIsa::kAvx512) return kCsfAvx512;
  if (isa == CsfIsa::kAvx2) return kCsfAvx2;
#endif
  return kCsfScalar;
}

}  // namespace nibble::codec
