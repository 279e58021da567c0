// attention_prepare and attention. q, k, v are random; pages are dealt at random and hold NaN bytes
// where nothing was written. The references are in double. Bitwise: every path, rows alone, chunks,
// hints, repeats.
#include <cuda_bf16.h>

#include "kernels/cuda/attention_case.h"

namespace nibble::kernels::cuda {
namespace {

using namespace test;

constexpr int64_t kLayers = 2;

struct Rope {
  int64_t dim = 0;
  bool interleaved = false, norms = false;
};

/// Random q, k, v of every position of some sequences, prepared into a cache.
class Fixture {
 public:
  Fixture(const HeadShape& shape, const std::vector<Span>& spans, const Rope& rope,
          int64_t first_page, int64_t page_count)
      : shape_(shape), spans_(spans), rope_(rope), random_(static_cast<uint64_t>(shape.heads)) {
    cache.layers = kLayers;
    cache.pages = first_page + page_count;
    cache.kv_heads = shape.kv_heads;
    cache.head_dim = shape.head_dim;
    cache.format = shape.format;
    memory_ = Device<std::byte>(cache.bytes());
    cache.data = memory_.get();
    for (const Span& s : spans) tokens_.push_back(s.context + s.rows);
    pages = deal_pages(random_, tokens_, first_page, page_count);
    // What is not written is NaN (both formats). Untouched huge caches need none.
    must(cudaMemset(cache.data + cache.head_offset(layer, first_page, 0), 0xFF,
                    static_cast<size_t>(page_count * cache.page_bytes())),
         "poison");
    const int64_t n = shape.head_dim;
    for (int64_t i = 0; i < rope.dim / 2; ++i) {
      inv_freq_.push_back(static_cast<float>(
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rope.dim))));
    }
    q_norm_ = random_.normals(n);
    k_norm_ = random_.normals(n);
    device_freq_ = Device<float>(inv_freq_);
    device_q_norm_ = Device<float>(q_norm_);
    device_k_norm_ = Device<float>(k_norm_);
  }

  /// Prepares all positions of all sequences in one step and keeps the wanted rows of q.
  void prepare(Checks& checks) {
    std::vector<Span> all;
    for (const int64_t n : tokens_) all.push_back({0, n});
    const Step step(all, pages);
    const int64_t n = shape_.head_dim, width = (shape_.heads + 2 * shape_.kv_heads) * n;
    const int64_t stride = width + 4;
    const auto qkv = random_.normals(step.view.rows * stride, 1.5f);
    const Device<float> device(qkv);
    Device<uint16_t> q(step.view.rows * shape_.heads * n);
    q.fill(0xFF);
    AttentionPrepareArgs args;
    args.qkv = device.get();
    args.row_stride = stride;
    args.heads = shape_.heads;
    args.layer = layer;
    args.q_norm = rope_.norms ? device_q_norm_.get() : nullptr;
    args.k_norm = rope_.norms ? device_k_norm_.get() : nullptr;
    args.rotary_dim = rope_.dim;
    args.inv_freq = device_freq_.get();
    args.interleaved = rope_.interleaved;
    args.q = q.get();
    must(attention_prepare(args, cache, step.view, nullptr), "attention_prepare");
    const auto host_q = q.download();
    for (const auto& p : pages) kv.emplace_back(cache, layer, p);

    double worst[3] = {0, 0, 0};
    for (int64_t r = 0; r < step.view.rows; r += r < 70 ? 1 : 41) {
      const float* row = qkv.data() + r * stride;
      const auto s = static_cast<size_t>(step.host_sequence[static_cast<size_t>(r)]);
      const int64_t position = step.host_positions[static_cast<size_t>(r)];
      for (int64_t h = 0; h < shape_.heads + 2 * shape_.kv_heads; ++h) {
        const int64_t kind = h < shape_.heads ? 0 : h < shape_.heads + shape_.kv_heads ? 1 : 2;
        const auto want = exact_head(row + h * n, static_cast<int>(kind), position);
        for (int64_t d = 0; d < n; ++d) {
          const float got =
              kind == 0 ? bf16_to_float(host_q[static_cast<size_t>((r * shape_.heads + h) * n + d)])
                        : kv[s].at(kind == 2, position, (h - shape_.heads) % shape_.kv_heads, d);
          // In units of the rounding: half a step of the format, and FP32 noise before it.
          const bool fp8 = kind != 0 && shape_.format == KvFormat::kFp8E4m3;
          const double x = std::fabs(want[static_cast<size_t>(d)]);
          const double clipped = fp8 ? std::clamp(want[static_cast<size_t>(d)], -448.0, 448.0)
                                     : want[static_cast<size_t>(d)];
          const double step_size = fp8 ? std::max(x / 16, std::ldexp(1.0, -10)) : x / 256;
          const double error = std::fabs(got - clipped) / (step_size + 1e-5);
          worst[kind] = std::max(worst[kind], error == error ? error : INFINITY);
        }
      }
    }
    const std::string name = cat("prepare ", shape_.name(), " rope ", rope_.dim);
    for (const double error : worst) {
      checks.within(error, 1.01, name + ", error in roundings");
    }
    // The rows that attention is asked for.
    int64_t row = 0;
    for (size_t s = 0; s < spans_.size(); ++s) {
      const auto from = host_q.begin() + (row + spans_[s].context) * shape_.heads * n;
      host_q_.insert(host_q_.end(), from, from + spans_[s].rows * shape_.heads * n);
      row += tokens_[s];
    }
    check_one_by_one(checks, args, device, step, host_q, name);
    prepare_args_ = args;
    qkv_ = Device<float>(qkv);
    first_rows_ = {0};
    for (const int64_t t : tokens_) first_rows_.push_back(first_rows_.back() + t);
  }

