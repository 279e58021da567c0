#include "codec/csf_resident.h"

#include <algorithm>
#include <array>
#include <bit>

namespace nibble::codec {
namespace {

constexpr int64_t kHeaderBytes = 1024;
constexpr int64_t kHeaderFlagAt = 668;  // U32 number 167
constexpr int64_t kRecordBytes = 32;

Result<void> check_resident(std::span<const CsfView> experts) {
  auto bad = [](const std::string& text) {
    return Error(Code::kInvalidArgument, "resident_geometry: " + text);
  };
  if (experts.empty()) return bad("no experts");
  const int64_t rows = experts[0].rows(), cols = experts[0].cols();
  for (const CsfView& view : experts) {
    if (view.kind() != CsfKind::kNvfp4) return bad("MXFP4 has no resident form");
    if (view.rows() != rows || view.cols() != cols) {
      return bad(cat("experts of ", rows, " x ", cols, " and ", view.rows(), " x ", view.cols()));
    }
  }
  if (rows % kCsfResidentSlabRows != 0 || cols % 4 != 0) {
    return bad(
        cat("a plane of ", rows, " x ", cols, "; rows must be a multiple of 128, columns of 4"));
  }
  return {};
}

int64_t resident_slab_bytes(int64_t cols) { return kCsfResidentSlabRows * (1 + cols / 2); }

// One expert's fixed bytes between stored and resident order; Copy says which way.
template <typename Stored, typename Resident, typename Copy>
void walk_fixed(int64_t rows, int64_t cols, Stored* stored, Resident* resident, Copy copy) {
  for (int64_t row = 0; row < rows; ++row) {
    Stored* slab = stored + row / kCsfSlabRows * csf_slab_bytes(CsfKind::kNvfp4, cols);
    Stored* packed = slab + kCsfSlabRows + row % kCsfSlabRows * (cols / 2);
    Resident* to = resident + row / kCsfResidentSlabRows * resident_slab_bytes(cols);
    const int64_t r = row % kCsfResidentSlabRows;
    copy(slab[row % kCsfSlabRows], to[csf_resident_base_at(r)]);
    for (int64_t j = 0; j < cols / 2; ++j) copy(packed[j], to[csf_resident_code_at(r, 2 * j)]);
  }
}

void fixed_to_resident(const CsfView& view, uint8_t* out) {
  walk_fixed(view.rows(), view.cols(), view.fixed().data(), out,
             [](const uint8_t& stored, uint8_t& resident) { resident = stored; });
}

// Which of a tile's 128 words contain an exception.
struct TileMask {
  std::array<uint32_t, 4> bits{};
};

// Marks the words of one slab of 128 rows: masks[column group].
void mark_words(const CsfView& view, int64_t slab, std::vector<TileMask>& masks) {
  const int64_t cols = view.cols(), origin = slab * kCsfResidentSlabRows * cols;
  std::fill(masks.begin(), masks.end(), TileMask{});
  const int64_t end = view.first_exception_at(origin + kCsfResidentSlabRows * cols);
  for (int64_t i = view.first_exception_at(origin); i < end; ++i) {
    const int64_t at = csf_position(view.exception(i)) - origin;
    const int64_t n = csf_resident_base_at(at / cols);  // the word's number is its base's place
    masks[static_cast<size_t>(at % cols / 4)].bits[static_cast<size_t>(n / 32)] |= 1U << n % 32;
  }
}

}  // namespace

Result<CsfResident> make_csf_resident(std::span<const CsfView> experts) {
  NIBBLE_TRY(check_resident(experts));
  const int64_t rows = experts[0].rows(), cols = experts[0].cols();
  const auto count = static_cast<int64_t>(experts.size());
  CsfResident out{count, rows, cols, {}, {}, {}};
  const int64_t expert_bytes = csf_fixed_bytes(CsfKind::kNvfp4, rows, cols);
  out.fixed.resize(static_cast<size_t>(count * expert_bytes));
  int64_t total = 0;
  for (const CsfView& view : experts) total += view.exception_count();
  out.exceptions.reserve(static_cast<size_t>(total));
  for (int64_t e = 0; e < count; ++e) {
    const CsfView& view = experts[static_cast<size_t>(e)];
    fixed_to_resident(view, out.fixed.data() + e * expert_bytes);
    const auto before = static_cast<int64_t>(out.exceptions.size());
    for (int64_t s = 0; s <= rows / kCsfResidentSlabRows; ++s) {
      const int64_t first = view.first_exception_at(s * kCsfResidentSlabRows * cols);
      out.task_offsets.push_back(before + first);
    }
    for (int64_t i = 0; i < view.exception_count(); ++i) {
      out.exceptions.push_back(view.exception(i));
    }
  }
  return out;
}

CsfPlane resident_to_stored(const CsfResident& resident, int64_t expert) {
  NIBBLE_CHECK(0 <= expert && expert < resident.experts, expert, " of ", resident.experts);
  const int64_t rows = resident.rows, cols = resident.cols;
  const int64_t bytes = csf_fixed_bytes(CsfKind::kNvfp4, rows, cols);
  CsfPlane out{CsfKind::kNvfp4, rows, cols, {}, {}};
  out.fixed.resize(static_cast<size_t>(bytes));
  walk_fixed(rows, cols, out.fixed.data(), resident.fixed.data() + expert * bytes,
             [](uint8_t& stored, const uint8_t& held) { stored = held; });
  const int64_t offsets = rows / kCsfResidentSlabRows + 1;
  const int64_t* of_expert = resident.task_offsets.data() + expert * offsets;
  out.exceptions.assign(resident.exceptions.begin() + of_expert[0],
                        resident.exceptions.begin() + of_expert[offsets - 1]);
  return out;
}

Result<CsfWordIndex> make_csf_word_index(std::span<const CsfView> experts) {
  NIBBLE_TRY(check_resident(experts));
  const int64_t rows = experts[0].rows(), cols = experts[0].cols(), groups = cols / 4;
  CsfWordIndex out{static_cast<int64_t>(experts.size()), rows, cols, {}};
  const int64_t expert_bytes = csf_fixed_bytes(CsfKind::kNvfp4, rows, cols);
  const int64_t records_at = kHeaderBytes + out.experts * expert_bytes;
  out.bytes.resize(static_cast<size_t>(records_at + out.tiles() * kRecordBytes));
  const uint32_t flag = 1;
  std::memcpy(out.bytes.data() + kHeaderFlagAt, &flag, 4);
  std::vector<uint32_t> words;
  std::vector<uint8_t> plane(static_cast<size_t>(kCsfResidentSlabRows * cols));
  std::vector<TileMask> masks(static_cast<size_t>(groups));
  uint8_t* record_to = out.bytes.data() + records_at;
  for (int64_t e = 0; e < out.experts; ++e) {
    const CsfView& view = experts[static_cast<size_t>(e)];
    fixed_to_resident(view, out.bytes.data() + kHeaderBytes + e * expert_bytes);
    for (int64_t s = 0; s < rows / kCsfResidentSlabRows; ++s) {
      const int64_t row = s * kCsfResidentSlabRows;
      NIBBLE_TRY(decode_csf_rows(view, row, row + kCsfResidentSlabRows, plane));
      mark_words(view, s, masks);
      for (int64_t g = 0; g < groups; ++g) {
        std::array<uint32_t, 8> record{static_cast<uint32_t>(words.size())};
        uint32_t in_tile = 0;
        for (uint32_t q = 0; q < 4; ++q) {
          record[1] |= in_tile << 8 * q;
          uint32_t bits = record[2 + q] = masks[static_cast<size_t>(g)].bits[q];
          for (; bits != 0; bits &= bits - 1, ++in_tile) {
            const int64_t n = int64_t{32} * q + std::countr_zero(bits);
            const int64_t at = (32 * (n % 4) + n / 4) * cols + 4 * g;
            uint32_t word;
            std::memcpy(&word, plane.data() + at, 4);
            words.push_back(word);
          }
        }
        if (words.size() > UINT32_MAX) {
          return Error(Code::kResourceExhausted, "csf word index: 2^32 replacement words or more");
        }
        record[6] = static_cast<uint32_t>(words.size());
        std::memcpy(record_to, record.data(), kRecordBytes);
        record_to += kRecordBytes;
      }
    }
  }
  const size_t words_at = out.bytes.size();
  out.bytes.resize(words_at + (4 * words.size() + 15) / 16 * 16);
  if (!words.empty()) std::memcpy(out.bytes.data() + words_at, words.data(), 4 * words.size());
  return out;
}

uint32_t csf_index_word(const CsfWordIndex& index, int64_t tile, int n) {
  NIBBLE_CHECK(0 <= tile && tile < index.tiles() && 0 <= n && n < 128, tile, ' ', n);
  const int64_t expert_bytes = csf_fixed_bytes(CsfKind::kNvfp4, index.rows, index.cols);
  const int64_t groups = index.cols / 4, slab = tile / groups, group = tile % groups;
  const uint8_t* records = index.bytes.data() + kHeaderBytes + index.experts * expert_bytes;
  std::array<uint32_t, 8> record;
  std::memcpy(record.data(), records + tile * kRecordBytes, kRecordBytes);
  const uint32_t mask = record[static_cast<size_t>(2 + n / 32)], bit = 1U << n % 32;
  if ((mask & bit) != 0) {
    const uint32_t rank =
        (record[1] >> n / 32 * 8 & 255) + static_cast<uint32_t>(std::popcount(mask & (bit - 1)));
    uint32_t word;
    std::memcpy(&word, records + index.tiles() * kRecordBytes + 4 * (int64_t{record[0]} + rank), 4);
    return word;
  }
  const uint8_t* fixed = index.bytes.data() + kHeaderBytes + slab * resident_slab_bytes(index.cols);
  uint16_t codes;
  std::memcpy(&codes, fixed + kCsfResidentSlabRows + group * 256 + n * 2, 2);
  const uint32_t spread =
      (codes & 0xFU) | (codes & 0xF0U) << 4 | (codes & 0xF00U) << 8 | (codes & 0xF000U) << 12;
  return fixed[n] * 0x01010101U + spread;
}

}  // namespace nibble::codec
