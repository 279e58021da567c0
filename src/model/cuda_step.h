// One step's facts on their way to the GPU: filled in page-locked memory, copied to the same device
// addresses every time, so that a captured graph sees each step's new contents. What is drawn the
// GPU writes to page-locked memory itself.
#pragma once

#include <cuda_runtime_api.h>

#include "device/memory.h"
#include "kernels/cuda/step_view.h"
#include "model/model.h"

namespace nibble::model {

class CudaStep {
 public:
  Result<void> allocate(const StepLimits& limits);

  /// Fills the host side. Rows, sequences and logit rows are padded up to the given counts (padding
  /// has position -1); a padded row is a sequence of its own.
  void set(const StepInput& input, std::span<const RowSampling> draws, int64_t padded_rows,
           int64_t padded_logits);
  /// Queues the copy to the device: the page table up to `max_context` positions.
  Result<void> upload(int64_t max_context, cudaStream_t stream);

  kernels::cuda::StepView view() const;
  int64_t rows() const { return rows_; }
  int64_t logit_count() const { return logits_; }
  int64_t wanted_logits() const { return wanted_; }        // without padding
  int64_t max_context() const { return max_context_; }     // of this step
  int64_t max_sequence_rows() const { return max_rows_; }  // of this step
  const int32_t* logit_rows() const { return device_ints(logit_rows_at_); }
  const void* sampling() const { return device_.data() + sampling_at_; }
  bool greedy() const { return greedy_; }
  /// [logit_count()], in host memory that the GPU can write.
  int32_t* tokens_out() const { return host_ints(out_at_); }
  float* logprobs_out() const {
    return reinterpret_cast<float*>(tokens_out() + limits_.max_logit_rows);
  }

 private:
  int32_t* host_ints(int64_t at) const { return reinterpret_cast<int32_t*>(host_.data() + at); }
  const int32_t* device_ints(int64_t at) const {
    return reinterpret_cast<const int32_t*>(device_.data() + at);
  }

  StepLimits limits_;
  device::Memory host_, device_;
  int64_t table_stride_ = 0;
  // Byte offsets, the same on both sides; out_at_ is the host's alone.
  int64_t tokens_at_ = 0, positions_at_ = 0, row_sequence_at_ = 0, row_begin_at_ = 0,
          logit_rows_at_ = 0, sampling_at_ = 0, table_at_ = 0, out_at_ = 0;
  int64_t rows_ = 0, sequences_ = 0, logits_ = 0, wanted_ = 0, max_context_ = 0, max_rows_ = 0;
  bool greedy_ = true;
};

}  // namespace nibble::model