  /// attention_step of one wanted row of some sequences, its K and V taken out of the pages before.
  std::vector<uint16_t> step_rows(const std::vector<size_t>& sequences,
                                  const std::vector<int64_t>& rows, AttentionPath path) {
    std::vector<Span> spans;
    std::vector<std::vector<int32_t>> lists;
    const int64_t width = shape_.heads * shape_.head_dim;
    Device<float> qkv(static_cast<int64_t>(sequences.size()) * prepare_args_.row_stride);
    for (size_t i = 0; i < sequences.size(); ++i) {
      const size_t s = sequences[i];
      const int64_t position = spans_[s].context + rows[i];
      spans.push_back({position, 1});
      lists.push_back(pages[s]);
      must(cudaMemcpy(qkv.get() + static_cast<int64_t>(i) * prepare_args_.row_stride,
                      qkv_.get() + (first_rows_[s] + position) * prepare_args_.row_stride,
                      static_cast<size_t>(prepare_args_.row_stride) * 4, cudaMemcpyDeviceToDevice),
           "qkv row");
      for (int64_t h = 0; h < 2 * shape_.kv_heads; ++h) {
        const int64_t row_bytes = cache.head_plane_bytes() / kKvPageTokens;
        must(cudaMemset(cache.data +
                            cache.head_offset(
                                layer, pages[s][static_cast<size_t>(position / kKvPageTokens)], 0) +
                            h * cache.head_plane_bytes() + position % kKvPageTokens * row_bytes,
                        0xFF, static_cast<size_t>(row_bytes)),
             "poison a row");
      }
    }
    Step step(spans, lists);
    Device<uint16_t> q(step.view.rows * width), out(step.view.rows * width);
    AttentionPrepareArgs prepare = prepare_args_;
    prepare.qkv = qkv.get();
    prepare.q = q.get();
    AttentionHint hint;
    hint.path = path;
    for (const Span& s : spans) hint.max_context = std::max(hint.max_context, s.context + 1);
    const AttentionArgs args = args_of(q, out, step.view.rows, hint.max_context);
    must(attention_step(prepare, args, cache, step.view, hint, scratch_.get(), scratch_.bytes(),
                        nullptr),
         "attention_step");
    must(cudaDeviceSynchronize(), "attention_step run");
    return out.download();
  }
  /// With room in scratch_ for `rows` rows of that context.
  AttentionArgs args_of(const Device<uint16_t>& q, Device<uint16_t>& out, int64_t rows,
                        int64_t max_context) {
    const int64_t need = attention_scratch_bytes(cache, shape_.heads, rows, max_context);
    if (scratch_.count() < need) {
      scratch_ = Device<std::byte>(need);
      scratch_.fill(0);
    }
    AttentionArgs args;
    args.q = q.get();
    args.out = out.get();
    args.heads = shape_.heads;
    args.layer = layer;
    args.scale = shape_.scale();
    return args;
  }
  bool pages_unchanged() const {
    for (size_t s = 0; s < pages.size(); ++s) {
      if (!HostKv(cache, layer, pages[s]).same(kv[s])) return false;
    }
    return true;
  }

