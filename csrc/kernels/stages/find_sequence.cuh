// Which packed sequence a row belongs to: a binary search among the sequences' first rows.
//
// Called by kernels/stages/sequences.cu and rows.cu. Invariant: whatever the numbers in memory are, nothing beyond
// cu[batch] is read.
#pragma once

#include "core/sequences.h"

namespace flash_ext::cuda {

// The last sequence that begins at row `row` of the queries (keys) or before it, or -1. The row may lie behind its end.
template <bool kQueries>
__device__ __forceinline__ int64_t sequence_before(const Problem& problem, const Sequences& sequences, int64_t row) {
  const int32_t* const cu = kQueries ? sequences.cu_q : sequences.cu_k;
  int64_t low = 0, high = problem.batch;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    (cu[middle] <= row ? low : high) = cu[middle] <= row ? middle + 1 : middle;
  }
  return low - 1;
}

}  // namespace flash_ext::cuda
