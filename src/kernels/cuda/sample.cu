// Sampling over many CTAs per row, in up to three kernels; in each, the row's last CTA concludes.
//   1. scan: largest logit and its first id, log of the sum of exponentials; greedy rows are done.
//   2. mass: integer weights; per chunk for the draw without a filter (then done), or as a
//   histogram
//      over the scaled logit in buckets of 1/64, which bounds what top-k or top-p can keep.
//   3. pick: the tokens within the bound are listed; exact top-k, top-p and the draw compare a
//   short
//      list's tokens all with all, and are weighted radix selections over a longer list, or over
//      the whole row if that is too long for a list.
// Sums that decide are integers. The logprob's sum has one fixed order.
#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/sample.h"

namespace nibble::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = 4;                  // logits of a thread
constexpr int kChunk = kThreads * kEach;  // logits of a CTA
constexpr int64_t kMaxVocab = int64_t{1} << 21;
constexpr int kIdBits = 21;
constexpr float kOne = 0x1p42f;    // weight of the most probable token
constexpr float kLowest = -30.0f;  // e^-30 * kOne < 1: such a token has weight 0
constexpr int kBuckets = 30 * 64 + 1;
constexpr int kList = 4096;     // tokens that pick lists
constexpr int kFew = kThreads;  // listed tokens that are ranked by comparing all with all

struct ChunkStats {
  uint64_t best;  // order_key of the largest logit
  float sum;      // of e^(logit - largest)
  int32_t bad;    // a NaN or +inf was seen
};

/// Scratch of one row, followed by ChunkStats [chunks] and uint64_t [chunks], the masses of chunks.
/// Rows are as far apart as row_bytes says, so that calls with fewer rows leave the others alone.
struct RowScratch {
  // Zero between launches.
  int counters[3];
  uint32_t list_size;
  uint32_t counts[kBuckets];
  uint64_t masses[kBuckets];

  // Written by scan.
  float max, log_sum;
  int32_t bad;
  // Written by mass.
  int32_t target;        // last bucket that pick lists
  uint32_t listed;       // tokens through it
  uint32_t kept;         // tokens of all buckets
  uint64_t total;        // mass of all buckets
  uint64_t list[kList];  // weight keys
};
static_assert(sizeof(RowScratch) % 16 == 0);

int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }
int64_t row_bytes(int64_t vocab) {
  const int64_t bytes =
      static_cast<int64_t>(sizeof(RowScratch)) +
      chunks_of(vocab) * static_cast<int64_t>(sizeof(ChunkStats) + sizeof(uint64_t));
  return (bytes + 255) / 256 * 256;
}

struct Launch {
  SampleArgs args;
  std::byte* scratch;
  int64_t row_bytes;
  int chunks;

  __device__ RowScratch& row(int64_t i) const {
    return *reinterpret_cast<RowScratch*>(scratch + i * row_bytes);
  }
  __device__ ChunkStats* stats(int64_t i) const {
    return reinterpret_cast<ChunkStats*>(scratch + i * row_bytes + sizeof(RowScratch));
  }
  __device__ uint64_t* masses(int64_t i) const {
    return reinterpret_cast<uint64_t*>(stats(i) + chunks);
  }
};

/// e^x for x in [-inf, 0]: the operations of runtime/softmax.h, so that weights are the CPU's.
__device__ float exp_nonpositive(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = __fadd_rn(__fmul_rn(clamped, 0x1.715476p+0f), 0x1.8p23f);
  const float n = __fsub_rn(shifted, 0x1.8p23f);
  const float f =
      __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0x1.62e400p-1f)), __fmul_rn(n, 0x1.7f7d1cp-20f));
  float sum = 1.0f / 5040.0f;
  sum = __fadd_rn(__fmul_rn(sum, f), 1.0f / 720.0f);
  sum = __fadd_rn(__fmul_rn(sum, f), 1.0f / 120.0f);
  sum = __fadd_rn(__fmul_rn(sum, f), 1.0f / 24.0f);
  sum = __fadd_rn(__fmul_rn(sum, f), 1.0f / 6.0f);
  sum = __fadd_rn(__fmul_rn(sum, f), 0.5f);
  sum = __fadd_rn(__fmul_rn(sum, f), 1.0f);
  sum = __fadd_rn(__fmul_rn(sum, f), 1.0f);
  const float scale = __int_as_float((static_cast<int>(n) + 127) << 23);
  return x < -87.0f ? 0.0f : __fmul_rn(sum, scale);
}
__device__ uint64_t weight_of(float scaled) {
  return static_cast<uint64_t>(__fmul_rn(exp_nonpositive(scaled), kOne));
}
__device__ int bucket_of(float scaled) { return static_cast<int>(__fmul_rn(-scaled, 64.0f)); }

