// Attention of up to 32 queries over one chunk of positions, compiled once per ISA.
//
// Queries are taken in tiles of up to 8 that share every load of K and V; each query still has its
// own accumulators and its own fixed sequence of operations, so tiling never shows in the bits and
// each ISA may choose tiles that fit its registers. Phases of a tile: pack q, scores of all blocks,
// softmax per query, values. Offsets inside a chunk are small; page addresses come from the caller.
#include "kernels/attention/attention_isa.h"

#include "kernels/cpu/vec.h"

#if defined(__clang__)
#define NIBBLE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define NIBBLE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace nibble::kernels::NIBBLE_ISA_NS {
namespace {

// Register budgets: accumulators a loop keeps live. AVX-512 has 32 registers of 16 lanes; AVX2 has
// the room of 8, NEON that of 8 with 4 spare, so 4 accumulators leave space for operands.
#if defined(NIBBLE_VEC_AVX512)
constexpr int kTile = 8, kScoreAccs = 16, kValueRows = 4, kValueVecs = 4;
#else
constexpr int kTile = 4, kScoreAccs = 4, kValueRows = 4, kValueVecs = 1;
#endif
static_assert(kTile <= kAttentionTile);

inline F32x16 load_kv(const float* p) { return load(p); }
inline F32x16 load_kv(const uint16_t* p) { return load_bf16(p); }
inline F32x16 load_kv_first(const float* p, int64_t n) { return load_first(p, n); }
inline F32x16 load_kv_first(const uint16_t* p, int64_t n) { return load_bf16_first(p, n); }

/// scores[r][16 n + lane] = scale * (q of row r . k block n), rows kAttentionChunk apart.
/// q [k_dim][R].
template <int R, int N, typename T>
void score_blocks(const void* const* blocks, int64_t k_dim, const float* q, float scale,
                  float* scores) {
  const T* k[N];
  F32x16 acc[R][N];
  NIBBLE_UNROLL
  for (int n = 0; n < N; ++n) {
    k[n] = static_cast<const T*>(blocks[n]);
    NIBBLE_UNROLL
    for (int r = 0; r < R; ++r) acc[r][n] = set1(0.0f);
  }
  for (int64_t d = 0; d < k_dim; ++d) {
    F32x16 kv[N];
    NIBBLE_UNROLL
    for (int n = 0; n < N; ++n) kv[n] = load_kv(k[n] + d * kLanes);
    NIBBLE_UNROLL
    for (int r = 0; r < R; ++r) {
      const F32x16 qv = set1(q[d * R + r]);
      NIBBLE_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = fma(qv, kv[n], acc[r][n]);
    }
  }
  const F32x16 s = set1(scale);
  NIBBLE_UNROLL
  for (int r = 0; r < R; ++r) {
    NIBBLE_UNROLL
    for (int n = 0; n < N; ++n) {
      store(scores + r * kAttentionChunk + n * kLanes, mul(acc[r][n], s));
    }
  }
}

/// acc[r][16 n + lane] += sum over positions [begin, end) of p[r][position] * v[position], for N
/// vectors of v from `column` on; rows of acc are `stride` apart. Lanes past v_dim are kept 0.
template <int R, int N, bool kTail, typename T>
void add_values(const AttentionChunk& c, int64_t column, int64_t begin, int64_t end, const float* p,
                float* acc, int64_t stride) {
  F32x16 sum[R][N];
  NIBBLE_UNROLL
  for (int r = 0; r < R; ++r) {
    NIBBLE_UNROLL
    for (int n = 0; n < N; ++n) sum[r][n] = load(acc + r * stride + column + n * kLanes);
  }
  for (int64_t j = begin; j < end;) {
    const int64_t block = j / kAttentionBlock;
    const int64_t block_end = (block + 1) * kAttentionBlock;
    const int64_t stop = end < block_end ? end : block_end;
    const T* v = static_cast<const T*>(c.v[block]) + (j % kAttentionBlock) * c.v_dim + column;
    for (; j < stop; ++j, v += c.v_dim) {
      F32x16 vv[N];
      NIBBLE_UNROLL
      for (int n = 0; n < N; ++n) {
        vv[n] = kTail ? load_kv_first(v, c.v_dim - column) : load_kv(v + n * kLanes);
      }
      NIBBLE_UNROLL
      for (int r = 0; r < R; ++r) {
        const F32x16 pv = set1(p[r * kAttentionChunk + j]);
        NIBBLE_UNROLL
        for (int n = 0; n < N; ++n) sum[r][n] = fma(pv, vv[n], sum[r][n]);
      }
    }
  }
  NIBBLE_UNROLL
  for (int r = 0; r < R; ++r) {
    NIBBLE_UNROLL
    for (int n = 0; n < N; ++n) store(acc + r * stride + column + n * kLanes, sum[r][n]);
  }
}

/// All columns of v for R queries.
template <int R, typename T>
void add_value_rows(const AttentionChunk& c, int64_t begin, int64_t end, const float* p,
                    float* acc) {
  if (begin >= end) return;
  const int64_t stride = attention_state_floats(c.v_dim);
  int64_t column = 0;
  for (; column + kValueVecs * kLanes <= c.v_dim; column += kValueVecs * kLanes) {
    add_values<R, kValueVecs, false, T>(c, column, begin, end, p, acc, stride);
  }
  for (; column + kLanes <= c.v_dim; column += kLanes) {
    add_values<R, 1, false, T>(c, column, begin, end, p, acc, stride);
  }
  if (column < c.v_dim) add_values<R, 1, true, T>(c, column, begin, end, p, acc, stride);
}

/// Turns scores of positions [begin, end) into weights, in place; those of the same blocks but
/// outside become 0.
void softmax_weights(float* s, int64_t begin, int64_t end, float* top, float* total) {
  const int64_t first = begin / kLanes * kLanes;
  const int64_t last = (end + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = first; j < begin; ++j) s[j] = -INFINITY;
  for (int64_t j = end; j < last; ++j) s[j] = -INFINITY;
  F32x16 most = set1(-INFINITY);
  for (int64_t j = first; j < last; j += kLanes) most = max(load(s + j), most);  // skips NaN
  *top = reduce_max(most);
  const F32x16 peak = set1(*top);
  F32x16 sum = set1(0.0f);
  for (int64_t j = first; j < last; j += kLanes) {
    const F32x16 p = exp(sub(load(s + j), peak));
    store(s + j, p);
    sum = add(sum, p);
  }
  *total = reduce_add(sum);
}

/// Queries [at, at + R) of the chunk.
template <int R, typename T>
void attend_tile(const AttentionChunk& c, int64_t at, float* scratch, float* states) {
  constexpr int kBlocks = kScoreAccs / R < 8 ? kScoreAccs / R : 8;
  float* q = scratch;
  float* scores = scratch + kAttentionTile * c.k_dim;
  const int64_t stride = attention_state_floats(c.v_dim);
  float* state = states + at * stride;
  const int32_t* begins = c.begin + at;
  const int32_t* ends = c.end + at;

  // Positions that any query reads, and those that all read.
  int64_t low = kAttentionChunk, high = 0, common_low = 0, common_high = kAttentionChunk;
  for (int r = 0; r < R; ++r) {
    if (begins[r] < ends[r]) {
      low = begins[r] < low ? begins[r] : low;
      high = ends[r] > high ? ends[r] : high;
    }
    common_low = begins[r] > common_low ? begins[r] : common_low;
    common_high = ends[r] < common_high ? ends[r] : common_high;
    for (int64_t d = 0; d < c.k_dim; ++d) q[d * R + r] = c.q[at + r][d];
    for (int64_t i = 0; i < stride; ++i) state[r * stride + i] = 0.0f;
  }

  int64_t block = low / kAttentionBlock;
  const int64_t blocks = (high + kAttentionBlock - 1) / kAttentionBlock;
  for (; block + kBlocks <= blocks; block += kBlocks) {
    score_blocks<R, kBlocks, T>(c.k + block, c.k_dim, q, c.scale, scores + block * kLanes);
  }
  for (; block < blocks; ++block) {
    score_blocks<R, 1, T>(c.k + block, c.k_dim, q, c.scale, scores + block * kLanes);
  }

  for (int r = 0; r < R; ++r) {
    if (begins[r] >= ends[r]) continue;
    float* top = state + r * stride + stride - kLanes;
    softmax_weights(scores + r * kAttentionChunk, begins[r], ends[r], top, top + 1);
  }

  // Positions that only some queries read are added one query at a time: a weight of 0 would not
  // do, since 0 times another row's NaN is NaN.
  if (common_low > common_high) common_low = common_high = 0;
  if (common_low == common_high) {
    for (int r = 0; r < R; ++r) {
      add_value_rows<1, T>(c, begins[r], ends[r], scores + r * kAttentionChunk, state + r * stride);
    }
    return;
  }
  for (int r = 0; r < R; ++r) {
    add_value_rows<1, T>(c, begins[r], common_low, scores + r * kAttentionChunk,
                         state + r * stride);
  }
  constexpr int kRows = R < kValueRows ? R : kValueRows;
  for (int r = 0; r < R; r += kRows) {
    add_value_rows<kRows, T>(c, common_low, common_high, scores + r * kAttentionChunk,
                             state + r * stride);
  }
  for (int r = 0; r < R; ++r) {
    add_value_rows<1, T>(c, common_high, ends[r], scores + r * kAttentionChunk, state + r * stride);
  }
}

template <typename T>
void attend(const AttentionChunk& c, float* scratch, float* states) {
  int64_t at = 0;
  for (; at + kTile <= c.queries; at += kTile) attend_tile<kTile, T>(c, at, scratch, states);
  if constexpr (kTile > 4) {
    for (; at + 4 <= c.queries; at += 4) attend_tile<4, T>(c, at, scratch, states);
  }
  for (; at + 2 <= c.queries; at += 2) attend_tile<2, T>(c, at, scratch, states);
  for (; at < c.queries; ++at) attend_tile<1, T>(c, at, scratch, states);
}

/// a = a * e^(a's maximum - m) + b * e^(b's maximum - m) over n values and the sum, m the larger
/// maximum. values of b may be null: all 0.
void merge(float* a, const float* b, float b_top, float b_total, int64_t n) {
  float* top = a + n;
  const float m = b_top > top[0] ? b_top : top[0];
  const F32x16 wa = exp(set1(top[0] - m));
  const F32x16 wb = exp(set1(b_top - m));
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 scaled = mul(load(a + i), wa);
    store(a + i, b == nullptr ? scaled : add(scaled, mul(load(b + i), wb)));
  }
  float total[kLanes];
  store(total, add(mul(set1(top[1]), wa), mul(set1(b_total), wb)));
  top[0] = m;
  top[1] = total[0];
}

}  // namespace

void attend_chunk(const AttentionChunk& chunk, float* scratch, float* states) {
  if (chunk.type == KvType::kF32) {
    attend<float>(chunk, scratch, states);
  } else {
    attend<uint16_t>(chunk, scratch, states);
  }
}

void merge_state(float* state, const float* later, int64_t v_dim) {
  const int64_t n = attention_state_floats(v_dim) - kLanes;
  if (later[n + 1] == 0.0f) return;
  if (state[n + 1] == 0.0f) {
    for (int64_t i = 0; i < n + kLanes; ++i) state[i] = later[i];
    return;
  }
  merge(state, later, later[n], later[n + 1], n);
}

void finish_state(float* state, const float* sink, int64_t v_dim, float* out) {
  const int64_t n = attention_state_floats(v_dim) - kLanes;
  if (sink != nullptr) merge(state, nullptr, *sink, 1.0f, n);
  const F32x16 total = set1(state[n + 1]);
  const int64_t whole = v_dim / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, div(load(state + i), total));
  if (whole < v_dim) store_first(out + whole, div(load(state + whole), total), v_dim - whole);
}

}  // namespace nibble::kernels::NIBBLE_ISA_NS
