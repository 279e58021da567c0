// What stored weight bits mean. One constant row per format; a new format is a row, a reference
// decoder and an exhaustive test. Source: OCP Microscaling Formats (MX) v1.0; NVFP4, FP8 and NF3 as
// the public checkpoints that use them define it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/result.h"
#include "formats/dtype.h"

namespace nibble::formats {

enum class FormatId : uint8_t {
  kF32,
  kF16,
  kBf16,
  kNvfp4,       // E2M1 codes, E4M3 scale per 16 columns, one FP32 global per matrix
  kMxfp4,       // E2M1 codes, E8M0 scale per 32 columns
  kMxfp8,       // E4M3 codes, E8M0 scale per 32 columns
  kFp8Block,    // E4M3 codes, FP32, BF16 or E8M0 scale per block_rows x block_cols
  kFp8Channel,  // E4M3 codes, FP32 or BF16 scale per row
  kFp8Tensor,   // E4M3 codes, one FP32 scale
  kNf3,         // 3-bit codes into 8 levels, E4M3 scale per 32 columns (plain or times 2^bias)
};
constexpr int kFormatCount = 10;

enum class ScaleKind : uint8_t { kNone, kE4M3, kE8M0, kF32, kBf16 };

struct BlockFormat {
  FormatId id;
  std::string_view name;  // as `nibble inspect` prints it: "nvfp4"
  int code_bits;          // bits of one element's code
  int group_cols;         // columns that share a scale; 0: not per column group
  ScaleKind scale;        // the usual scale kind; MatrixView says the actual one
  bool has_global;        // an FP32 factor per matrix
};
const BlockFormat& block_format(FormatId id);

/// NF3 levels as published, rounded to BF16 (the values every formula uses).
extern const std::array<float, 8> kNf3Levels;
/// Errors: kInvalidArgument unless all are finite and each is above the one before.
Result<void> check_nf3_levels(const std::array<float, 8>& levels);
/// Largest |MatrixView::nf3_bias_log2| that check_geometry takes.
constexpr int kMaxNf3BiasLog2 = 100;

/// One matrix exactly as the checkpoint stores it: row-major planes that are not owned.
/// codes  [rows, code_row_bytes]. Two E2M1 codes a byte, even column in the low nibble; eight NF3
///        codes in three bytes, word = sum code[j] << 3j, low byte first.
/// scales NVFP4 [rows, cols/16], MXFP4, MXFP8 and NF3 [rows, cols/32] bytes; block FP8
///        [ceil((origin_row+rows)/block_rows), ceil((origin_col+cols)/block_cols)] of scale_kind;
///        channel FP8 [rows]; tensor FP8 [1].
/// No alignment is promised for either plane.
struct MatrixView {
  FormatId format = FormatId::kBf16;
  ScaleKind scale_kind = ScaleKind::kNone;
  int64_t rows = 0, cols = 0;
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  float global = 1.0f;                     // NVFP4: g, which multiplies
  int64_t block_rows = 0, block_cols = 0;  // block FP8
  int64_t origin_row = 0,
          origin_col = 0;                // block FP8: first element's place inside its first block
  int nf3_bias_log2 = 0;                 // NF3: stored scale stands for e4m3 / 2^bias
  std::array<float, 8> nf3_levels = {};  // NF3: BF16-rounded, ascending
};

/// Bytes of one row of codes. cols must suit the format (even for 4 bits, multiple of 8 for NF3).
int64_t code_row_bytes(FormatId format, int64_t cols);
/// Bytes of the scale plane of `view` (its pointers are not read).
int64_t scale_plane_bytes(const MatrixView& view);
int64_t scale_bytes(ScaleKind kind);
/// Scale number `index` of a plane of `kind`, widened exactly; any alignment.
float scale_value(ScaleKind kind, const std::byte* plane, int64_t index);
/// Errors: kInvalidArgument naming the format if cols break its group or a size is not positive.
Result<void> check_geometry(const MatrixView& view);

/// Decodes rows [row_begin, row_begin + row_count) to float, out [row_count, cols]. The reference
/// everything is tested against: exact (formats spec, section 2), slow. A NaN scale makes its group
/// NaN. Thread-safe, allocates nothing. check_geometry must hold.
void decode_rows(const MatrixView& view, int64_t row_begin, int64_t row_count, float* out);

}  // namespace nibble::formats
