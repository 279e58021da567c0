// Two parallel sections: gate, up and the activation by (expert, range of intermediate tiles); then
// down for all experts and the weighted sum by range of output tiles, so that the down products
// of a range meet in one worker's scratch and are summed in slot order.
#include "kernels/moe/moe.h"

#include <algorithm>

#include "kernels/matmul/tile_matrix.h"
#include "kernels/matmul/tile_split.h"
#include "kernels/moe/expert_groups.h"
#include "kernels/moe/mlp_ops.h"

namespace nibble::kernels {
namespace {

// Output tiles of a down task: enough that an expert's rows are read few times, few enough that
// the scratch [pairs][tiles * 16] stays small. Few tokens stream the weights: two tasks a thread.
constexpr int64_t kMaxDownTiles = 16;
constexpr int64_t kStreamingDownTasks = 2;

const MlpOps& mlp_ops_of(device::Isa isa) {
#define NIBBLE_PICK_MLP_OPS(ns, value) \
  if (isa == value) return ns::mlp_ops();
  NIBBLE_FOR_EACH_ISA(NIBBLE_PICK_MLP_OPS)
#undef NIBBLE_PICK_MLP_OPS
  NIBBLE_CHECK(false, "ISA ", device::isa_name(isa), " is not in this build");
}

int64_t down_tiles_per_task(int64_t hidden, int threads, int64_t tokens) {
  if (tokens < kStreamingRows) {
    return ceil_div(tile_count(hidden), threads == 1 ? 1 : threads * kStreamingDownTasks);
  }
  return std::clamp<int64_t>(ceil_div(tile_count(hidden), threads * kTasksPerThread), 1,
                             kMaxDownTiles);
}

/// Packed x of one row block of one expert, in the kinds that gate and up want.
struct PackedX {
  std::byte* kinds[kPackKinds];
  int64_t key;  // which rows it holds; -1: none
};

/// What a task of the first section needs to know of an expert.
struct UpWork {
  int64_t first_task, chunks;
};

class Moe {
 public:
  Moe(const Exec& exec, const MoeArgs& args)
      : exec_(exec),
        a_(args),
        tile_ops_(tile_ops_of(exec.isa)),
        mlp_ops_(mlp_ops_of(exec.isa)),
        threads_(exec.pool != nullptr ? exec.pool->threads() : 1) {}

  void run() {
    WorkspaceScope scope(*exec_.workspace);
    groups_ = group_by_expert(a_, *exec_.workspace);
    plan();
    run_up();
    run_down();
  }

 private:
  const ActiveExpert& active(int64_t i) const { return groups_.active[i]; }
  static int64_t intermediate(const ActiveExpert& e) { return e.ref->gate.rows(); }
  int64_t block_rows(const ActiveExpert& e) const {
    return std::min({e.rows, row_block(a_.hidden), row_block(intermediate(e))});
  }

  void plan() {
    int64_t cost = 0;
    for (int64_t i = 0; i < groups_.active_count; ++i) {
      const ActiveExpert& e = active(i);
      const ExpertRef& r = *e.ref;
      const int64_t n = intermediate(e);
      NIBBLE_CHECK(r.up.rows() == n && r.down.cols() == n && r.gate.cols() == a_.hidden &&
                       r.up.cols() == a_.hidden && r.down.rows() == a_.hidden,
                   "expert of [", n, ", ", r.gate.cols(), "] in a block of hidden ", a_.hidden);
      max_intermediate_ = std::max(max_intermediate_, n);
      max_rows_ = std::max(max_rows_, e.rows);
      wanted_[kind_of(r.gate)] = true;
      wanted_[kind_of(r.up)] = true;
      cost += up_cost(e);
    }
    // Half as much again for down.
    pool_ = cost + cost / 2 > 2 * kMinTaskCycles ? exec_.pool : nullptr;
    const int64_t task_cost = std::max(cost / (threads_ * kTasksPerThread), kMinTaskCycles);
    up_ = exec_.workspace->take<UpWork>(groups_.active_count);
    for (int64_t i = 0; i < groups_.active_count; ++i) {
      const int64_t tiles = tile_count(intermediate(active(i)));
      const int64_t chunks = pool_ == nullptr ? 1 : ceil_div(up_cost(active(i)), task_cost);
      up_[i] = {up_tasks_, std::clamp<int64_t>(chunks, 1, tiles)};
      up_tasks_ += up_[i].chunks;
    }
    h_row_bytes_ = block_count(max_intermediate_) * 128;
    h_ = exec_.workspace->take<std::byte>(groups_.pairs * h_row_bytes_);
  }
  int64_t up_cost(const ActiveExpert& e) const {
    return 2 * tile_count(intermediate(e)) * tile_cost(a_.hidden, e.rows);
  }
  int kind_of(const tensor::TensorRef& w) const {
    return static_cast<int>(TileMatrix::pack_kind(tile_ops_, exec_.activations, w.view.format));
  }

  // First section.

