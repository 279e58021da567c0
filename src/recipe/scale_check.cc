// Scales that would poison a matrix: NaN, negative, or nothing but zeros. One pass that only
// collects, and a second one that finds the element where the first saw a fault.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "recipe/recipe.h"

namespace nibble::recipe {
namespace {

using formats::ScaleKind;

struct Seen {
  bool fault = false;  // NaN, infinite or negative somewhere
  bool nonzero = false;
};

bool faulty(float scale) { return !std::isfinite(scale) || scale < 0; }

/// Looks at eight byte scales at a time: false for scales of several bytes, and where a byte may be
/// a fault (any with a sign, or NaN). Byte by byte, as below, checking takes as long as reading.
bool plainly_fine(std::span<const std::byte> bytes, ScaleKind kind, bool& nonzero) {
  if (kind != ScaleKind::kE4M3 && kind != ScaleKind::kE8M0) return false;
  constexpr uint64_t kOnes = 0x0101010101010101, kHigh = 0x80 * kOnes;
  uint64_t doubtful = 0, any = 0;
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, bytes.data() + at, std::min<size_t>(8, bytes.size() - at));
    any |= eight;
    // E4M3: a sign, or 0x7F (NaN) carried into one. E8M0: 0xFF (NaN), a zero byte of the inverse.
    doubtful |= kind == ScaleKind::kE4M3 ? eight | (eight + kOnes) : (~eight - kOnes) & eight;
  }
  nonzero = any != 0 || kind == ScaleKind::kE8M0;  // E8M0: byte 0 is 2^-127
  return (doubtful & kHigh) == 0;
}

Seen scan(std::span<const std::byte> bytes, ScaleKind kind) {
  uint8_t fault = 0, any = 0;
  Seen seen;
  if (plainly_fine(bytes, kind, seen.nonzero)) return seen;
  if (kind == ScaleKind::kE4M3) {
    for (const std::byte raw : bytes) {
      const uint8_t code = std::to_integer<uint8_t>(raw);
      fault = static_cast<uint8_t>(fault | (code == 0x7F) | (code > 0x80));
      any = static_cast<uint8_t>(any | (code & 0x7F));
    }
    seen.fault = fault != 0;
    seen.nonzero = any != 0;
  } else if (kind == ScaleKind::kE8M0) {
    for (const std::byte raw : bytes) {
      fault = static_cast<uint8_t>(fault | (std::to_integer<uint8_t>(raw) == 0xFF));
    }
    seen.fault = fault != 0;
    seen.nonzero = true;  // byte 0 is 2^-127
  } else {
    const int64_t count = static_cast<int64_t>(bytes.size()) / formats::scale_bytes(kind);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = formats::scale_value(kind, bytes.data(), i);
      seen.fault = seen.fault || faulty(scale);
      seen.nonzero = seen.nonzero || scale != 0;
    }
  }
  return seen;
}

}  // namespace

Result<void> check_scales(const WeightKey& key, const Weight& weight,
                          std::span<const std::byte> scales) {
  const ScaleKind kind = weight.meta.scale_kind;
  const checkpoint::TensorInfo* tensor =
      weight.stored_csf() ? weight.csf_fixed.tensor : weight.scales.tensor;
  if (kind == ScaleKind::kNone || tensor == nullptr) return {};
  const std::string where = cat(key_text(key), ": tensor '", tensor->name, "'");
  const int64_t bytes = formats::scale_plane_bytes(weight.meta);
  if (static_cast<int64_t>(scales.size()) != bytes) {
    return Error(Code::kInvalidArgument,
                 cat(where, ": expected ", bytes, " scale bytes, found ", scales.size()));
  }
  const Seen seen = scan(scales, kind);
  const int64_t each = formats::scale_bytes(kind);
  for (int64_t i = 0; seen.fault && i < bytes / each; ++i) {
    const float scale = formats::scale_value(kind, scales.data(), i);
    if (!faulty(scale)) continue;
    return Error(Code::kCorruptInput, cat(where, " element ", weight.scales.begin / each + i,
                                          ": expected a finite scale that is not negative, found ",
                                          std::isnan(scale) ? std::string("NaN") : cat(scale)));
  }
  if (!seen.nonzero) {
    return Error(Code::kCorruptInput,
                 cat(where, ": every one of its ", bytes / each, " scales from element ",
                     weight.scales.begin / each, " is zero"));
  }
  return {};
}

}  // namespace nibble::recipe