/// Larger for a larger logit, then for a lower id. -0 equals 0.
__device__ uint64_t order_key(float logit, int id) {
  const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
__device__ float key_logit(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}
__device__ int key_id(uint64_t key) {
  return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(key));
}

/// Philox4x32 with 10 rounds, as runtime/random.h: 64 bits of draw number `draw` under `seed`.
__device__ uint64_t random_bits(uint64_t seed, uint64_t draw) {
  uint32_t c0 = static_cast<uint32_t>(draw), c1 = static_cast<uint32_t>(draw >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return uint64_t{c1} << 32 | c0;
}

/// Combines one value a thread, in one order; every thread gets the result. shared: [kWarps].
template <typename T, typename Combine>
__device__ T block_combine(T v, T* shared, const Combine& combine) {
  static_assert(kWarps == 16);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int d = 16; d > 0; d /= 2) v = combine(v, __shfl_xor_sync(~0u, v, d));
  __syncthreads();
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  v = shared[lane % kWarps];
  for (int d = kWarps / 2; d > 0; d /= 2) v = combine(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
__device__ uint64_t block_total(uint64_t v, uint64_t* shared) {
  return block_combine(v, shared, [](uint64_t a, uint64_t b) { return a + b; });
}
__device__ uint64_t warp_through(uint64_t v, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += other;
  }
  return v;
}
/// Sum over the threads before this one.
__device__ uint64_t block_before(uint64_t v, uint64_t* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const uint64_t through = warp_through(v, lane);
  __syncthreads();
  if (lane == 31) shared[warp] = through;
  __syncthreads();
  const uint64_t warps = warp_through(lane < kWarps ? shared[lane] : 0, lane);
  const uint64_t before = __shfl_sync(~0u, warps, (warp + 31) % 32);
  return (warp == 0 ? 0 : before) + through - v;
}

__device__ void write(const Launch& a, int64_t row, int token, float logprob) {
  a.args.tokens[row] = token;
  if (a.args.again != nullptr) a.args.again[row] = token;
  a.args.logprobs[row] = logprob;
}
__device__ void write_token(const Launch& a, int64_t row, float max, float log_sum, int token) {
  const float above = __fsub_rn(a.args.logits[row * a.args.row_stride + token], max);
  write(a, row, token, __fsub_rn(above, log_sum));
}

__global__ void __launch_bounds__(kThreads) scan_kernel(const Launch a) {
  __shared__ uint64_t keys[kWarps];
  __shared__ float sums[kWarps];
  __shared__ int flag;
  const int64_t row = blockIdx.x / static_cast<unsigned>(a.chunks);
  const int chunk = static_cast<int>(blockIdx.x) % a.chunks, tid = static_cast<int>(threadIdx.x);
  const auto larger = [](uint64_t x, uint64_t y) { return x > y ? x : y; };
  const auto plus = [](float x, float y) { return __fadd_rn(x, y); };
  wait_for_previous_kernel();
  allow_next_kernel();
  const float* logits = a.args.logits + row * a.args.row_stride;
  float v[kEach];
  uint64_t best = 0;
  int bad = 0;
  for (int i = 0; i < kEach; ++i) {
    const int id = chunk * kChunk + i * kThreads + tid;
    v[i] = id < a.args.vocab ? logits[id] : -INFINITY;
    bad |= !(v[i] < INFINITY);
    if (id < a.args.vocab) best = larger(best, order_key(v[i], id));
  }
  bad = __syncthreads_or(bad);
  best = block_combine(best, keys, larger);
  const float top = key_logit(best);
  float sum = 0.0f;
  for (int i = 0; i < kEach; ++i) {
    if (v[i] > -INFINITY) sum = __fadd_rn(sum, exp_nonpositive(__fsub_rn(v[i], top)));
  }
  sum = block_combine(sum, sums, plus);
  RowScratch& scratch = a.row(row);
  ChunkStats* stats = a.stats(row);
  if (tid == 0) stats[chunk] = {best, sum, bad};
  if (!arrive_last(scratch.counters, a.chunks, &flag)) return;

  best = 0;
  bad = 0;
  for (int i = tid; i < a.chunks; i += kThreads) {
    best = larger(best, __ldcg(&stats[i].best));
    bad |= __ldcg(&stats[i].bad);
  }
  bad = __syncthreads_or(bad);
  best = block_combine(best, keys, larger);
  const float max = key_logit(best);
  const bool broken = bad || max == -INFINITY;
  sum = 0.0f;
  for (int i = tid; i < a.chunks && !broken; i += kThreads) {
    const float chunk_sum = __ldcg(&stats[i].sum);
    const float below = __fsub_rn(key_logit(__ldcg(&stats[i].best)), max);
    sum = __fmaf_rn(chunk_sum, exp_nonpositive(below), sum);
  }
  sum = block_combine(sum, sums, plus);
  if (tid != 0) return;
  scratch.max = max;
  scratch.log_sum = logf(sum);
  scratch.bad = broken;
  if (broken) {
    write(a, row, -1, 0.0f);
  } else if (a.args.greedy_only || a.args.params[row].temperature == 0.0f) {
    write_token(a, row, max, logf(sum), key_id(best));
  }
}

/// What mass and pick need of a row. A token is kept by min-p if scaled() >= cutoff.
struct RowView {
  const float* logits;
  RowSampling params;
  RowScratch* scratch;
  float max, log_sum, cutoff;
  bool filtered;

  __device__ float scaled_logit(float logit) const {
    return __fdiv_rn(__fsub_rn(logit, max), params.temperature);
  }
  __device__ float scaled(int id) const { return scaled_logit(logits[id]); }
};
/// False: the row was done by the scan.
__device__ bool load_row(const Launch& a, int64_t row, RowView& view) {
  view.params = a.args.params[row];
  view.scratch = &a.row(row);
  if (view.params.temperature == 0.0f || view.scratch->bad) return false;
  view.max = view.scratch->max;
  view.log_sum = view.scratch->log_sum;
  view.logits = a.args.logits + row * a.args.row_stride;
  view.cutoff = view.params.min_p > 0.0f ? fmaxf(logf(view.params.min_p), kLowest) : kLowest;
  view.filtered = view.params.top_k > 0 || view.params.top_p < 1.0f;
  return true;
}
__device__ uint64_t share(float top_p, uint64_t total) {
  const double want = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  const uint64_t need = static_cast<uint64_t>(want);
  return need < 1 ? 1 : need > total ? total : need;
}

/// Finds the thread in which a running sum over the CTA reaches `need`: it runs found(sum before
/// it). Exactly one does, if 1 <= need <= total.
template <typename Found>
__device__ void where_reached(uint64_t mine, uint64_t need, uint64_t* shared, const Found& found) {
  const uint64_t before = block_before(mine, shared);
  if (before < need && need - before <= mine) found(before);
}

/// The draw over all kept tokens in order of id, from the chunks' masses.
__device__ void draw_unfiltered(const Launch& a, int64_t row, const RowView& view,
                                uint64_t* shared) {
  __shared__ int chosen_chunk;
  __shared__ uint64_t rest;
  const int tid = static_cast<int>(threadIdx.x);
  const uint64_t* masses = a.masses(row);
  const int each = (a.chunks + kThreads - 1) / kThreads;
  const int first = tid * each, last = min(a.chunks, first + each);
  uint64_t mine = 0;
  for (int i = first; i < last; ++i) mine += __ldcg(masses + i);
  const uint64_t total = block_total(mine, shared);
  const uint64_t need = __umul64hi(random_bits(view.params.seed, view.params.draw), total) + 1;
  where_reached(mine, need, shared, [&](uint64_t before) {
    int i = first;
    uint64_t left = need - before;
    for (; left > __ldcg(masses + i); ++i) left -= __ldcg(masses + i);
    chosen_chunk = i;
    rest = left;
  });
  __syncthreads();
  const int id = chosen_chunk * kChunk + tid * kEach;
  uint64_t w[kEach];
  mine = 0;
  for (int i = 0; i < kEach; ++i) {
    const float scaled = id + i < a.args.vocab ? view.scaled(id + i) : -INFINITY;
    w[i] = scaled >= view.cutoff ? weight_of(scaled) : 0;
    mine += w[i];
  }
  where_reached(mine, rest, shared, [&](uint64_t before) {
    int i = 0;
    for (uint64_t left = rest - before; left > w[i]; ++i) left -= w[i];
    write_token(a, row, view.max, view.log_sum, id + i);
  });
}

/// The bucket in which top-k ends, or top-p without top-k; clears the histogram.
__device__ void choose_target(const RowView& view, uint64_t* shared) {
  constexpr int kMine = (kBuckets + kThreads - 1) / kThreads;
  uint32_t* counts = view.scratch->counts;
  uint64_t* masses = view.scratch->masses;
  const int first = static_cast<int>(threadIdx.x) * kMine;
  uint32_t count[kMine];
  uint64_t mass[kMine], my_count = 0, my_mass = 0;
  for (int i = 0; i < kMine; ++i) {
    const bool inside = first + i < kBuckets;
    count[i] = inside ? __ldcg(counts + first + i) : 0;
    mass[i] = inside ? __ldcg(masses + first + i) : 0;
    my_count += count[i];
    my_mass += mass[i];
    if (inside) {
      counts[first + i] = 0;
      masses[first + i] = 0;
    }
  }
  const uint64_t kept = block_total(my_count, shared), total = block_total(my_mass, shared);
  const uint64_t counts_before = block_before(my_count, shared);
  const bool by_count = view.params.top_k > 0;
  const uint64_t k = static_cast<uint64_t>(view.params.top_k);
  const uint64_t need = by_count ? (k < kept ? k : kept) : share(view.params.top_p, total);
  where_reached(by_count ? my_count : my_mass, need, shared, [&](uint64_t before) {
    uint64_t left = need - before;
    uint32_t through = static_cast<uint32_t>(counts_before);
    int i = 0;
    for (;; ++i) {
      const uint64_t here = by_count ? count[i] : mass[i];
      through += count[i];
      if (left <= here) break;
      left -= here;
    }
    view.scratch->target = first + i;
    view.scratch->listed = through;
    view.scratch->kept = static_cast<uint32_t>(kept);
    view.scratch->total = total;
  });
}

__global__ void __launch_bounds__(kThreads) mass_kernel(const Launch a) {
  __shared__ unsigned long long masses[kBuckets];
  __shared__ uint32_t counts[kBuckets];
  __shared__ uint64_t shared[kWarps];
  __shared__ int flag;
  const int64_t row = blockIdx.x / static_cast<unsigned>(a.chunks);
  const int chunk = static_cast<int>(blockIdx.x) % a.chunks, tid = static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  RowView view;
  if (!load_row(a, row, view)) return;
  if (view.filtered) {
    for (int i = tid; i < kBuckets; i += kThreads) masses[i] = counts[i] = 0;
    __syncthreads();
  }
  uint64_t mine = 0;
  for (int i = 0; i < kEach; ++i) {
    const int id = chunk * kChunk + i * kThreads + tid;
    const float scaled = id < a.args.vocab ? view.scaled(id) : -INFINITY;
    if (!(scaled >= view.cutoff)) continue;
    const uint64_t w = weight_of(scaled);
    mine += w;
    if (view.filtered) {
      const int bucket = bucket_of(scaled);
      atomicAdd(&counts[bucket], 1u);
      atomicAdd(&masses[bucket], static_cast<unsigned long long>(w));
    }
  }
  if (view.filtered) {
    __syncthreads();
    for (int i = tid; i < kBuckets; i += kThreads) {
      if (counts[i] == 0) continue;
      atomicAdd(view.scratch->counts + i, counts[i]);
      atomicAdd(reinterpret_cast<unsigned long long*>(view.scratch->masses + i), masses[i]);
    }
  } else {
    mine = block_total(mine, shared);
    if (tid == 0) a.masses(row)[chunk] = mine;
  }
  if (!arrive_last(view.scratch->counters + 1, a.chunks, &flag)) return;
  if (view.filtered) {
    choose_target(view, shared);
  } else {
    draw_unfiltered(a, row, view, shared);
  }
}

/// A listed token: how far its scaled logit is below the largest, then its id. Unique; smaller
/// comes first in order.
__device__ uint64_t weight_key(float scaled, int id) {
  return uint64_t{__float_as_uint(-scaled) & 0x7FFFFFFFu} << kIdBits | static_cast<uint64_t>(id);
}
__device__ uint64_t key_weight(uint64_t key) {
  return weight_of(-__uint_as_float(static_cast<uint32_t>(key >> kIdBits)));
}
__device__ uint64_t token_of(uint64_t key) { return key & ((uint64_t{1} << kIdBits) - 1); }

/// The tokens that pick works on: the list in shared memory, or the row itself if it is longer.
struct Candidates {
  const uint64_t* list;
  int size;  // of the list; -1: walk the row
  const RowView* view;
  int target, vocab;

  /// Calls use(key) for each, with whole warps together; ~0: no token in this lane.
  template <typename Use>
  __device__ void for_each(const Use& use) const {
    constexpr int kBatch = 8;  // logits on their way at once
    const int tid = static_cast<int>(threadIdx.x);
    if (size >= 0) {
      for (int base = 0; base < size; base += kThreads) {
        use(base + tid < size ? list[base + tid] : ~uint64_t{0});
      }
      return;
    }
    for (int base = 0; base < vocab; base += kBatch * kThreads) {
      float logit[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int id = base + i * kThreads + tid;
        logit[i] = id < vocab ? view->logits[id] : -INFINITY;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float scaled = view->scaled_logit(logit[i]);
        const bool in = scaled >= view->cutoff && bucket_of(scaled) <= target;
        use(in ? weight_key(scaled, base + i * kThreads + tid) : ~uint64_t{0});
      }
    }
  }
};

/// Weighted selection by radix, 9 bits at a time: the smallest digit string whose running weight,
/// in ascending order, reaches `need`. Keys up to `limit` count.
template <int kBits, typename Digits, typename Weight>
__device__ uint64_t select(const Candidates& candidates, uint64_t need, unsigned long long* bins,
                           uint64_t* shared, uint64_t limit, const Digits& digits_of,
                           const Weight& weight_of_key) {
  static_assert(kThreads == 512);
  __shared__ uint64_t digit_and_before[2];
  const int tid = static_cast<int>(threadIdx.x), lane = tid % 32;
  uint64_t prefix = 0;
  for (int shift = (kBits - 1) / 9 * 9; shift >= 0; shift -= 9) {
    __syncthreads();
    bins[tid] = 0;
    __syncthreads();
    candidates.for_each([&](uint64_t key) {
      const uint64_t digits = digits_of(key);
      const bool counts = key <= limit && digits >> (shift + 9) == prefix;
      const int bin = static_cast<int>(digits >> shift & 511);
      const uint64_t weight = counts ? weight_of_key(key) : 0;
      // The first digits of many keys are equal: one addition a warp for up to four of its bins.
      unsigned lanes = __ballot_sync(~0u, counts);
      for (int round = 0; round < 4 && lanes != 0; ++round) {
        const int common = __shfl_sync(~0u, bin, __ffs(static_cast<int>(lanes)) - 1);
        const bool mine = (lanes >> lane & 1) != 0 && bin == common;
        uint64_t sum = mine ? weight : 0;
        for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane == 0) atomicAdd(&bins[common], static_cast<unsigned long long>(sum));
        lanes &= ~__ballot_sync(~0u, mine);
      }
      if ((lanes >> lane & 1) != 0) atomicAdd(&bins[bin], static_cast<unsigned long long>(weight));
    });
    __syncthreads();
    where_reached(bins[tid], need, shared, [&](uint64_t before) {
      digit_and_before[0] = static_cast<uint64_t>(tid);
      digit_and_before[1] = before;
    });
    __syncthreads();
    prefix = prefix << 9 | digit_and_before[0];
    need -= digit_and_before[1];
  }
  return prefix;
}

