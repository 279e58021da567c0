// Attention over pages: contract checks, work split and page addresses. The arithmetic of one chunk
// of positions is in attention_isa.cc.
//
// A task is up to 32 queries: some rows of one sequence times some heads of one KV head. With
// enough tasks for the threads, each task walks its chunks itself and keeps a running softmax in
// its worker's scratch. With few (decode over a long context), the chunks are tasks of their own:
// waves of them leave their states in the workspace, and after each wave every task merges its
// states in ascending order. The operations of a query are the same in both.
#include "kernels/attention/attention.h"

#include <algorithm>

#include "kernels/attention/attention_isa.h"
#include "kernels/attention/row_blocks.h"

namespace nibble::kernels {
namespace {

constexpr int64_t kMaxTaskHeads = 16;
constexpr int64_t kTasksPerThread = 4;  // below this, chunks become tasks

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

AttentionFns attention_fns(device::Isa isa) {
  switch (isa) {
#define NIBBLE_CASE(ns, value) \
  case value: return {ns::attend_chunk, ns::merge_state, ns::finish_state};
    NIBBLE_FOR_EACH_ISA(NIBBLE_CASE)
#undef NIBBLE_CASE
    default: break;
  }
  check_failed(__FILE__, __LINE__, "isa is in this build", std::string(device::isa_name(isa)));
}

/// How the heads of one KV head are cut, and with it the rows of a task.
struct TaskShape {
  int64_t group = 0;  // heads of a KV head
  int64_t parts = 0;  // tasks they are cut into
  int64_t heads = 0;  // heads of a task at most
  int64_t rows = 0;   // rows of a task at most

  TaskShape(int64_t heads_total, int64_t kv_heads) : group(heads_total / kv_heads) {
    parts = ceil_div(group, kMaxTaskHeads);
    heads = ceil_div(group, parts);
    rows = std::min<int64_t>(16, kAttentionQueries / heads);
  }
  int64_t queries(int64_t step_rows) const { return std::min(rows, step_rows) * heads; }
};

struct Task {
  RowBlock block;
  int64_t kv_head = 0, head = 0, heads = 0;
  int64_t first_chunk = 0, chunks = 0;
  int64_t queries() const { return block.rows * heads; }
};

class Run {
 public:
  Run(const Exec& exec, const AttentionArgs& args, const KvPages& pages)
      : exec_(exec),
        args_(args),
        pages_(pages),
        fns_(attention_fns(exec.isa)),
        shape_(args.heads, pages.geometry.kv_heads),
        blocks_(*exec.workspace, args.sequences, shape_.rows, /*aligned=*/false),
        tasks_(blocks_.count() * pages.geometry.kv_heads * shape_.parts),
        stride_(attention_state_floats(pages.geometry.v_dim)) {
    for (const SequenceRows& s : args.sequences) step_rows_ += s.rows;
  }

  void run() {
    if (tasks_ == 0) return;
    const int64_t threads = exec_.pool->threads();
    scratch_ = exec_.workspace->take<float>(threads * scratch_floats());
    if (tasks_ < kTasksPerThread * threads && threads > 1) {
      int64_t most_chunks = 0;
      for (int64_t t = 0; t < tasks_; ++t) most_chunks = std::max(most_chunks, task(t).chunks);
      if (most_chunks > 1) {
        run_chunks(most_chunks, ceil_div(kTasksPerThread * threads, tasks_));
        return;
      }
    }
    run_tasks();
  }

 private:
  int64_t scratch_floats() const { return attention_scratch_floats(pages_.geometry.k_dim); }
  int64_t task_floats() const { return shape_.queries(step_rows_) * stride_; }

  /// Later rows first: they cost more.
  Task task(int64_t index) const {
    const int64_t t = tasks_ - 1 - index;
    const int64_t kv_heads = pages_.geometry.kv_heads;
    const int64_t part = t % shape_.parts;
    Task out;
    out.block = blocks_[t / shape_.parts / kv_heads];
    out.kv_head = t / shape_.parts % kv_heads;
    out.head = out.kv_head * shape_.group + part * shape_.heads;
    out.heads = std::min(shape_.heads, shape_.group - part * shape_.heads);
    const int64_t first = out.block.sequence->position_begin + out.block.first;
    out.first_chunk = window_begin(first) / kAttentionChunk;
    out.chunks = (first + out.block.rows - 1) / kAttentionChunk - out.first_chunk + 1;
    return out;
  }

  int64_t window_begin(int64_t own) const {
    return args_.window == 0 ? 0 : std::max<int64_t>(0, own - args_.window + 1);
  }

  void attend(const Task& task, int64_t chunk, int worker, float* states) const {
    const KvGeometry& g = pages_.geometry;
    const int64_t from = chunk * kAttentionChunk;
    AttentionChunk c;
    c.type = g.type;
    c.k_dim = g.k_dim;
    c.v_dim = g.v_dim;
    c.scale = args_.scale;
    c.queries = task.queries();
    int64_t low = kAttentionChunk, high = 0;
    for (int64_t i = 0; i < c.queries; ++i) {
      const int64_t row = task.block.first + i / task.heads;
      const int64_t own = task.block.sequence->position_begin + row;
      const int64_t begin = std::max<int64_t>(0, window_begin(own) - from);
      const int64_t end = std::min(kAttentionChunk, own + 1 - from);
      c.q[i] = args_.q + (task.block.sequence->row_begin + row) * args_.q_stride +
               (task.head + i % task.heads) * g.k_dim;
      c.begin[i] = c.end[i] = 0;
      if (begin >= end) continue;
      c.begin[i] = static_cast<int32_t>(begin);
      c.end[i] = static_cast<int32_t>(end);
      low = std::min(low, begin);
      high = std::max(high, end);
    }
    const int64_t elem = kv_type_bytes(g.type);
    for (int64_t b = low / kAttentionBlock; b * kAttentionBlock < high; ++b) {
      const int64_t position = from + b * kAttentionBlock;
      const int64_t page = position / g.page_tokens, at = position % g.page_tokens;
      const std::byte* head =
          pages_.head(args_.layer, task.block.sequence->pages[page], task.kv_head);
      c.k[b] = head + at * g.k_dim * elem;
      c.v[b] = head + (g.page_tokens * g.k_dim + at * g.v_dim) * elem;
    }
    fns_.attend_chunk(c, scratch_ + worker * scratch_floats(), states);
  }