  void run_up() {
    WorkspaceScope scope(*exec_.workspace);
    // One token is one row for every expert: packed once. Else every worker packs what it runs.
    const bool shared = a_.tokens == 1;
    PackedX* packed = exec_.workspace->take<PackedX>(shared ? 1 : threads_);
    const int64_t rows = std::min(max_rows_, row_block(a_.hidden));
    for (int i = 0; i < (shared ? 1 : threads_); ++i) {
      packed[i].key = -1;
      for (int kind = 0; kind < kPackKinds; ++kind) {
        packed[i].kinds[kind] =
            wanted_[kind]
                ? exec_.workspace->take<std::byte>(rows * block_count(a_.hidden) *
                                                   packed_row_bytes(static_cast<PackKind>(kind)))
                : nullptr;
      }
    }
    if (shared) {
      for (int kind = 0; kind < kPackKinds; ++kind) {
        if (wanted_[kind]) pack(packed[0], kind, nullptr, 1);
      }
    }
    auto body = [&](int64_t task, int worker) {
      const UpWork* first = up_;
      const UpWork* work =
          std::upper_bound(first, first + groups_.active_count, task,
                           [](int64_t t, const UpWork& w) { return t < w.first_task; }) -
          1;
      up_task(work - up_, task - work->first_task, work->chunks, packed[shared ? 0 : worker],
              shared);
    };
    run_tasks(pool_, up_tasks_, body);
  }

  void pack(PackedX& packed, int kind, const int32_t* tokens, int64_t rows) const {
    tile_ops_.pack(a_.x, a_.hidden, tokens, rows, a_.hidden, static_cast<PackKind>(kind),
                   packed.kinds[kind]);
  }

  void up_task(int64_t index, int64_t chunk, int64_t chunks, PackedX& packed, bool shared) const {
    const ActiveExpert& e = active(index);
    const TileMatrix gate(tile_ops_, exec_.activations, e.ref->gate);
    const TileMatrix up(tile_ops_, exec_.activations, e.ref->up);
    const int gate_kind = static_cast<int>(gate.pack_kind());
    const int up_kind = static_cast<int>(up.pack_kind());
    const int64_t begin = share_begin(gate.tiles(), chunks, chunk);
    const int64_t end = share_begin(gate.tiles(), chunks, chunk + 1);
    const int64_t step = block_rows(e);
    for (int64_t row = 0; row < e.rows; row += step) {
      const int64_t rows = std::min(step, e.rows - row);
      if (!shared && packed.key != e.first + row) {
        const int32_t* tokens = groups_.token + e.first + row;
        pack(packed, gate_kind, tokens, rows);
        if (up_kind != gate_kind) pack(packed, up_kind, tokens, rows);
        packed.key = e.first + row;
      }
      up_rows(e, gate, up, packed, begin, end, row, rows);
    }
  }

  void up_rows(const ActiveExpert& e, const TileMatrix& gate, const TileMatrix& up,
               const PackedX& packed, int64_t begin, int64_t end, int64_t row, int64_t rows) const {
    alignas(64) float gate_sums[kMaxRowBlock * kTileRows];
    alignas(64) float up_sums[kMaxRowBlock * kTileRows];
    const auto h_kind = static_cast<PackKind>(kind_of(e.ref->down));
    const int64_t h_row = packed_row_bytes(h_kind);
    std::byte* h = h_block(e, row);
    auto product = [&](const TileMatrix& m, int64_t tile, float* sums) {
      m.run(tile, packed.kinds[static_cast<int>(m.pack_kind())],
            rows * packed_row_bytes(m.pack_kind()), rows, sums);
    };
    // As many tiles of gate, then of up, as the sums have room for: few rows stream the weights,
    // and one long stream is faster than two in turn.
    const int64_t run = rows < kStreamingRows ? kMaxRowBlock / rows : 1;
    for (int64_t first = begin; first < end; first += run) {
      const int64_t last = std::min(first + run, end);
      const auto sums_of = [&](float* sums, int64_t tile) {
        return sums + (tile - first) * rows * kTileRows;
      };
      for (int64_t t = first; t < last; ++t) product(gate, t, sums_of(gate_sums, t));
      for (int64_t t = first; t < last; ++t) product(up, t, sums_of(up_sums, t));
      for (int64_t t = first; t < last; ++t) {
        const int64_t n = t * kTileRows;
        mlp_ops_.activate(a_.mlp, sums_of(gate_sums, t), sums_of(up_sums, t), rows,
                          e.ref->gate_bias != nullptr ? e.ref->gate_bias + n : nullptr,
                          e.ref->up_bias != nullptr ? e.ref->up_bias + n : nullptr, gate.lanes(t),
                          h_kind, h + t / 2 * rows * h_row + t % 2 * (h_row / 2));
      }
    }
    if (end == gate.tiles() && end % 2 != 0) {  // the other half of the last block of 32
      std::byte* out = h + end / 2 * rows * h_row + h_row / 2;
      for (int64_t t = 0; t < rows; ++t) {
        std::fill_n(out + t * h_row, h_row / 2, std::byte{0});
      }
    }
  }

