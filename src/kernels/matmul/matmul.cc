#include "kernels/matmul/matmul.h"

#include <algorithm>

#include "kernels/matmul/tile_matrix.h"
#include "kernels/matmul/tile_split.h"

namespace nibble::kernels {
namespace {

/// Packed activations of one row block, in the kinds that the jobs want.
struct PackedRows {
  std::byte* kinds[kPackKinds] = {};
};

class Matmul {
 public:
  Matmul(const Exec& exec, const float* x, int64_t x_stride, int64_t rows,
         std::span<const MatmulJob> jobs)
      : exec_(exec),
        ops_(tile_ops_of(exec.isa)),
        x_(x),
        x_stride_(x_stride),
        rows_(rows),
        k_(jobs.front().w.cols()),
        jobs_(jobs),
        block_rows_(std::min(rows, row_block(k_))) {
    for (const MatmulJob& job : jobs) {
      NIBBLE_CHECK(job.w.cols() == k_, job.w.cols(), " columns among jobs of ", k_);
      tiles_ += tile_count(job.w.rows());
      const PackKind kind = TileMatrix::pack_kind(ops_, exec.activations, job.w.view.format);
      wanted_[static_cast<int>(kind)] = true;
    }
  }

  void run() {
    const int threads = exec_.pool != nullptr ? exec_.pool->threads() : 1;
    const int64_t row_blocks = ceil_div(rows_, block_rows_);
    const bool shared = row_blocks == 1;
    WorkspaceScope scope(*exec_.workspace);
    // One row block: packed once, by the caller. Several: every worker packs the one it works on.
    packed_ = exec_.workspace->take<PackedRows>(shared ? 1 : threads);
    packed_block_ = exec_.workspace->take<int64_t>(shared ? 1 : threads);
    for (int i = 0; i < (shared ? 1 : threads); ++i) {
      packed_[i] = take_rows();
      packed_block_[i] = -1;
    }
    if (shared) pack(0, 0);

    const int64_t cost = tile_cost(k_, block_rows_);
    const int64_t chunks = task_count(tiles_, cost * row_blocks, threads, rows_, row_blocks);
    auto body = [&](int64_t task, int worker) {
      const int64_t block = task / chunks;
      const int slot = shared ? 0 : worker;
      if (packed_block_[slot] != block) pack(block, slot);
      run_tiles(block, packed_[slot], share_begin(tiles_, chunks, task % chunks),
                share_begin(tiles_, chunks, task % chunks + 1));
    };
    run_tasks(exec_.pool, chunks * row_blocks, body);
  }

 private:
  int64_t rows_of(int64_t block) const {
    return std::min(block_rows_, rows_ - block * block_rows_);
  }

  PackedRows take_rows() {
    PackedRows rows;
    for (int kind = 0; kind < kPackKinds; ++kind) {
      if (!wanted_[kind]) continue;
      rows.kinds[kind] = exec_.workspace->take<std::byte>(
          block_rows_ * block_count(k_) * packed_row_bytes(static_cast<PackKind>(kind)));
    }
    return rows;
  }

  void pack(int64_t block, int slot) {
    for (int kind = 0; kind < kPackKinds; ++kind) {
      if (!wanted_[kind]) continue;
      ops_.pack(x_ + block * block_rows_ * x_stride_, x_stride_, nullptr, rows_of(block), k_,
                static_cast<PackKind>(kind), packed_[slot].kinds[kind]);
    }
    packed_block_[slot] = block;
  }

  /// Tiles [begin, end) of all jobs' tiles, for one row block.
  void run_tiles(int64_t block, const PackedRows& packed, int64_t begin, int64_t end) const {
    alignas(64) float sums[kMaxRowBlock * kTileRows];
    const int64_t rows = rows_of(block);
    int64_t first = 0;  // of this job
    for (const MatmulJob& job : jobs_) {
      const int64_t tiles = tile_count(job.w.rows());
      const int64_t from = std::max(begin - first, int64_t{0});
      const int64_t to = std::min(end - first, tiles);
      first += tiles;
      if (from >= to) continue;
      const TileMatrix matrix(ops_, exec_.activations, job.w);
      const PackKind kind = matrix.pack_kind();
      float* y = job.y + block * block_rows_ * job.y_stride;
      for (int64_t tile = from; tile < to; ++tile) {
        matrix.run(tile, packed.kinds[static_cast<int>(kind)], rows * packed_row_bytes(kind), rows,
                   sums);
        const int64_t n = tile * kTileRows;
        ops_.store(sums, rows, job.bias != nullptr ? job.bias + n : nullptr, matrix.lanes(tile),
                   y + n, job.y_stride);
      }
    }
  }

  const Exec& exec_;
  const TileOps& ops_;
  const float* x_;
  int64_t x_stride_, rows_, k_;
  std::span<const MatmulJob> jobs_;
  int64_t block_rows_, tiles_ = 0;
  bool wanted_[kPackKinds] = {};
  PackedRows* packed_ = nullptr;
  int64_t* packed_block_ = nullptr;
};

}  // namespace

void matmul(const Exec& exec, const float* x, int64_t x_stride, int64_t rows,
            std::span<const MatmulJob> jobs) {
  if (rows == 0 || jobs.empty()) return;
  Matmul(exec, x, x_stride, rows, jobs).run();
}

int64_t matmul_workspace_bytes(int64_t rows, int64_t k, int threads) {
  const int64_t block_rows = std::min(rows, row_block(k));
  const int64_t slots = rows > block_rows ? std::max(threads, 1) : 1;
  // Two kinds at most: FP32 and one of the rounded ones.
  const int64_t packed = 2 * Workspace::bytes_for<std::byte>(block_rows * block_count(k) * 128);
  return Workspace::bytes_for<PackedRows>(slots) + Workspace::bytes_for<int64_t>(slots) +
         slots * packed;
}

}  // namespace nibble::kernels