  void clear(const Task& task, float* states) const {
    for (int64_t i = 1; i <= task.queries(); ++i) states[i * stride_ - kAttentionBlock + 1] = 0.0f;
  }
  void merge(const Task& task, float* states, const float* later) const {
    for (int64_t i = 0; i < task.queries(); ++i) {
      fns_.merge_state(states + i * stride_, later + i * stride_, pages_.geometry.v_dim);
    }
  }
  void finish(const Task& task, float* states) const {
    for (int64_t i = 0; i < task.queries(); ++i) {
      const int64_t row = task.block.sequence->row_begin + task.block.first + i / task.heads;
      const int64_t head = task.head + i % task.heads;
      fns_.finish_state(states + i * stride_, args_.sinks == nullptr ? nullptr : args_.sinks + head,
                        pages_.geometry.v_dim,
                        args_.out + row * args_.out_stride + head * pages_.geometry.v_dim);
    }
  }

  void run_tasks() {
    float* scratch = exec_.workspace->take<float>(2 * exec_.pool->threads() * task_floats());
    exec_.pool->parallel_for(tasks_, [&](int64_t index, int worker) {
      const Task t = task(index);
      float* states = scratch + 2 * worker * task_floats();
      float* later = states + task_floats();
      attend(t, t.first_chunk, worker, states);
      for (int64_t c = 1; c < t.chunks; ++c) {
        attend(t, t.first_chunk + c, worker, later);
        merge(t, states, later);
      }
      finish(t, states);
    });
  }

  void run_chunks(int64_t most_chunks, int64_t wave) {
    float* states = exec_.workspace->take<float>(tasks_ * task_floats());
    float* later = exec_.workspace->take<float>(tasks_ * wave * task_floats());
    for (int64_t begin = 0; begin < most_chunks; begin += wave) {
      exec_.pool->parallel_for(tasks_ * wave, [&](int64_t index, int worker) {
        const Task t = task(index / wave);
        const int64_t chunk = begin + index % wave;
        if (chunk >= t.chunks) return;
        attend(t, t.first_chunk + chunk, worker, later + index * task_floats());
      });
      exec_.pool->parallel_for(tasks_, [&](int64_t index, int) {
        const Task t = task(index);
        float* own = states + index * task_floats();
        if (begin == 0) clear(t, own);
        const int64_t end = std::min(begin + wave, t.chunks);
        for (int64_t c = begin; c < end; ++c) {
          merge(t, own, later + (index * wave + c - begin) * task_floats());
        }
        if (begin + wave >= most_chunks) finish(t, own);
      });
    }
  }

  const Exec& exec_;
  const AttentionArgs& args_;
  const KvPages& pages_;
  AttentionFns fns_;
  TaskShape shape_;
  RowBlocks blocks_;
  int64_t tasks_, stride_, step_rows_ = 0;
  float* scratch_ = nullptr;
};

}  // namespace

void attention(const Exec& exec, const AttentionArgs& args, const KvPages& pages) {
  const KvGeometry& g = pages.geometry;
  NIBBLE_CHECK(exec.pool != nullptr && exec.workspace != nullptr);
  NIBBLE_CHECK(g.kv_heads > 0 && args.heads > 0 && args.heads % g.kv_heads == 0, args.heads,
               " heads, ", g.kv_heads, " KV heads");
  NIBBLE_CHECK(
      g.k_dim > 0 && g.v_dim > 0 && g.page_tokens > 0 && g.page_tokens % kAttentionBlock == 0,
      g.k_dim, " ", g.v_dim, " ", g.page_tokens);
  NIBBLE_CHECK(args.layer >= 0 && args.layer < g.layers, "layer ", args.layer, " of ", g.layers);
  NIBBLE_CHECK(args.q_stride >= args.heads * g.k_dim && args.out_stride >= args.heads * g.v_dim,
               args.q_stride, " ", args.out_stride);
  NIBBLE_CHECK(args.window >= 0, "window ", args.window);
  WorkspaceScope scope(*exec.workspace);
  Run(exec, args, pages).run();
}

int64_t attention_workspace_bytes(int64_t rows, int64_t heads, const KvGeometry& geometry,
                                  int threads) {
  const TaskShape shape(heads, geometry.kv_heads);
  // One state per task and wave * tasks < (kTasksPerThread * threads) + tasks later ones, with
  // tasks < kTasksPerThread * threads.
  const int64_t states = 3 * kTasksPerThread * threads;
  const int64_t task_floats = shape.queries(rows) * attention_state_floats(geometry.v_dim);
  const int64_t prepare = Workspace::bytes_for<float>(threads * geometry.k_dim);
  return Workspace::bytes_for<int32_t>(rows + 1) + prepare +
         Workspace::bytes_for<float>(threads * attention_scratch_floats(geometry.k_dim)) +
         Workspace::bytes_for<float>(states * task_floats) + 64;
}

}  // namespace nibble::kernels