  /// `rows` of the wanted rows from `first` on, in a step of the given spans.
  std::vector<uint16_t> attend(const std::vector<Span>& spans,
                               const std::vector<std::vector<int32_t>>& page_lists, int64_t first,
                               AttentionPath path, int64_t more_context = 0, int64_t hidden = -1) {
    Step step(spans, page_lists);
    const int64_t width = shape_.heads * shape_.head_dim;
    Device<uint16_t> q(std::vector<uint16_t>(host_q_.begin() + first * width,
                                             host_q_.begin() + (first + step.view.rows) * width));
    if (hidden >= 0) step.hide(hidden);
    Device<uint16_t> out(step.view.rows * width);
    out.fill(0xFF);
    AttentionHint hint;
    hint.path = path;
    for (const Span& s : spans) {
      hint.max_context = std::max(hint.max_context, s.context + s.rows + more_context);
      hint.max_sequence_rows = std::max(hint.max_sequence_rows, s.rows);
    }
    const AttentionArgs args = args_of(q, out, step.view.rows, hint.max_context);
    const auto result =
        attention(args, cache, step.view, hint, scratch_.get(), scratch_.bytes(), nullptr);
    if (!result.has_value() && path != AttentionPath::kAuto) return {};  // does not fit
    must(result, "attention");
    must(cudaDeviceSynchronize(), "attention run");
    return out.download();
  }
  std::vector<uint16_t> attend_all(AttentionPath path, int64_t more_context = 0) {
    return attend(spans_, pages, 0, path, more_context);
  }

  const std::vector<uint16_t>& q() const { return host_q_; }
  KvCache cache;
  int64_t layer = kLayers - 1;
  std::vector<std::vector<int32_t>> pages;
  std::vector<HostKv> kv;

 private:
  std::vector<double> exact_head(const float* x, int kind, int64_t position) const {
    const int64_t n = shape_.head_dim, half = rope_.dim / 2;
    std::vector<double> v(x, x + n);
    if (kind == 2) return v;
    if (rope_.norms) {
      double squares = 0;
      for (const double a : v) squares += a * a;
      const auto& weight = kind == 0 ? q_norm_ : k_norm_;
      const double inverse = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-5f);
      for (int64_t d = 0; d < n; ++d)
        v[static_cast<size_t>(d)] *= inverse * weight[static_cast<size_t>(d)];
    }
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * inv_freq_[static_cast<size_t>(i)];
      const double c = std::cos(static_cast<double>(angle)),
                   s = std::sin(static_cast<double>(angle));
      double& a = v[static_cast<size_t>(rope_.interleaved ? 2 * i : i)];
      double& b = v[static_cast<size_t>(rope_.interleaved ? 2 * i + 1 : half + i)];
      const double rotated = a * c - b * s;
      b = b * c + a * s;
      a = rotated;
    }
    return v;
  }

  /// Rows prepared in steps of one give the same q and the same pages.
  void check_one_by_one(Checks& checks, AttentionPrepareArgs args, const Device<float>& qkv,
                        const Step& step, const std::vector<uint16_t>& expected,
                        const std::string& name) {
    const int64_t width = shape_.heads * shape_.head_dim;
    Device<uint16_t> q(width);
    args.q = q.get();
    bool same = true;
    for (int64_t r = 0; r < step.view.rows; r += 97) {
      const auto s = static_cast<size_t>(step.host_sequence[static_cast<size_t>(r)]);
      const Step one({{step.host_positions[static_cast<size_t>(r)], 1}}, {pages[s]});
      args.qkv = qkv.get() + r * args.row_stride;
      must(attention_prepare(args, cache, one.view, nullptr), "prepare one row");
      same = same && std::memcmp(q.download().data(), &expected[static_cast<size_t>(r * width)],
                                 static_cast<size_t>(width) * 2) == 0;
    }
    checks.expect(same, name + ": rows alone");
    for (size_t s = 0; s < pages.size(); ++s) {
      const HostKv again(cache, layer, pages[s]);
      bool equal = true;
      for (int64_t p = 0; p < tokens_[s]; p += 13) {
        for (int64_t d = 0; d < shape_.head_dim; ++d) {
          for (const bool value : {false, true}) {
            equal = equal && again.at(value, p, 0, d) == kv[s].at(value, p, 0, d);
          }
        }
      }
      checks.expect(equal, name + ": pages after rows alone");
    }
  }

  HeadShape shape_;
  std::vector<Span> spans_;
  Rope rope_;
  Random random_;
  Device<std::byte> memory_, scratch_;
  std::vector<int64_t> tokens_;
  std::vector<float> inv_freq_, q_norm_, k_norm_;
  Device<float> device_freq_, device_q_norm_, device_k_norm_, qkv_;
  AttentionPrepareArgs prepare_args_;
  std::vector<int64_t> first_rows_;
  std::vector<uint16_t> host_q_;
};

