#include "kernels/embed/embed.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace nibble::kernels {
namespace {

using formats::FormatId;
using formats::MatrixView;
using formats::ScaleKind;

/// A table of 37 rows of random bytes, at an odd address: nothing is promised about alignment.
struct Table {
  Table(FormatId format, ScaleKind scale_kind, int64_t cols) {
    view.format = format;
    view.scale_kind = scale_kind;
    view.rows = 37;
    view.cols = cols;
    std::mt19937 random(9);
    const auto fill = [&](std::vector<std::byte>& bytes, int64_t n, int limit) {
      bytes.resize(static_cast<size_t>(n + 1));
      for (std::byte& b : bytes)
        b = static_cast<std::byte>(random() % static_cast<unsigned>(limit));
      return bytes.data() + 1;
    };
    view.codes = fill(codes, view.rows * formats::code_row_bytes(format, cols), 256);
    if (scale_kind != ScaleKind::kNone) {
      view.scales = fill(scales, formats::scale_plane_bytes(view), 127);
    }
  }
  MatrixView view;
  std::vector<std::byte> codes, scales;
};

TEST(Embed, EqualsTheReferenceDecoder) {
  const struct {
    FormatId format;
    ScaleKind scale;
  } cases[] = {{FormatId::kF32, ScaleKind::kNone},
               {FormatId::kBf16, ScaleKind::kNone},
               {FormatId::kF16, ScaleKind::kNone},
               {FormatId::kNvfp4, ScaleKind::kE4M3},
               {FormatId::kMxfp4, ScaleKind::kE8M0}};
  std::vector<int32_t> tokens = {0, 36, 5, 5, 17};
  for (int32_t t = 0; t < 100; ++t) tokens.push_back(t * 7 % 37);
  for (const auto& c : cases) {
    for (const int64_t cols : {32, 96}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(c.format) << " " << cols);
      const Table table(c.format, c.scale, cols);
      std::vector<float> want(static_cast<size_t>(cols) * tokens.size());
      for (size_t t = 0; t < tokens.size(); ++t) {
        formats::decode_rows(table.view, tokens[t], 1, want.data() + t * static_cast<size_t>(cols));
      }
      for (const int threads : {1, 3}) {
        ThreadPool pool(threads);
        const Exec exec{.pool = &pool};
        std::vector<float> got(want.size());
        embed(exec, table.view, tokens.data(), static_cast<int64_t>(tokens.size()), got.data());
        EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0);
        embed(exec, table.view, tokens.data(), 0, nullptr);
      }
    }
  }
}

}  // namespace
}  // namespace nibble::kernels
