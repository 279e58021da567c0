#include "model/cuda_step.h"

#include <algorithm>

#include "device/cuda.h"
#include "kernels/cuda/attention_pages.h"
#include "kernels/cuda/sample.h"
#include "kernels/cuda/step_copy.h"

namespace nibble::model {

Result<void> CudaStep::allocate(const StepLimits& limits) {
  limits_ = limits;
  // Padding may add a sequence a row.
  limits_.max_sequences = std::max(limits.max_sequences, limits.max_logit_rows);
  table_stride_ =
      (limits.max_context + kernels::cuda::kKvPageTokens - 1) / kernels::cuda::kKvPageTokens;
  int64_t at = 0;
  const auto take = [&at](int64_t bytes) {
    const int64_t begin = at;
    at += (bytes + 255) / 256 * 256;
    return begin;
  };
  tokens_at_ = take(4 * limits_.max_rows);
  positions_at_ = take(4 * limits_.max_rows);
  row_sequence_at_ = take(4 * limits_.max_rows);
  row_begin_at_ = take(4 * (limits_.max_sequences + 1));
  logit_rows_at_ = take(4 * limits_.max_logit_rows);
  sampling_at_ =
      take(limits_.max_logit_rows * static_cast<int64_t>(sizeof(kernels::cuda::RowSampling)));
  table_at_ = take(4 * limits_.max_sequences * table_stride_);
  NIBBLE_TRY(device_, device::cuda_memory(at));
  out_at_ = take(8 * limits_.max_logit_rows);
  NIBBLE_TRY(host_, device::cuda_pinned(at));
  return {};
}

void CudaStep::set(const StepInput& input, std::span<const RowSampling> draws, int64_t padded_rows,
                   int64_t padded_logits) {
  int32_t* tokens = host_ints(tokens_at_);
  int32_t* positions = host_ints(positions_at_);
  int32_t* row_sequence = host_ints(row_sequence_at_);
  int32_t* row_begin = host_ints(row_begin_at_);
  int32_t* table = host_ints(table_at_);
  const auto rows = static_cast<int64_t>(input.tokens.size());
  rows_ = std::max(padded_rows, rows);
  max_context_ = 1;
  max_rows_ = 1;
  sequences_ = 0;
  for (const kernels::SequenceRows& s : input.sequences) {
    row_begin[sequences_] = s.row_begin;
    for (int32_t r = 0; r < s.rows; ++r) {
      const int32_t row = s.row_begin + r;
      tokens[row] = input.tokens[static_cast<size_t>(row)];
      positions[row] = s.position_begin + r;
      row_sequence[row] = static_cast<int32_t>(sequences_);
    }
    const int64_t context = int64_t{s.position_begin} + s.rows;
    std::copy_n(s.pages,
                (context + kernels::cuda::kKvPageTokens - 1) / kernels::cuda::kKvPageTokens,
                table + sequences_ * table_stride_);
    max_context_ = std::max(max_context_, context);
    max_rows_ = std::max<int64_t>(max_rows_, s.rows);
    ++sequences_;
  }
  for (int64_t row = rows; row < rows_; ++row) {
    row_begin[sequences_] = static_cast<int32_t>(row);
    tokens[row] = 0;
    positions[row] = -1;
    row_sequence[row] = static_cast<int32_t>(sequences_++);
  }
  row_begin[sequences_] = static_cast<int32_t>(rows_);

  wanted_ = static_cast<int64_t>(input.logit_rows.size());
  logits_ = std::max(padded_logits, wanted_);
  int32_t* logit_rows = host_ints(logit_rows_at_);
  std::copy(input.logit_rows.begin(), input.logit_rows.end(), logit_rows);
  std::fill(logit_rows + wanted_, logit_rows + logits_, -1);
  auto* sampling = reinterpret_cast<kernels::cuda::RowSampling*>(host_.data() + sampling_at_);
  greedy_ = true;
  for (int64_t i = 0; i < logits_; ++i) {
    kernels::cuda::RowSampling row;
    if (i < static_cast<int64_t>(draws.size())) {
      const RowSampling& given = draws[static_cast<size_t>(i)];
      row.temperature = given.temperature;
      row.top_p = given.top_p;
      row.min_p = given.min_p;
      row.top_k = given.top_k;
      row.seed = given.seed;
      row.draw = given.draw;
      greedy_ = greedy_ && given.temperature == 0.0f;
    }
    sampling[i] = row;
  }
}

Result<void> CudaStep::upload(int64_t max_context, cudaStream_t stream) {
  constexpr int64_t kSamplingWords = sizeof(kernels::cuda::RowSampling) / 4;
  const int64_t pages =
      (max_context + kernels::cuda::kKvPageTokens - 1) / kernels::cuda::kKvPageTokens;
  const auto words = [&](int64_t at, int64_t count, int64_t rows = 1, int64_t stride = 0) {
    return kernels::cuda::WordRows{host_ints(at), reinterpret_cast<int32_t*>(device_.data() + at),
                                   static_cast<int32_t>(count), static_cast<int32_t>(rows),
                                   static_cast<int32_t>(stride)};
  };
  return kernels::cuda::copy_step(
      {words(tokens_at_, rows_), words(positions_at_, rows_), words(row_sequence_at_, rows_),
       words(row_begin_at_, sequences_ + 1), words(logit_rows_at_, logits_),
       words(sampling_at_, logits_ * kSamplingWords),
       words(table_at_, std::min(pages, table_stride_), sequences_, table_stride_)},
      stream);
}

kernels::cuda::StepView CudaStep::view() const {
  kernels::cuda::StepView v;
  v.tokens = device_ints(tokens_at_);
  v.positions = device_ints(positions_at_);
  v.row_sequence = device_ints(row_sequence_at_);
  v.seq_row_begin = device_ints(row_begin_at_);
  v.page_table = device_ints(table_at_);
  v.table_stride = static_cast<int32_t>(table_stride_);
  v.rows = static_cast<int32_t>(rows_);
  v.sequences = static_cast<int32_t>(sequences_);
  return v;
}

}  // namespace nibble::model