bool same_rows(const std::vector<uint16_t>& part, const std::vector<uint16_t>& whole, int64_t first,
               int64_t width) {
  return std::memcmp(part.data(), &whole[static_cast<size_t>(first * width)], part.size() * 2) == 0;
}

void check_reference(Checks& checks, const HeadShape& shape, const std::vector<Span>& spans,
                     const Fixture& f, const std::vector<uint16_t>& got, const std::string& name) {
  const int64_t n = shape.head_dim, group = shape.heads / shape.kv_heads;
  double worst = 0;
  int64_t row = 0;
  for (size_t s = 0; s < spans.size(); ++s) {
    for (int64_t i = 0; i < spans[s].rows; ++i, ++row) {
      if (i > 2 && i + 2 < spans[s].rows && i % 37 != 0) continue;
      for (int64_t h = i % 3; h<shape.heads; h += shape.heads> 8 ? 7 : 1) {
        const size_t at = static_cast<size_t>((row * shape.heads + h) * n);
        const auto want =
            exact_attention(f.kv[s], shape, &f.q()[at], h / group, spans[s].context + i);
        double error = 0, norm = 0;
        for (int64_t d = 0; d < n; ++d) {
          const double w = want[static_cast<size_t>(d)];
          error += std::pow(bf16_to_float(got[at + static_cast<size_t>(d)]) - w, 2);
          norm += w * w;
        }
        const double relative = std::sqrt(error / norm);
        worst = std::max(worst, relative == relative ? relative : INFINITY);
      }
    }
  }
  checks.within(worst, 6e-3, name + ", relative error");
  checks.line(cat("attention ", name, ": ", row, " rows, worst relative error ", worst));
}

/// Decode steps by clusters of CTAs: rows alone, and one to six sequences at a time.
void check_clusters(Checks& checks, Fixture& f, const std::vector<Span>& spans,
                    const std::vector<uint16_t>& whole, int64_t width, const std::string& name) {
  std::vector<size_t> sequences;
  std::vector<int64_t> rows, ends;
  int64_t end = 0;
  bool alone = true;
  for (size_t s = 0; s < spans.size(); ++s) {
    for (int64_t i = 0; i < spans[s].rows; i += i < 2 ? 1 : 61) {
      if (spans[s].context + i >= 4096) continue;
      const auto one = f.step_rows({s}, {i}, AttentionPath::kRowsByCluster);
      alone = alone && same_rows(one, whole, end + i, width);
    }
    end += spans[s].rows;
    if (spans[s].context + spans[s].rows > 4096) continue;
    sequences.push_back(s);
    rows.push_back(spans[s].rows - 1);
    ends.push_back(end);
  }
  checks.expect(alone, name + ": rows alone by cluster");
  for (const AttentionPath path : {AttentionPath::kAuto, AttentionPath::kRowsByCluster}) {
    bool same = true;
    for (size_t count = 2; count <= std::min<size_t>(6, sequences.size()); ++count) {
      const auto first = static_cast<int64_t>(sequences.size() - count);
      const auto together = f.step_rows({sequences.begin() + first, sequences.end()},
                                        {rows.begin() + first, rows.end()}, path);
      for (size_t i = 0; i < count; ++i) {
        const int64_t row = ends[static_cast<size_t>(first) + i] - 1;
        same = same && std::memcmp(&together[i * static_cast<size_t>(width)],
                                   &whole[static_cast<size_t>(row * width)],
                                   static_cast<size_t>(width) * 2) == 0;
      }
    }
    checks.expect(same, cat(name, ": rows together by cluster, path ", static_cast<int>(path)));
  }
  int different = 0;
  const auto first = f.step_rows(sequences, rows, AttentionPath::kRowsByCluster);
  for (int i = 0; i < (checks.full() ? 50 : checks.quick() ? 1 : 3); ++i) {
    different += f.step_rows(sequences, rows, AttentionPath::kRowsByCluster) == first ? 0 : 1;
  }
  checks.expect(different == 0, cat(name, ": ", different, " repeats by cluster differ"));
}

