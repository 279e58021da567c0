// CSF: lossless compression of the scale planes of FP4 weights. A plane is R rows of C bytes; each
// row keeps one base and a short code per byte (value = base + code), and the bytes outside the
// base's window are listed as exceptions. Bytes to bytes: no byte is ever read as a number.
// Leaves to others: names of tensors (csf_inventory.h), cutting (csf_cut.h), resident forms
// (csf_resident.h for GPUs, csf_tile16.h for CPU kernels). Source: csf spec, sections 1 to 3.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nibble::codec {

static_assert(std::endian::native == std::endian::little, "exception words are little-endian");

enum class CsfKind : uint8_t {
  kNvfp4,  // window of 16 values, 4-bit codes; E4M3 scale per 16 weights
  kMxfp4,  // window of 2 values, 1-bit codes; E8M0 scale per 32 weights
};

/// "nvfp4" or "mxfp4", as containers spell it.
std::string_view csf_kind_name(CsfKind kind);
/// The codec's full name in containers: "byte-window4-fixed-stream-u24-exceptions/1", ...
std::string_view csf_codec_name(CsfKind kind);

constexpr int csf_window(CsfKind kind) { return kind == CsfKind::kNvfp4 ? 16 : 2; }
/// Largest legal base: base + code never passes 255.
constexpr int csf_max_base(CsfKind kind) { return 256 - csf_window(kind); }

constexpr int64_t kCsfSlabRows = 16;
constexpr int64_t kCsfMaxPositions = int64_t{1} << 24;

/// An exception word is (value << 24) + position, position = row * cols + column.
constexpr uint32_t csf_position(uint32_t word) { return word & 0xFFFFFF; }
constexpr uint8_t csf_value(uint32_t word) { return static_cast<uint8_t>(word >> 24); }

/// Can a plane of this size be stored at all? Checked without overflow for any int64_t.
/// Errors: kInvalidArgument starting with rows_not_16 (also for cols < 1), columns_odd or
/// position_limit, in that order.
Result<void> check_csf_geometry(CsfKind kind, int64_t rows, int64_t cols);

/// Packed bytes of one row's codes: cols/2 (NVFP4), ceil(cols/8) (MXFP4).
constexpr int64_t csf_row_bytes(CsfKind kind, int64_t cols) {
  return kind == CsfKind::kNvfp4 ? cols / 2 : (cols + 7) / 8;
}
/// Bytes of one slab (16 bases, then 16 packed rows) and of the whole fixed tensor, whose shape is
/// [rows/16, csf_slab_bytes]. check_csf_geometry must hold.
constexpr int64_t csf_slab_bytes(CsfKind kind, int64_t cols) {
  return kCsfSlabRows * (1 + csf_row_bytes(kind, cols));
}
constexpr int64_t csf_fixed_bytes(CsfKind kind, int64_t rows, int64_t cols) {
  return rows / kCsfSlabRows * csf_slab_bytes(kind, cols);
}
/// Bytes of both tensors together.
constexpr int64_t csf_stored_bytes(CsfKind kind, int64_t rows, int64_t cols, int64_t exceptions) {
  return csf_fixed_bytes(kind, rows, cols) + 4 * exceptions;
}

struct CsfStored;