/// Exact top-k, top-p and draw, by selections.
__device__ int pick_by_radix(const RowView& view, const Candidates& candidates,
                             unsigned long long* bins, uint64_t* shared) {
  constexpr int kKeyBits = 31 + kIdBits;
  const uint64_t kept = view.scratch->kept;
  const auto whole_key = [](uint64_t key) { return key; };
  uint64_t limit = ~uint64_t{0} - 1;  // keys up to it are left
  const auto mass_left = [&] {
    uint64_t mine = 0;
    candidates.for_each([&](uint64_t key) {
      if (key <= limit) mine += key_weight(key);
    });
    return block_total(mine, shared);
  };
  uint64_t total = view.scratch->total;  // before top-k: of tokens that are not listed, too
  if (view.params.top_k > 0) {
    const uint64_t k = static_cast<uint64_t>(view.params.top_k);
    limit = select<kKeyBits>(candidates, k < kept ? k : kept, bins, shared, limit, whole_key,
                             [](uint64_t) { return uint64_t{1}; });
    total = mass_left();
  }
  if (view.params.top_p < 1.0f) {
    limit = select<kKeyBits>(candidates, share(view.params.top_p, total), bins, shared, limit,
                             whole_key, key_weight);
    total = mass_left();
  }
  const uint64_t need = __umul64hi(random_bits(view.params.seed, view.params.draw), total) + 1;
  return static_cast<int>(
      select<kIdBits>(candidates, need, bins, shared, limit, token_of, key_weight));
}