void check_shape(Checks& checks, const HeadShape& shape, const std::vector<Span>& spans,
                 const Rope& rope, const std::string& label, int64_t first_page = 0,
                 int repeats = 3) {
  int64_t page_count = 4;
  for (const Span& s : spans) page_count += (s.context + s.rows) / kKvPageTokens + 1;
  Fixture f(shape, spans, rope, first_page, page_count);
  f.prepare(checks);
  const std::string name = cat(shape.name(), " ", label);
  const int64_t width = shape.heads * shape.head_dim;
  const auto whole = f.attend_all(AttentionPath::kAuto);
  check_reference(checks, shape, spans, f, whole, name);

  const std::pair<AttentionPath, const char*> paths[] = {
      {AttentionPath::kRowsByBlock, "rows by block"},
      {AttentionPath::kRowsByGroup, "rows by group"},
      {AttentionPath::kRowsWhole, "rows whole"},
      {AttentionPath::kTiles, "tiles"}};
  int tried = 0;
  for (const auto& [path, path_name] : paths) {
    const auto other = f.attend_all(path);
    if (other.empty()) continue;
    ++tried;
    checks.expect(other == whole, cat(name, ": ", path_name, " = auto"));
  }
  checks.expect(tried >= 2, name + ": paths tried");
  const int64_t far = checks.quick() ? 3000 : 100000;
  checks.expect(f.attend_all(AttentionPath::kAuto, far) == whole, cat(name, ": hint of ", far));
  int different = 0;
  for (int i = 0; i < repeats; ++i) {
    different += f.attend_all(AttentionPath::kAuto) == whole ? 0 : 1;
  }
  checks.expect(different == 0, cat(name, ": ", different, " repeats differ"));

  int64_t row = 0;
  for (size_t s = 0; s < spans.size(); ++s) {
    const Span& span = spans[s];
    for (int64_t i = 0; i < span.rows; i += i < 3 ? 1 : 29) {  // alone, by each path
      for (const auto& [path, path_name] : paths) {
        const auto one = f.attend({{span.context + i, 1}}, {f.pages[s]}, row + i, path);
        checks.expect(!one.empty() && same_rows(one, whole, row + i, width),
                      cat(name, ": sequence ", s, " row ", i, " alone, ", path_name));
      }
    }
    for (const int64_t chunk : {5, 20, 100}) {
      bool same = true;
      for (int64_t i = 0; chunk < span.rows && i < span.rows; i += chunk) {
        const auto part = f.attend({{span.context + i, std::min(chunk, span.rows - i)}},
                                   {f.pages[s]}, row + i, AttentionPath::kAuto);
        same = same && same_rows(part, whole, row + i, width);
      }
      checks.expect(same, cat(name, ": sequence ", s, " in chunks of ", chunk));
    }
    row += span.rows;
  }
  // The fused decode step: last rows of all sequences together, and rows one by one.
  std::vector<size_t> sequences;
  std::vector<int64_t> last_rows;
  row = 0;
  bool fused_same = true;
  for (size_t s = 0; s < spans.size(); ++s) {
    sequences.push_back(s);
    last_rows.push_back(spans[s].rows - 1);
    for (int64_t i = 0; i < spans[s].rows; i += i < 2 ? 1 : 61) {
      for (const AttentionPath path :
           {AttentionPath::kAuto, AttentionPath::kRowsByGroup, AttentionPath::kRowsWhole}) {
        fused_same = fused_same && same_rows(f.step_rows({s}, {i}, path), whole, row + i, width);
      }
    }
    row += spans[s].rows;
  }
  checks.expect(fused_same, name + ": fused rows alone");
  if (shape.head_dim == 64 || shape.head_dim == 128) {
    check_clusters(checks, f, spans, whole, width, name);
  }
  for (const auto& [path, path_name] : paths) {
    if (path == AttentionPath::kTiles) continue;
    const auto together = f.step_rows(sequences, last_rows, path);
    bool same = true;
    int64_t end = 0;
    for (size_t s = 0; s < spans.size(); ++s) {
      end += spans[s].rows;
      same = same && std::memcmp(&together[s * static_cast<size_t>(width)],
                                 &whole[static_cast<size_t>((end - 1) * width)],
                                 static_cast<size_t>(width) * 2) == 0;
    }
    checks.expect(same, cat(name, ": fused rows together, ", path_name));
  }
  checks.expect(f.pages_unchanged(), name + ": pages after fused rows");
  // A padding row gives zeros and leaves the others alone.
  for (const int64_t hidden : {int64_t{0}, row / 2, row - 1}) {
    for (const AttentionPath path : {AttentionPath::kAuto, AttentionPath::kTiles}) {
      auto padded = f.attend(spans, f.pages, 0, path, 0, hidden);
      const auto at = padded.begin() + hidden * width;
      checks.expect(std::all_of(at, at + width, [](uint16_t v) { return v == 0; }),
                    cat(name, ": padding row ", hidden, " is zeros"));
      std::copy_n(whole.begin() + hidden * width, width, at);
      checks.expect(padded == whole, cat(name, ": rows beside padding row ", hidden));
    }
  }
}

