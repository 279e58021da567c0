// CSF on the GPU against the CPU codec, byte for byte.
// Planes of many shapes and kinds of content: encode, decode, check (good and broken streams), and
// the kernels' form: codes, bases and exceptions of every tile expand to the plain tile's scales.
#include <bit>
#include <cstring>
#include <random>

#include "kernels/cuda/csf_case.h"
#include "kernels/cuda/csf_index.h"

namespace nibble::kernels::cuda {
namespace {

using test::Checks;

enum class Content { kTypical, kRandom, kConstant, kTwoClusters, kSpikes, kWide };

std::vector<uint8_t> make_planes(const CsfStack& s, Content content, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> v(static_cast<size_t>(s.experts * s.rows * s.cols));
  const int window = codec::csf_window(s.kind);
  for (int64_t r = 0; r < s.experts * s.rows; ++r) {
    const int level = static_cast<int>(random() % 256), other = static_cast<int>(random() % 256);
    for (int64_t c = 0; c < s.cols; ++c) {
      const uint64_t x = random();
      int value = 0;
      switch (content) {
        case Content::kTypical:
          value = s.kind == CsfKind::kNvfp4
                      ? 56 + static_cast<int>(x % 8 + (x >> 8) % 8 + (x >> 16) % 8) - 10
                      : 120 + static_cast<int>(x & 1) + ((x >> 8) % 100 == 0 ? 3 : 0);
          break;
        case Content::kRandom: value = static_cast<int>(x % 256); break;
        case Content::kConstant: value = level; break;
        case Content::kTwoClusters:
          value =
              (x & 1 ? level : other) + static_cast<int>((x >> 8) % static_cast<uint64_t>(window));
          break;
        case Content::kSpikes: value = x % 3 == 0 ? static_cast<int>(x >> 8) : level; break;
        case Content::kWide: value = level + static_cast<int>((x >> 8) % 70); break;
      }
      v[static_cast<size_t>(r * s.cols + c)] = static_cast<uint8_t>(value);
    }
  }
  return v;
}

void check_streams(Checks& checks, const CsfStack& s, Content content, uint64_t seed) {
  const std::string name = cat(codec::csf_kind_name(s.kind), " E", s.experts, " ", s.rows, " x ",
                               s.cols, " content ", static_cast<int>(content));
  const auto planes = make_planes(s, content, seed);
  const auto bytes = static_cast<int64_t>(planes.size());
  DeviceBuffer input((bytes + 15) / 16 * 16), output((bytes + 15) / 16 * 16);
  must(cudaMemcpy(input.data(), planes.data(), planes.size(), cudaMemcpyHostToDevice), "upload");
  const StreamBuffers out(s, bytes);
  must(csf_encode(s, input.as<uint8_t>(), out.view(), out.scratch.data(), nullptr), "encode");
  must(cudaDeviceSynchronize(), "encode run");
  checks.expect(equals_cpu_codec(out, planes), cat("encode ", name));

  must(csf_decode(s, out.view(), output.as<uint8_t>(), nullptr), "decode");
  checks.expect(download(output.as<uint8_t>(), bytes) == planes, cat("decode ", name));

  // Too little room: the count is still right and nothing is written beyond.
  const int64_t count = out.count();
  if (count > 1) {
    StreamBuffers tight(s, count);
    must(cudaMemset(tight.exceptions.data(), 0xEE, static_cast<size_t>(4 * count)), "poison");
    CsfStreams view = tight.view();
    view.capacity = count / 2;
    must(csf_encode(s, input.as<uint8_t>(), view, tight.scratch.data(), nullptr), "encode");
    const auto words = download(tight.exceptions.as<uint32_t>(), count);
    checks.expect(tight.count() == count && words[static_cast<size_t>(count / 2)] == 0xEEEEEEEEu,
                  cat("capacity ", name));
  }

  // The check of a stored stream, and its row_begin.
  const auto begins = download(out.row_begin.as<uint32_t>(), s.experts * s.rows + 1);
  std::vector<uint32_t> of_expert;
  for (int64_t e = 0; e <= s.experts; ++e)
    of_expert.push_back(begins[static_cast<size_t>(e * s.rows)]);
  DeviceBuffer expert_begin(4 * (s.experts + 1)), faults(4);
  must(cudaMemcpy(expert_begin.data(), of_expert.data(), of_expert.size() * 4,
                  cudaMemcpyHostToDevice),
       "upload");
  auto run_check = [&] {
    must(cudaMemset(faults.data(), 0, 4), "zero");
    must(cudaMemset(out.row_begin.data(), 0xEE, begins.size() * 4), "poison");
    must(csf_check(s, out.view(), expert_begin.as<uint32_t>(), faults.as<int>(), nullptr), "check");
    return download(faults.as<int>(), 1)[0];
  };
  checks.expect(run_check() == 0, cat("legal ", name));
  checks.expect(download(out.row_begin.as<uint32_t>(), s.experts * s.rows + 1) == begins,
                cat("row_begin ", name));
  auto poke = [&](uint8_t* p, uint8_t value) {
    must(cudaMemcpy(p, &value, 1, cudaMemcpyHostToDevice), "poke");
  };
  const uint8_t base = download(out.fixed.as<uint8_t>() + 3, 1)[0];
  poke(out.fixed.as<uint8_t>() + 3, 255);
  checks.expect(run_check() == kCsfBaseRange, cat("base_range ", name));
  poke(out.fixed.as<uint8_t>() + 3, base);
  if (s.kind == CsfKind::kMxfp4 && s.cols % 8 != 0) {
    uint8_t* last = out.fixed.as<uint8_t>() + out.fixed.bytes() - 1;
    const uint8_t tail = download(last, 1)[0];
    poke(last, static_cast<uint8_t>(tail | 0x80));
    checks.expect(run_check() == kCsfTailBits, cat("tail_bits ", name));
    poke(last, tail);
  }
  if (of_expert[1] >= 2) {
    auto* words = out.exceptions.as<uint32_t>();
    const auto two = download(words, 2);
    must(cudaMemcpy(words + 1, words, 4, cudaMemcpyDeviceToDevice), "poke");
    checks.expect(run_check() == kCsfExceptionOrder, cat("exception_order ", name));
    must(cudaMemcpy(words + 1, &two[1], 4, cudaMemcpyHostToDevice), "poke");
    if (s.rows * s.cols < (1 << 24)) {
      uint32_t* end = words + of_expert[1] - 1;
      const uint32_t word = download(end, 1)[0];
      const uint32_t broken = (word & 0xFF000000u) | static_cast<uint32_t>(s.rows * s.cols);
      must(cudaMemcpy(end, &broken, 4, cudaMemcpyHostToDevice), "poke");
      checks.expect(run_check() == kCsfExceptionRange, cat("exception_range ", name));
      must(cudaMemcpy(end, &word, 4, cudaMemcpyHostToDevice), "poke");
    }
  }
}

/// Plain scale bytes of a tile from its compressed form, as layout.h and csf_index.h describe it
/// (NVFP4: without signs).
struct ExpandedTile {
  std::vector<uint8_t> plain;
  uint32_t flags = 0;  // bit w: kCsfFlag of warp w; bit 4 + w: kCsfFourFlag
  bool legal = true;   // what lies in the tile agrees with itself and with the exceptions
};
ExpandedTile expand_tile(FormatId f, const uint8_t* tile_scales, const uint16_t* bases,
                         const uint32_t* exceptions, size_t count) {
  const int groups = kTileCols / group_cols(f), warp_bytes = 16 * groups;
  const uint32_t mask = f == FormatId::kNvfp4 ? 127 : 255;
  ExpandedTile out;
  out.plain.resize(static_cast<size_t>(tile_scale_bytes(f)));
  for (int warp = 0; warp < 4; ++warp) {
    uint32_t words[16];
    const auto bytes = static_cast<size_t>(4 * csf_warp_words(f));
    std::memcpy(words, tile_scales + static_cast<size_t>(warp) * bytes, bytes);
    bool plain_bases = true;
    for (int i = 0; i < 8 * groups; ++i) {
      const uint32_t halves = std::rotr(words[i / csf_per_word(f)], csf_turn(f, i));
      for (int high = 0; high < 2; ++high) {
        const uint32_t base = bases[8 * warp + i / groups] >> 8 * high & 0xFF;
        const uint32_t code = halves >> (csf_shift(f) + 16 * high) & ((1u << csf_bits(f)) - 1);
        plain_bases = plain_bases && csf_base_is_plain(f, base);
        out.plain[static_cast<size_t>(warp * warp_bytes + 2 * i + high)] =
            static_cast<uint8_t>((base + code) & mask);
      }
    }
    const uint32_t flags = words[0] & (kCsfFlag | kCsfFourFlag);
    uint32_t room = f == FormatId::kNvfp4 ? words[csf_code_words(f)] : 0;
    for (int w = 0; w < csf_code_words(f); ++w) {
      out.legal = out.legal && (words[w] & (kCsfFlag | kCsfFourFlag)) == flags;
      if (f != FormatId::kNvfp4) room |= ((words[w] & 7) | (words[w] >> 16 & 7) << 3) << 6 * w;
    }
    const bool flag = (flags & kCsfFlag) != 0;
    out.flags |= (flag ? 1u << warp : 0) | ((flags & kCsfFourFlag) != 0 ? 16u << warp : 0);
    out.legal = out.legal && flag == (!plain_bases || room != 0);
    // The exceptions that no code can say must be in the room, or too many for it.
    uint32_t want = 0;
    int wanted = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t byte = exceptions[i] & 0xFF;
      if (static_cast<int>(byte) / warp_bytes != warp) continue;
      const uint32_t in_warp = byte % static_cast<uint32_t>(warp_bytes);
      const uint32_t base =
          bases[8 * warp + static_cast<int>(in_warp) / (2 * groups)] >> 8 * (in_warp % 2) & 0xFF;
      const uint32_t value = exceptions[i] >> 24 & mask;
      if (((value - base) & mask) >> csf_bits(f) == 0) continue;
      if (wanted < csf_room(f)) want |= (value << 8 | 0x80u | in_warp) << 16 * wanted;
      ++wanted;
      out.plain[byte] = static_cast<uint8_t>(value);
    }
    out.legal = out.legal && room == (wanted > csf_room(f) ? kCsfOverflow : want);
  }
  return out;
}

/// The kernels' form of random scales, gate and up as one stacked plane or as two.
void check_index(Checks& checks, FormatId f, Product product, int64_t experts, int64_t hidden,
                 int64_t inter, bool stacked, Content content) {
  const bool down = product == Product::kDown;
  const int64_t rows = down ? hidden : inter, cols = down ? inter : hidden;
  const int64_t scale_cols = cols / group_cols(f);
  const CsfStack stack{csf_kind_of(f), experts, stacked ? 2 * rows : rows, scale_cols};
  const int matrices = down || stacked ? 1 : 2;
  std::vector<std::vector<uint8_t>> planes;
  std::vector<std::unique_ptr<StreamBuffers>> streams;
  CsfIndexArgs args{f, product, experts, hidden, inter, {}, {}, nullptr, nullptr, nullptr, nullptr};
  int64_t count = 0;
  for (int m = 0; m < matrices; ++m) {
    planes.push_back(make_planes(stack, content, 31 + static_cast<uint64_t>(m)));
    const auto bytes = static_cast<int64_t>(planes.back().size());
    DeviceBuffer input(bytes + 16);
    must(cudaMemcpy(input.data(), planes.back().data(), static_cast<size_t>(bytes),
                    cudaMemcpyHostToDevice),
         "upload");
    streams.push_back(std::make_unique<StreamBuffers>(stack, bytes));
    const StreamBuffers& out = *streams.back();
    must(csf_encode(stack, input.as<uint8_t>(), out.view(), out.scratch.data(), nullptr), "encode");
    count += out.count();
  }
  args.first = {streams[0]->view(), stack.rows, 0};
  args.second = stacked ? CsfSource{streams[0]->view(), stack.rows, rows}
                        : CsfSource{streams.back()->view(), stack.rows, 0};
  const int64_t tiles = experts * tile_count(product, hidden, inter);
  const int64_t blocks = experts * row_blocks(product, hidden, inter);
  const int stride = tile_bytes(f, ScaleForm::kCsf);
  DeviceBuffer packed(tiles * stride), bases(blocks * 64), begins(4 * (tiles + 1)),
      words(4 * count + 16);
  args.packed = packed.as<uint8_t>();
  args.bases = bases.as<uint16_t>();
  args.exception_begin = begins.as<uint32_t>();
  args.exceptions = words.as<uint32_t>();
  must(csf_index(args, nullptr), "index");
  must(cudaDeviceSynchronize(), "index run");
  const auto host_packed = download(packed.as<uint8_t>(), packed.bytes());
  const auto host_bases = download(bases.as<uint16_t>(), blocks * 32);
  const auto host_begins = download(begins.as<uint32_t>(), tiles + 1);
  const auto host_words = download(words.as<uint32_t>(), count);
  const int64_t chunk_count = chunks(cols);
  const int groups = kTileCols / group_cols(f);
  bool equal = static_cast<int64_t>(host_begins.back()) == count, sorted = true;
  uint32_t of_four[2] = {0, 0};  // flags of the aligned four chunks: found, and promised by each
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t block = t / chunk_count, chunk = t % chunk_count;
    const uint32_t first = host_begins[static_cast<size_t>(t)];
    const ExpandedTile tile = expand_tile(f, host_packed.data() + t * stride + tile_code_bytes(f),
                                          host_bases.data() + block * 32, host_words.data() + first,
                                          host_begins[static_cast<size_t>(t + 1)] - first);
    if (chunk % 4 == 0) {
      of_four[0] = 0;
      of_four[1] = tile.flags >> 4;
    }
    of_four[0] |= tile.flags & 15;
    equal = equal && tile.legal && tile.flags >> 4 == of_four[1] &&
            (of_four[0] == of_four[1] || (chunk % 4 != 3 && chunk + 1 != chunk_count));
    for (uint32_t i = host_begins[static_cast<size_t>(t)];
         i < host_begins[static_cast<size_t>(t + 1)]; ++i) {
      const uint32_t word = host_words[i];
      equal = equal && (word >> 8 & 0xFFFF) == static_cast<uint32_t>(chunk);
      if (i > host_begins[static_cast<size_t>(t)] &&
          (host_words[i - 1] & 0xFFFFFF) >= (word & 0xFFFFFF))
        sorted = false;
    }
    const int64_t expert = block / row_blocks(product, hidden, inter);
    const int64_t in_expert = block % row_blocks(product, hidden, inter);
    for (int lane = 0; lane < 32; ++lane) {
      for (int high = 0; high < 2; ++high) {
        const int64_t row = packed_row(product, in_expert, lane / 8, lane % 8, high);
        if (row >= rows) continue;
        const bool second = !down && high != 0;
        const auto& plane = planes[second && !stacked ? 1 : 0];
        const int64_t at =
            (expert * stack.rows + row + (second && stacked ? rows : 0)) * scale_cols;
        for (int i = 0; i < groups && chunk * groups + i < scale_cols; ++i) {
          const uint8_t scale = plane[static_cast<size_t>(at + chunk * groups + i)];
          equal = equal && tile.plain[static_cast<size_t>(2 * (groups * lane + i) + high)] ==
                               (f == FormatId::kNvfp4 ? scale & 127 : scale);
        }
      }
    }
  }
  checks.expect(
      equal && sorted,
      cat("index ", formats::block_format(f).name, down ? " down" : " gate_up", " E", experts, " H",
          hidden, " I", inter, stacked ? " stacked" : "", " content ", static_cast<int>(content)));
}