/// A compressed plane already proved to be legal (section 3), so nobody checks again. Made only by
/// read_csf() and CsfPlane::view(). Does not own its bytes; exceptions may be unaligned.
class CsfView {
 public:
  CsfKind kind() const { return kind_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t slabs() const { return rows_ / kCsfSlabRows; }
  /// [rows/16, csf_slab_bytes]
  std::span<const uint8_t> fixed() const { return fixed_; }
  const uint8_t* slab(int64_t index) const {
    return fixed_.data() + index * csf_slab_bytes(kind_, cols_);
  }
  int64_t exception_count() const { return exception_count_; }
  uint32_t exception(int64_t index) const {
    uint32_t word;
    std::memcpy(&word, exceptions_ + 4 * index, 4);
    return word;
  }
  /// Index of the first exception whose position is at least `position`. O(log n).
  int64_t first_exception_at(int64_t position) const;
  int64_t stored_bytes() const { return csf_stored_bytes(kind_, rows_, cols_, exception_count_); }
  /// Is the stored form smaller than the plane? A writer keeps the plane plain otherwise.
  bool shrinks() const { return stored_bytes() < rows_ * cols_; }

 private:
  friend struct CsfPlane;
  friend Result<CsfView> read_csf(CsfKind, int64_t, int64_t, const CsfStored&);
  CsfView(CsfKind kind, int64_t rows, int64_t cols, std::span<const uint8_t> fixed,
          const uint8_t* exceptions, int64_t exception_count)
      : kind_(kind),
        rows_(rows),
        cols_(cols),
        fixed_(fixed),
        exceptions_(exceptions),
        exception_count_(exception_count) {}
  CsfKind kind_;
  int64_t rows_, cols_;
  std::span<const uint8_t> fixed_;
  const uint8_t* exceptions_;
  int64_t exception_count_;
};

/// A compressed plane that owns its bytes, as the functions of this folder return it. Whoever fills
/// one from elsewhere must use read_csf() instead of view(), which trusts the fields.
struct CsfPlane {
  CsfKind kind = CsfKind::kNvfp4;
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> fixed;
  std::vector<uint32_t> exceptions;
  /// Valid while this object lives unchanged.
  CsfView view() const {
    return CsfView(kind, rows, cols, fixed, reinterpret_cast<const uint8_t*>(exceptions.data()),
                   static_cast<int64_t>(exceptions.size()));
  }
  bool operator==(const CsfPlane&) const = default;
};

/// Two tensors as a container stores them; nothing is proved yet.
struct CsfStored {
  bool fixed_is_u8 = true, exceptions_are_u32 = true;
  std::span<const int64_t> fixed_shape, exception_shape;
  std::span<const uint8_t> fixed, exceptions;  // raw bytes, any alignment
};

/// Proves a stored stream legal for the plane that the weight's shape implies (rows, cols are never
/// derived from the stream) and returns a view of the same bytes. Reads each base, the tail bits
/// and every exception once.
/// Errors: kCorruptInput whose message starts with the first fault's name, in this order:
/// rows_not_16, columns_odd, position_limit, fixed_dtype, exception_dtype, fixed_shape,
/// exception_shape, base_range, tail_bits, exception_order, exception_range. Byte counts that
/// disagree with a shape count as that shape's fault.
Result<CsfView> read_csf(CsfKind kind, int64_t rows, int64_t cols, const CsfStored& stored);

/// Which vector instructions the codec uses. All produce the same bytes.
enum class CsfIsa : uint8_t { kScalar, kAvx2, kAvx512 };
std::string_view csf_isa_name(CsfIsa isa);
/// Those this build and host can run, best last. kScalar is always there.
std::span<const CsfIsa> csf_isas();
/// Chosen once: the best one, or the best not above NIBBLE_ISA (scalar, avx2, else best).
CsfIsa csf_isa();

/// Canonical stream of `plane` [rows, cols]: per row the lowest base whose window covers the most
/// bytes; bytes outside get code 0 and an exception. Equal planes give equal bytes.
/// Errors: those of check_csf_geometry; kInvalidArgument if plane.size() != rows * cols.
Result<CsfPlane> encode_csf(CsfKind kind, int64_t rows, int64_t cols,
                            std::span<const uint8_t> plane, CsfIsa isa = csf_isa());

/// Expands the whole plane into out [rows, cols]. Thread-safe, allocates nothing.
/// Errors: kInvalidArgument if out.size() != rows * cols; `out` is then untouched.
Result<void> decode_csf(const CsfView& view, std::span<uint8_t> out, CsfIsa isa = csf_isa());
/// Expands rows [row_begin, row_end), both multiples of 16, into out [row_end - row_begin, cols].
/// Errors: kInvalidArgument if the range or out.size() is wrong; `out` is then untouched.
Result<void> decode_csf_rows(const CsfView& view, int64_t row_begin, int64_t row_end,
                             std::span<uint8_t> out, CsfIsa isa = csf_isa());

/// Is this legal stream the one the encoder writes? Decodes and encodes again.
bool is_canonical_csf(const CsfView& view);

}  // namespace nibble::codec