void check_format(Checks& checks, KvFormat format) {
  const std::vector<Span> decode = {{0, 1},   {62, 1},  {63, 1},   {64, 1},   {510, 1}, {511, 1},
                                    {512, 1}, {999, 1}, {1024, 1}, {2048, 1}, {4100, 1}};
  const std::vector<Span> mixed = {{0, 300},   {700, 17}, {1500, 1}, {3, 2},
                                   {510, 150}, {64, 16},  {40, 33},  {1023, 1}};
  const std::vector<Span> few = {{0, 70}, {500, 20}, {600, 1}, {130, 3}};
  if (checks.quick()) {
    const std::vector<Span> small = {{0, 6}, {530, 1}, {130, 2}};  // one is cut into chunks
    check_shape(checks, {4, 2, 64, format}, small, {64, false, true}, "small", 0, 1);
    return;
  }
  const bool full = checks.full();
  check_shape(checks, {32, 4, 128, format}, decode, {128, false, true}, "decode", 0,
              full ? 100 : 5);
  check_shape(checks, {96, 8, 128, format}, few, {64, false, true}, "few");
  check_shape(checks, {64, 8, 64, format}, mixed, {64, true, false}, "mixed");
  if (!full) return;
  check_shape(checks, {32, 4, 128, format}, mixed, {128, false, true}, "mixed", 0, 20);
  check_shape(checks, {4, 2, 32, format}, mixed, {16, false, true}, "mixed");
  check_shape(checks, {4, 4, 16, format}, few, {16, true, false}, "few");
  check_shape(checks, {8, 8, 128, format}, few, {0, false, false}, "few");
  check_shape(checks, {40, 1, 128, format}, few, {64, true, true}, "few");
  check_shape(checks, {24, 4, 96, format}, few, {48, false, true}, "few");
  check_shape(checks, {16, 2, 192, format}, few, {64, false, false}, "few");
  check_shape(checks, {8, 1, 256, format}, few, {256, false, true}, "few");
  // Live pages beyond 2^31 bytes of the layer: page 20000 of 131072 bytes.
  if (format == KvFormat::kBf16) {
    check_shape(checks, {32, 4, 128, format}, few, {64, false, true}, "beyond 2^31", 20000);
  }
}

}  // namespace

CheckSummary check_attention(const CheckOptions& options, std::ostream& out) {
  return run_checks(options, out, [&](Checks& checks) {
    check_format(checks, options.format == "fp8" ? KvFormat::kFp8E4m3 : KvFormat::kBf16);
  });
}

}  // namespace nibble::kernels::cuda