/// The same for up to kFew listed tokens, one a thread: each is compared with all.
__device__ int pick_by_rank(const RowView& view, const uint64_t* list, int size,
                            unsigned long long* weights, uint64_t* shared) {
  __shared__ int token;
  const int tid = static_cast<int>(threadIdx.x);
  const bool mine = tid < size;
  const uint64_t key = mine ? list[tid] : ~uint64_t{0};
  const uint64_t weight = mine ? key_weight(key) : 0;
  weights[tid] = weight;
  __syncthreads();
  int rank = 0;
  uint64_t before = 0;  // mass of the tokens that come first in order
  for (int i = 0; i < size; ++i) {
    const bool first = list[i] < key;
    rank += first;
    before += first ? weights[i] : 0;
  }
  bool left = mine;
  uint64_t total = view.scratch->total;
  if (view.params.top_k > 0) {
    left = left && rank < view.params.top_k;
    total = block_total(left ? weight : 0, shared);
  }
  if (view.params.top_p < 1.0f) {
    left = left && before < share(view.params.top_p, total);
    total = block_total(left ? weight : 0, shared);
  }
  const uint64_t need = __umul64hi(random_bits(view.params.seed, view.params.draw), total) + 1;
  __syncthreads();
  weights[tid] = left ? weight : 0;
  __syncthreads();
  before = 0;  // in order of id
  for (int i = 0; i < size; ++i) before += token_of(list[i]) < token_of(key) ? weights[i] : 0;
  if (left && before < need && need - before <= weight) token = static_cast<int>(token_of(key));
  __syncthreads();
  return token;
}

