// Runs every test vector of the element, packing, quantizer, decoder and cut ops, bit for bit.
// NIBBLE_VECTORS names another folder of vectors.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "formats/block_format.h"
#include "formats/cut.h"
#include "formats/element.h"
#include "formats/packing.h"
#include "formats/quantize.h"
#include "formats/scale_tile.h"
#include "support/vector_file.h"

namespace nibble::formats {
namespace {

using nibble::testing::Blob;
using nibble::testing::Case;
using nibble::testing::VectorSet;

const VectorSet& vectors() {
  static const VectorSet set = VectorSet::load();
  return set;
}

/// Runs `body` on every case of `op`; there must be some. Prints the total.
template <typename Body>
void for_each_case(const std::string& op, Body&& body) {
  size_t run = 0, refused = 0;
  for (const Case& c : vectors().cases(op)) {
    SCOPED_TRACE(c.id);
    body(c);
    ++run;
    refused += !c.error.empty();
  }
  EXPECT_GT(run, 0u) << "no case of " << op << " in " << vectors().dir();
  std::printf("%-24s %3zu cases, %zu of them refusals\n", op.c_str(), run, refused);
}

void expect_bytes(const std::vector<std::byte>& got, const Blob& want, const char* what) {
  EXPECT_FALSE(want.bytes.empty()) << what;
  EXPECT_TRUE(got == want.bytes) << what << " differs";
}

void expect_floats(const std::vector<float>& got, const Blob& blob, const char* what) {
  ASSERT_EQ(blob.dtype, "F32");
  const std::vector<float> want = blob.as<float>();
  ASSERT_EQ(got.size(), want.size()) << what;
  ASSERT_FALSE(want.empty()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
        << what << " " << i;
  }
}

void expect_bf16(const std::vector<float>& got, const Blob& blob) {
  ASSERT_EQ(blob.dtype, "BF16");
  const std::vector<uint16_t> want = blob.as<uint16_t>();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const uint16_t bits = encode_bf16(got[i]);
    if (std::isnan(decode_bf16(want[i])) && std::isnan(decode_bf16(bits))) continue;
    ASSERT_EQ(bits, want[i]) << "bf16 " << i;
  }
}

/// out.f32 and out.bf16 are what the planes mean.
void expect_values(const Case& c, const MatrixView& view) {
  const Result<void> geometry = check_geometry(view);
  ASSERT_TRUE(geometry) << geometry.error().message();
  std::vector<float> got(static_cast<size_t>(view.rows * view.cols));
  decode_rows(view, 0, view.rows, got.data());
  expect_floats(got, c.out("f32"), "f32");
  expect_bf16(got, c.out("bf16"));
}

struct Weights {
  std::vector<float> values;
  int64_t rows, cols;
};
Weights weights(const Blob& blob) {
  EXPECT_EQ(blob.dtype, "BF16");
  Weights w{std::vector<float>(static_cast<size_t>(blob.elems())), blob.shape.at(0),
            blob.shape.at(1)};
  decode_bf16_row(blob.bytes.data(), blob.elems(), w.values.data());
  return w;
}

MatrixView grouped_view(FormatId format, const Blob& codes, const Blob& scale) {
  MatrixView view;
  view.format = format;
  view.scale_kind = block_format(format).scale;
  view.rows = scale.shape.at(0);
  view.cols = scale.shape.at(1) * block_format(format).group_cols;
  view.codes = codes.bytes.data();
  view.scales = scale.bytes.data();
  if (format == FormatId::kNf3) view.nf3_levels = kNf3Levels;
  EXPECT_EQ(static_cast<int64_t>(codes.bytes.size()),
            view.rows * code_row_bytes(format, view.cols));
  return view;
}

/// The refusal that the case names: text and code. Returns false if the case must succeed.
bool expect_refusal(const Case& c, const Result<QuantizedMatrix>& got) {
  if (c.error.empty()) {
    EXPECT_TRUE(got) << got.error().message();
    return !got;
  }
  EXPECT_FALSE(got) << "must be refused: " << c.error;
  if (!got) {
    EXPECT_EQ(got.error().message().rfind(c.error, 0), 0u) << got.error().message();
    EXPECT_EQ(got.error().code(),
              c.error == "non_finite_input" ? Code::kCorruptInput : Code::kInvalidArgument);
    EXPECT_NE(got.error().message().find("'w'"), std::string::npos);
    if (c.error == "non_finite_input") {
      EXPECT_NE(got.error().message().find("element 35"), std::string::npos);  // [1, 3] of [2, 32]
    }
  }
  return true;
}

float decode_any(const std::string& code, int c) {
  const uint8_t byte = static_cast<uint8_t>(c);
  if (code == "e2m1") return decode_e2m1(byte);
  if (code == "e4m3") return decode_e4m3(byte);
  if (code == "e5m2") return decode_e5m2(byte);
  if (code == "e8m0") return decode_e8m0(byte);
  EXPECT_EQ(code, "nf3");
  return kNf3Levels[static_cast<size_t>(c)];
}

TEST(Vectors, ElementDecode) {
  for_each_case("element.decode", [](const Case& c) {
    const std::string code = c.params.at("code");
    const Blob want = c.out("value");
    std::vector<float> got;
    for (int i = 0; i < want.elems(); ++i) got.push_back(decode_any(code, i));
    expect_floats(got, want, "value");
    if (c.has_out("unrounded")) {
      std::vector<float> rounded;
      for (const float level : c.out("unrounded").as<float>()) {
        rounded.push_back(decode_bf16(encode_bf16(level)));
      }
      expect_floats(rounded, want, "rounded levels");
    }
  });
}

TEST(Vectors, ElementDecodeList) {
  for_each_case("element.decode_list", [](const Case& c) {
    ASSERT_EQ(c.params.at("code"), "fp16");
    std::vector<float> got;
    for (const uint16_t bits : c.in("code").as<uint16_t>()) got.push_back(decode_f16(bits));
    expect_floats(got, c.out("value"), "value");
  });
}

TEST(Vectors, ElementEncode) {
  for_each_case("element.encode", [](const Case& c) {
    const std::string code = c.params.at("code");
    const std::vector<float> x = c.in("x").as<float>();
    ASSERT_FALSE(x.empty());
    const Blob out = c.out("code");
    if (code == "bf16" || code == "fp16") {
      const std::vector<uint16_t> want = out.as<uint16_t>();
      ASSERT_EQ(want.size(), x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const uint16_t got = code == "bf16" ? encode_bf16(x[i]) : encode_f16(x[i]);
        ASSERT_EQ(got, want[i]) << x[i];
      }
      return;
    }
    const std::vector<uint8_t> want = out.as<uint8_t>();
    ASSERT_EQ(want.size(), x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const uint8_t got = code == "e2m1"   ? encode_e2m1(x[i])
                          : code == "e4m3" ? encode_e4m3(x[i])
                                           : encode_e5m2(x[i]);
      ASSERT_EQ(got, want[i]) << x[i];
    }
  });
}

/// The scale a byte stands for, seen through the decoder: a group whose codes are all level 1.
TEST(Vectors, Nf3ScaleDecode) {
  for_each_case("nf3.scale_decode", [](const Case& c) {
    const std::vector<std::byte> codes(12 * 256, std::byte{0xFF});
    std::vector<std::byte> scales;
    for (int i = 0; i < 256; ++i) scales.push_back(static_cast<std::byte>(i));
    MatrixView view;
    view.format = FormatId::kNf3;
    view.scale_kind = ScaleKind::kE4M3;
    view.rows = 256;
    view.cols = 32;
    view.codes = codes.data();
    view.scales = scales.data();
    view.nf3_bias_log2 = c.params.at("bias_log2");
    view.nf3_levels = kNf3Levels;
    ASSERT_EQ(view.nf3_levels[7], 1.0f);
    std::vector<float> decoded(256 * 32), got;
    decode_rows(view, 0, 256, decoded.data());
    for (size_t i = 0; i < 256; ++i) got.push_back(decoded[32 * i]);
    expect_floats(got, c.out("value"), "value");
  });
}

MxRounding rounding(const Case& c) {
  const std::string mode = c.params.value("mode", "ceil");
  if (mode == "floor") return MxRounding::kFloor;
  if (mode == "even") return MxRounding::kEven;
  EXPECT_EQ(mode, "ceil");
  return MxRounding::kCeil;
}

TEST(Vectors, MxScale) {
  for_each_case("mx.scale", [](const Case& c) {
    const FormatId format = c.params.at("element") == "e2m1" ? FormatId::kMxfp4 : FormatId::kMxfp8;
    std::vector<std::byte> got;
    for (const float amax : c.in("amax").as<float>()) {
      got.push_back(static_cast<std::byte>(mx_scale_byte(amax, format, rounding(c))));
    }
    expect_bytes(got, c.out("byte"), "byte");
  });
}

TEST(Vectors, Packing) {
  for (const bool nf3 : {false, true}) {
    for_each_case(nf3 ? "pack.nf3" : "pack.nibbles", [nf3](const Case& c) {
      const std::vector<uint8_t> codes = c.in("codes").as<uint8_t>();
      const int64_t n = static_cast<int64_t>(codes.size());
      const Blob packed = c.out("packed");
      std::vector<std::byte> got(packed.bytes.size());
      std::vector<uint8_t> back(codes.size());
      (nf3 ? pack_nf3 : pack_nibbles)(codes.data(), n, got.data());
      expect_bytes(got, packed, "packed");
      (nf3 ? unpack_nf3 : unpack_nibbles)(packed.bytes.data(), n, back.data());
      EXPECT_EQ(back, codes);
    });
  }
}

TEST(Vectors, Tile128x4) {
  for_each_case("layout.tile_128x4", [](const Case& c) {
    const Blob plane = c.in("plane");
    const int64_t rows = plane.shape.at(0), cols = plane.shape.at(1);
    std::vector<std::byte> tiles(static_cast<size_t>(scale_tile_bytes(rows, cols)));
    scales_to_tiles(plane.bytes.data(), rows, cols, tiles.data());
    expect_bytes(tiles, c.out("tiles"), "tiles");
    std::vector<std::byte> back(plane.bytes.size());
    scales_from_tiles(tiles.data(), rows, cols, back.data());
    expect_bytes(back, plane, "plane");
  });
}

Nvfp4Profile profile(const Case& c) {
  const std::string name = c.params.value("profile", "divide");
  if (name == "reciprocal") return Nvfp4Profile::kReciprocal;
  EXPECT_EQ(name, "divide");
  return Nvfp4Profile::kDivide;
}

TEST(Vectors, Nvfp4Quantize) {
  ThreadPool pool(2);
  for_each_case("nvfp4.quantize", [&pool](const Case& c) {
    const Weights w = weights(c.in("w"));
    const auto got = quantize_nvfp4(w.values, w.rows, w.cols, "w", {}, profile(c), &pool);
    if (expect_refusal(c, got)) return;
    expect_bytes(got->codes, c.out("packed"), "packed");
    expect_bytes(got->scales, c.out("scale"), "scale");
    expect_floats({got->meta.global}, c.out("global"), "global");
    expect_values(c, got->view());
  });
}

TEST(Vectors, Nvfp4QuantizeExpert) {
  for_each_case("nvfp4.quantize_expert", [](const Case& c) {
    const Weights gate = weights(c.in("gate")), up = weights(c.in("up")),
                  down = weights(c.in("down"));
    const auto gate_amax = finite_amax(gate.values, "gate"), up_amax = finite_amax(up.values, "up");
    ASSERT_TRUE(gate_amax);
    ASSERT_TRUE(up_amax);
    const float shared = std::max(*gate_amax, *up_amax);
    const auto check = [&c](const std::string& role, const Result<QuantizedMatrix>& got) {
      ASSERT_TRUE(got) << role;
      expect_bytes(got->codes, c.out(role + ".packed"), "packed");
      expect_bytes(got->scales, c.out(role + ".scale"), "scale");
      expect_floats({got->meta.global}, c.out(role + ".global"), "global");
    };
    const Nvfp4Profile p = profile(c);
    check("gate", quantize_nvfp4(gate.values, gate.rows, gate.cols, "gate", shared, p));
    check("up", quantize_nvfp4(up.values, up.rows, up.cols, "up", shared, p));
    check("down", quantize_nvfp4(down.values, down.rows, down.cols, "down", {}, p));
  });
}

TEST(Vectors, Nvfp4Dequant) {
  for_each_case("nvfp4.dequant", [](const Case& c) {
    const Blob codes = c.in("packed"), scale = c.in("scale");
    MatrixView view = grouped_view(FormatId::kNvfp4, codes, scale);
    view.global = c.in("global").as<float>().at(0);
    expect_values(c, view);
  });
}

TEST(Vectors, MxQuantize) {
  ThreadPool pool(2);
  for (const bool fp8 : {true, false}) {
    for_each_case(fp8 ? "mxfp8.quantize" : "mxfp4.quantize", [&](const Case& c) {
      const Weights w = weights(c.in("w"));
      const auto got = (fp8 ? quantize_mxfp8 : quantize_mxfp4)(w.values, w.rows, w.cols, "w",
                                                               rounding(c), &pool);
      if (expect_refusal(c, got)) return;
      expect_bytes(got->codes, c.out("codes"), "codes");
      expect_bytes(got->scales, c.out("scale"), "scale");
      expect_values(c, got->view());
    });
  }
}

TEST(Vectors, MxDequant) {
  for (const bool fp8 : {true, false}) {
    for_each_case(fp8 ? "mxfp8.dequant" : "mxfp4.dequant", [fp8](const Case& c) {
      const Blob codes = c.in("codes"), scale = c.in("scale");
      expect_values(c, grouped_view(fp8 ? FormatId::kMxfp8 : FormatId::kMxfp4, codes, scale));
    });
  }
}

TEST(Vectors, Nf3Quantize) {
  ThreadPool pool(2);
  for_each_case("nf3.quantize", [&pool](const Case& c) {
    const Weights w = weights(c.in("w"));
    std::optional<std::array<float, 8>> levels;
    if (c.has_in("levels")) {
      const std::vector<float> own = c.in("levels").as<float>();
      ASSERT_EQ(own.size(), 8u);
      levels.emplace();
      for (size_t i = 0; i < 8; ++i) (*levels)[i] = own[i];
    }
    const auto got =
        quantize_nf3(w.values, w.rows, w.cols, "w", c.params.value("bias_log2", 4), levels, &pool);
    if (expect_refusal(c, got)) return;
    expect_bytes(got->codes, c.out("packed"), "packed");
    expect_bytes(got->scales, c.out("scale"), "scale");
    expect_values(c, got->view());
  });
}

TEST(Vectors, Nf3Dequant) {
  for_each_case("nf3.dequant", [](const Case& c) {
    const Blob codes = c.in("packed"), scale = c.in("scale");
    MatrixView view = grouped_view(FormatId::kNf3, codes, scale);
    view.nf3_bias_log2 = c.params.at("bias_log2");
    expect_values(c, view);
  });
}

TEST(Vectors, Fp8BlockQuantize) {
  ThreadPool pool(2);
  for_each_case("fp8_block.quantize", [&pool](const Case& c) {
    const Weights w = weights(c.in("w"));
    const auto block = c.params.value("block", std::vector<int64_t>{128, 128});
    const auto got =
        quantize_fp8_block(w.values, w.rows, w.cols, "w", block.at(0), block.at(1), &pool);
    if (expect_refusal(c, got)) return;
    expect_bytes(got->codes, c.out("codes"), "codes");
    expect_bytes(got->scales, c.out("scale_inv"), "scale_inv");
    expect_values(c, got->view());
  });
}

TEST(Vectors, Fp8BlockDequant) {
  for_each_case("fp8_block.dequant", [](const Case& c) {
    const Blob codes = c.in("codes"), scale = c.in("scale_inv");
    MatrixView view;
    view.format = FormatId::kFp8Block;
    view.scale_kind = ScaleKind::kF32;
    view.rows = codes.shape.at(0);
    view.cols = codes.shape.at(1);
    view.codes = codes.bytes.data();
    view.scales = scale.bytes.data();
    view.block_rows = c.params.at("block").at(0);
    view.block_cols = c.params.at("block").at(1);
    view.origin_row = c.params.at("origin").at(0);
    view.origin_col = c.params.at("origin").at(1);
    EXPECT_EQ(scale_plane_bytes(view), static_cast<int64_t>(scale.bytes.size()));
    expect_values(c, view);
  });
}

TEST(Vectors, Fp8ChannelDequant) {
  for_each_case("fp8_channel.dequant", [](const Case& c) {
    const Blob codes = c.in("codes"), scale = c.in("scale");
    ASSERT_EQ(scale.dtype, "BF16");
    MatrixView view;
    view.format = FormatId::kFp8Channel;
    view.scale_kind = ScaleKind::kBf16;
    view.rows = codes.shape.at(0);
    view.cols = codes.shape.at(1);
    view.codes = codes.bytes.data();
    view.scales = scale.bytes.data();
    expect_values(c, view);
  });
}

constexpr FormatId kCutFormats[] = {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8,
                                    FormatId::kNf3};

CutAxis axis_of(const Case& c) {
  return c.params.at("axis") == "rows" ? CutAxis::kRows : CutAxis::kColumns;
}

TEST(Vectors, TpCut) {
  for_each_case("tp.cut", [](const Case& c) {
    for (const FormatId format : kCutFormats) {
      const std::string name(block_format(format).name);
      const Blob codes = c.in(name + ".codes"), scale = c.in(name + ".scale");
      const auto part = cut_planes(grouped_view(format, codes, scale), axis_of(c),
                                   c.params.at("rank"), c.params.at("size"));
      ASSERT_TRUE(part) << part.error().message();
      expect_bytes(part->codes, c.out(name + ".codes"), "codes");
      expect_bytes(part->scales, c.out(name + ".scale"), "scale");
    }
  });
}

TEST(Vectors, TpCutRefuse) {
  for_each_case("tp.cut_refuse", [](const Case& c) {
    MatrixView view;
    for (const FormatId format : kCutFormats) {
      if (c.params.at("format") == block_format(format).name) view.format = format;
    }
    ASSERT_NE(view.format, FormatId::kBf16);
    view.scale_kind = block_format(view.format).scale;
    view.nf3_levels = kNf3Levels;
    view.rows = c.params.at("rows");
    view.cols = c.params.at("columns");
    const int size = c.params.at("size");
    for (int rank = 0; rank < size; ++rank) {
      const auto cut = cut_matrix(view, axis_of(c), rank, size);
      ASSERT_FALSE(cut);
      EXPECT_EQ(cut.error().message().rfind(c.error, 0), 0u) << cut.error().message();
    }
  });
}

}  // namespace
}  // namespace nibble::formats
