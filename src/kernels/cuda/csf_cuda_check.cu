// CSF on the GPU against the CPU codec, byte for byte.
// Planes of many shapes and kinds of content: encode, decode, check (good and broken streams), and
// the kernels' form: codes, bases and exceptions of every tile expand to the plain tile's scales.
#include <cstring>
#include <random>

#include "kernels/cuda/csf_case.h"
#include "kernels/cuda/csf_index.h"
#include "kernels/cuda/dequant.cuh"

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

/// Plain scale bytes of a warp's rows in a chunk from their compressed form, as layout.h and
/// csf_index.h describe it (NVFP4: without signs). `block`: the packed row block.
std::vector<uint8_t> expand_warp(FormatId f, const uint8_t* block, int warp, int64_t chunk,
                                 const CsfWarpRows& rows) {
  const int groups = kTileCols / group_cols(f);
  const uint8_t* words = block + csf_group_at(f, chunk);
  auto word = [&](int64_t byte) {
    uint32_t w;
    std::memcpy(&w, words + byte, 4);
    return w;
  };
  std::vector<uint8_t> plain(static_cast<size_t>(16 * groups));
  for (int lane = 0; lane < 32; ++lane) {
    CsfWords of_lane;
    const int in_group = static_cast<int>(chunk % kCsfChunks);
    if (f == FormatId::kNvfp4) of_lane.own = word(128 * warp + 4 * lane);
    of_lane.pair =
        turn_right(word(csf_pairs_at(f) + 64 * warp + 4 * (lane / 2)), csf_turn(f, lane));
    const uint32_t codes = csf_codes(f, of_lane, in_group) >> csf_shift(f);
    for (int high = 0; high < 2; ++high) {
      const uint32_t base = rows.bases[lane / 4] >> 8 * high & 0xFF;
      const uint32_t byte = base + (codes >> 16 * high & 0xFFFF);
      plain[static_cast<size_t>(2 * (lane * groups / 4) + high)] =
          static_cast<uint8_t>(f == FormatId::kNvfp4 ? byte & 127 : byte);
    }
  }
  return plain;
}
bool has_odd_base(FormatId f, const CsfWarpRows& rows) {
  bool odd = false;
  for (const uint16_t two : rows.bases) {
    odd = odd || !csf_base_is_plain(f, two & 0xFF) || !csf_base_is_plain(f, two >> 8);
  }
  return odd;
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
  CsfIndexArgs args{f, product, experts, hidden, inter, {}, {}, nullptr, nullptr};
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
  const int64_t blocks = experts * row_blocks(product, hidden, inter);
  const int64_t block_bytes = row_block_bytes(f, ScaleForm::kCsf, chunks(cols));
  DeviceBuffer packed(blocks * block_bytes), words(4 * count + 16);
  must(cudaMemset(packed.data(), 0xFF, static_cast<size_t>(packed.bytes())), "all magnitudes");
  args.packed = packed.as<uint8_t>();
  args.exceptions = words.as<uint32_t>();
  must(csf_index(args, nullptr), "index");
  must(cudaDeviceSynchronize(), "index run");
  const auto host_packed = download(packed.as<uint8_t>(), packed.bytes());
  const auto host_words = download(words.as<uint32_t>(), count);
  const int64_t chunk_count = chunks(cols);
  const int groups = kTileCols / group_cols(f);
  bool equal = true, listed = true, odd = true, weights = true;
  for (int64_t i = 0; i < blocks * 4; ++i) {
    const int64_t block = i / 4, expert = block / row_blocks(product, hidden, inter);
    const int64_t in_expert = block % row_blocks(product, hidden, inter);
    const int warp = static_cast<int>(i % 4);
    const uint8_t* packed_block = host_packed.data() + block * block_bytes;
    CsfWarpRows r;
    std::memcpy(&r, packed_block + kCsfRowsAt + static_cast<size_t>(warp) * sizeof(r), sizeof(r));
    odd = odd && (r.odd != 0) == has_odd_base(f, r);
    uint32_t next = r.first;
    const uint32_t end = r.first + r.count;
    if (end < next || end > static_cast<uint32_t>(count)) {
      listed = false;
      continue;
    }
    for (int64_t chunk = 0; chunk < chunk_count; ++chunk) {
      const uint8_t* tile = packed_block + tile_at(f, ScaleForm::kCsf, chunk);
      const auto plain = expand_warp(f, packed_block, warp, chunk, r);
      for (int at = 0; at < 16 * groups; ++at) {
        const int pair = at / 2 / groups, group = at / 2 % groups, high = at % 2;
        uint8_t got = plain[static_cast<size_t>(at)];
        const auto place = static_cast<uint32_t>(chunk << 8 | at);
        const bool exception = next < end && (host_words[next] & 0xFFFFFF) == place;
        if (exception) {
          // Only what no code can say is in the list.
          const uint32_t base = r.bases[pair] >> 8 * high & 0xFF;
          const uint32_t value = host_words[next] >> 24;
          const uint32_t distance = f == FormatId::kNvfp4 ? (value - base) & 127 : value - base;
          listed = listed && distance >= 1u << csf_bits(f) && (f != FormatId::kNvfp4 || value != 0);
          got = static_cast<uint8_t>(value);
          ++next;
        }
        const int64_t row = packed_row(product, in_expert, warp, pair, high);
        if (row >= rows || chunk * groups + group >= scale_cols) {
          listed = listed && !exception;
          continue;
        }
        const bool second = !down && high != 0;
        const auto& plane = planes[second && !stacked ? 1 : 0];
        const int64_t plane_row = expert * stack.rows + row + (second && stacked ? rows : 0);
        uint8_t want = plane[static_cast<size_t>(plane_row * scale_cols + chunk * groups + group)];
        if (f == FormatId::kNvfp4) want &= 127;
        // A scale of zero may have any code if its weights have no magnitudes.
        bool cleared = false;
        if (f == FormatId::kNvfp4) {
          uint32_t lane[4];
          std::memcpy(lane, tile + (warp * 32 + pair * 4 + group) * 16, 16);
          const uint32_t mask = row_magnitudes(high);
          const uint32_t any = (lane[0] | lane[1] | lane[2] | lane[3]) & mask;
          const uint32_t all = lane[0] & lane[1] & lane[2] & lane[3] & mask;
          cleared = any == 0;
          const uint32_t signs = ~(row_magnitudes(0) | row_magnitudes(1));
          weights = weights && (cleared || all == mask) && (lane[0] & signs) == signs;
        }
        equal = equal && (cleared ? want == 0 : got == want);
      }
    }
    listed = listed && next == end;
  }
  const std::string name =
      cat("index ", formats::block_format(f).name, down ? " down" : " gate_up", " E", experts, " H",
          hidden, " I", inter, stacked ? " stacked" : "", " content ", static_cast<int>(content));
  checks.expect(equal, cat(name, ": scales"));
  checks.expect(listed, cat(name, ": list"));
  checks.expect(odd, cat(name, ": odd bases"));
  checks.expect(weights, cat(name, ": weights"));
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