__global__ void __launch_bounds__(kThreads) pick_kernel(const Launch a) {
  __shared__ uint64_t list[kList];
  __shared__ unsigned long long bins[kThreads];
  __shared__ uint64_t shared[kWarps];
  __shared__ int flag;
  __shared__ uint32_t begin;
  const int64_t row = blockIdx.x / static_cast<unsigned>(a.chunks);
  const int chunk = static_cast<int>(blockIdx.x) % a.chunks, tid = static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  allow_next_kernel();
  RowView view;
  if (!load_row(a, row, view) || !view.filtered) return;
  const int target = view.scratch->target, tokens = static_cast<int>(view.scratch->listed);
  const bool listed = tokens <= kList;
  if (listed) {
    uint64_t keys[kEach];
    uint64_t mine = 0;
    for (int i = 0; i < kEach; ++i) {
      const int id = chunk * kChunk + i * kThreads + tid;
      const float scaled = id < a.args.vocab ? view.scaled(id) : -INFINITY;
      const bool in = scaled >= view.cutoff && bucket_of(scaled) <= target;
      keys[i] = in ? weight_key(scaled, id) : ~uint64_t{0};
      mine += in;
    }
    const uint64_t before = block_before(mine, shared);
    if (tid == kThreads - 1) {
      const uint32_t all = static_cast<uint32_t>(before + mine);
      begin = all == 0 ? 0 : atomicAdd(&view.scratch->list_size, all);
    }
    __syncthreads();
    uint64_t* to = view.scratch->list + begin + before;
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] != ~uint64_t{0}) *to++ = keys[i];
    }
  }
  if (!arrive_last(view.scratch->counters + 2, a.chunks, &flag)) return;
  const int size = listed ? tokens : -1;
  for (int i = tid; i < size; i += kThreads) list[i] = __ldcg(view.scratch->list + i);
  if (tid == 0) view.scratch->list_size = 0;
  __syncthreads();
  const int token =
      size >= 0 && size <= kFew
          ? pick_by_rank(view, list, size, bins, shared)
          : pick_by_radix(view, {list, size, &view, target, static_cast<int>(a.args.vocab)}, bins,
                          shared);
  if (tid == 0) write_token(a, row, view.max, view.log_sum, token);
}

}  // namespace

