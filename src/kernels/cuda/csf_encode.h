// CSF on the device: scale planes to the stored form of codec/csf.h and back, byte for byte what
// the CPU codec writes, and the proof that a stored form is legal. Source: csf spec, sections 1
// to 3. Leaves to csf_index.h the form that the MoE kernels read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/result.h"
#include "codec/csf.h"

namespace nibble::kernels::cuda {

using codec::CsfKind;

/// `experts` planes of one size, stacked: [experts][rows][cols] bytes.
struct CsfStack {
  CsfKind kind = CsfKind::kNvfp4;
  int64_t experts = 0, rows = 0, cols = 0;
};

/// The stored form of a stack, on the device.
struct CsfStreams {
  uint8_t* fixed = nullptr;        // [experts][csf_fixed_bytes], 16-byte aligned
  uint32_t* exceptions = nullptr;  // [capacity], expert after expert; positions inside the expert
  uint32_t* row_begin = nullptr;   // [experts * rows + 1] index of each row's first exception
  int64_t capacity = 0;            // words of `exceptions`
};

/// Device bytes of scratch for csf_encode.
int64_t csf_encode_scratch_bytes(const CsfStack& stack);

/// Queues the canonical encoding of `planes` (device, 16-byte aligned). When it is done,
/// row_begin[experts * rows] is the number of exceptions; if that is above `capacity`, those beyond
/// it are missing and the caller encodes again with more room. No allocation, no synchronisation.
/// Errors: those of check_csf_geometry; kInvalidArgument (2^32 cells or more), kInternal (launch).
Result<void> csf_encode(const CsfStack& stack, const uint8_t* planes, const CsfStreams& out,
                        void* scratch, cudaStream_t stream);

/// Queues the expansion of legal streams into `planes` [experts][rows][cols].
Result<void> csf_decode(const CsfStack& stack, const CsfStreams& in, uint8_t* planes,
                        cudaStream_t stream);

/// What csf_check found, in the order of the spec.
enum CsfFault : int {
  kCsfBaseRange = 1,
  kCsfTailBits = 2,
  kCsfExceptionOrder = 4,
  kCsfExceptionRange = 8,
};
/// For streams that come from a file: queues the check of every base, tail bit and exception, with
/// the faults collected in `faults` (device, zeroed by the caller), and fills row_begin.
/// `expert_begin` (device, [experts + 1]): each expert's first exception. With a fault reported,
/// row_begin must not be used.
Result<void> csf_check(const CsfStack& stack, const CsfStreams& streams,
                       const uint32_t* expert_begin, int* faults, cudaStream_t stream);

}  // namespace nibble::kernels::cuda