constexpr Content kContents[] = {Content::kTypical,     Content::kRandom, Content::kConstant,
                                 Content::kTwoClusters, Content::kSpikes, Content::kWide};

void check_kind(Checks& checks, CsfKind kind) {
  uint64_t seed = kind == CsfKind::kNvfp4 ? 1 : 1000;
  for (const int64_t cols : {1, 2, 3, 6, 7, 16, 18, 20, 40, 64, 112, 160, 180, 256}) {
    if (kind == CsfKind::kNvfp4 && cols % 2 != 0) continue;
    for (const Content content : kContents) {
      check_streams(checks, {kind, 3, 48, cols}, content, ++seed);
      if (checks.full()) check_streams(checks, {kind, 5, 256, cols}, content, ++seed);
      if (checks.quick() && cols > 20) break;
    }
  }
  if (checks.quick()) return;
  check_streams(checks, {kind, 2, 4096, 256}, Content::kTypical, ++seed);
  if (!checks.full()) return;
  check_streams(checks, {kind, 1, 16, 70000}, Content::kTypical, ++seed);
  check_streams(checks, {kind, 1, 16, 40000}, Content::kRandom, ++seed);
}

void check_tiles(Checks& checks, FormatId f) {
  for (const Content content : {Content::kTypical, Content::kRandom}) {
    for (const Product product : {Product::kGateUp, Product::kDown}) {
      check_index(checks, f, product, 2, 320, 96, false, content);
      if (checks.quick()) continue;
      check_index(checks, f, product, 3, 512, 192, false, content);
      if (!checks.full()) continue;
      check_index(checks, f, product, 2, 2880, 2880, false, content);
      check_index(checks, f, product, 2, 6144, 256, false, content);
    }
    check_index(checks, f, Product::kGateUp, 3, 512, 192, true, content);
  }
}

}  // namespace

CheckSummary check_csf(const CheckOptions& options, std::ostream& out) {
  return test::run_checks(options, out, [&](Checks& checks) {
    if (options.format == "nvfp4") check_kind(checks, CsfKind::kNvfp4);
    if (options.format == "mxfp4") check_kind(checks, CsfKind::kMxfp4);  // MXFP8 has its streams
    for (const FormatId f : {FormatId::kNvfp4, FormatId::kMxfp4, FormatId::kMxfp8}) {
      if (formats::block_format(f).name == options.format) check_tiles(checks, f);
    }
  });
}

}  // namespace nibble::kernels::cuda