int64_t sample_scratch_bytes(int64_t max_rows, int64_t vocab) {
  return max_rows * row_bytes(vocab);
}

Result<void> sample(const SampleArgs& args, void* scratch, int64_t scratch_bytes,
                    cudaStream_t stream) {
  if (args.logits == nullptr || args.tokens == nullptr || args.logprobs == nullptr ||
      scratch == nullptr || args.rows < 1 || args.vocab < 1 || args.vocab > kMaxVocab ||
      args.row_stride < args.vocab) {
    return Error(Code::kInvalidArgument,
                 cat("sample: rows ", args.rows, ", vocab ", args.vocab, ", row stride ",
                     args.row_stride, ", or a required pointer is null"));
  }
  Launch launch;
  launch.args = args;
  launch.args.greedy_only = args.greedy_only || args.params == nullptr;
  launch.scratch = static_cast<std::byte*>(scratch);
  launch.row_bytes = row_bytes(args.vocab);
  launch.chunks = static_cast<int>(chunks_of(args.vocab));
  if (args.rows * launch.row_bytes > scratch_bytes) {
    return Error(Code::kInvalidArgument, cat("sample: ", scratch_bytes, " bytes of scratch, ",
                                             args.rows * launch.row_bytes, " are needed"));
  }
  const int blocks = static_cast<int>(args.rows * launch.chunks);
  cudaError_t error = launch_overlapped(scan_kernel, blocks, kThreads, 0, stream, launch);
  if (!launch.args.greedy_only) {
    for (const auto kernel : {mass_kernel, pick_kernel}) {
      if (error == cudaSuccess) {
        error = launch_overlapped(kernel, blocks, kThreads, 0, stream, launch);
      }
    }
  }
  if (error != cudaSuccess)
    return Error(Code::kInternal, cat("sample: ", cudaGetErrorString(error)));
  return {};
}

}  // namespace nibble::kernels::cuda