  /// Packed intermediate of the row block that begins at an expert's `row`.
  std::byte* h_block(const ActiveExpert& e, int64_t row) const {
    return h_ + (e.first + row) * h_row_bytes_;
  }

  // Second section.

  void run_down() {
    const int64_t tiles = tile_count(a_.hidden);
    const int64_t per_task = down_tiles_per_task(a_.hidden, threads_, a_.tokens);
    const int64_t stride = per_task * kTileRows;
    WorkspaceScope scope(*exec_.workspace);
    float* d = exec_.workspace->take<float>(threads_ * groups_.pairs * stride);
    auto body = [&](int64_t task, int worker) {
      const int64_t begin = task * per_task;
      const int64_t end = std::min(begin + per_task, tiles);
      float* mine = d + worker * groups_.pairs * stride;
      for (int64_t i = 0; i < groups_.active_count; ++i) {
        down_rows(active(i), begin, end, mine + active(i).first * stride, stride);
      }
      const int64_t column = begin * kTileRows;
      const int64_t width = std::min(end * kTileRows, a_.hidden) - column;
      for (int64_t t = 0; t < a_.tokens; ++t) {
        const int64_t slot = t * groups_.slots;
        mlp_ops_.combine(mine, stride, groups_.position + slot, groups_.weight + slot,
                         groups_.slots, width, a_.y + t * a_.hidden + column);
      }
    };
    run_tasks(pool_, ceil_div(tiles, per_task), body);
  }

  /// Output tiles [begin, end) of one expert's rows, to d [rows][stride].
  void down_rows(const ActiveExpert& e, int64_t begin, int64_t end, float* d,
                 int64_t stride) const {
    alignas(64) float sums[kMaxRowBlock * kTileRows];
    const TileMatrix down(tile_ops_, exec_.activations, e.ref->down);
    const int64_t row_bytes = packed_row_bytes(down.pack_kind());
    const int64_t step = block_rows(e);
    for (int64_t row = 0; row < e.rows; row += step) {
      const int64_t rows = std::min(step, e.rows - row);
      for (int64_t tile = begin; tile < end; ++tile) {
        down.run(tile, h_block(e, row), rows * row_bytes, rows, sums);
        const float* bias = e.ref->down_bias;
        tile_ops_.store(sums, rows, bias != nullptr ? bias + tile * kTileRows : nullptr,
                        down.lanes(tile), d + row * stride + (tile - begin) * kTileRows, stride);
      }
    }
  }

  const Exec& exec_;
  const MoeArgs& a_;
  const TileOps& tile_ops_;
  const MlpOps& mlp_ops_;
  int threads_;
  ThreadPool* pool_ = nullptr;
  ExpertGroups groups_;
  int64_t max_intermediate_ = 0, max_rows_ = 0;
  bool wanted_[kPackKinds] = {};
  UpWork* up_ = nullptr;
  int64_t up_tasks_ = 0;
  std::byte* h_ = nullptr;  // [pairs] rows of h_row_bytes_, each expert's row block packed
  int64_t h_row_bytes_ = 0;
};

}  // namespace

void moe(const Exec& exec, const MoeArgs& args) {
  if (args.tokens == 0) return;
  NIBBLE_CHECK(args.top_k > 0 || args.shared != nullptr, "no expert for ", args.tokens, " tokens");
  Moe(exec, args).run();
}

int64_t moe_workspace_bytes(int64_t tokens, int64_t hidden, int64_t max_intermediate, int64_t top_k,
                            int64_t experts, int threads) {
  threads = std::max(threads, 1);
  const int64_t pairs = tokens * (top_k + 1);
  const int64_t slots = tokens == 1 ? 1 : threads;
  const int64_t rows = std::min(tokens, row_block(hidden));
  const int64_t packed_rows =  // two kinds at most
      2 * Workspace::bytes_for<std::byte>(rows * block_count(hidden) * 128);
  const int64_t up = Workspace::bytes_for<PackedX>(slots) + slots * packed_rows;
  const auto down_bytes = [&](int64_t t) {
    return Workspace::bytes_for<float>(threads * t * (top_k + 1) *
                                       down_tiles_per_task(hidden, threads, t) * kTileRows);
  };
  const int64_t down =
      std::max(down_bytes(tokens), down_bytes(std::min(tokens, kStreamingRows - 1)));
  return expert_groups_bytes(tokens, top_k, experts) + Workspace::bytes_for<UpWork>(experts + 1) +
         Workspace::bytes_for<std::byte>(pairs * block_count(max_intermediate) * 128) +
         std::max(up, down);
}

void mlp(const Exec& exec, const float* x, int64_t tokens, int64_t hidden, const ExpertRef& net,
         const MlpShape& shape, float* y) {
  MoeArgs args;
  args.x = x;
  args.tokens = tokens;
  args.hidden = hidden;
  args.shared = &net;
  args.mlp = shape;
  args.y = y;
  moe(exec, args);
}

}  // namespace nibble::kernels
