// Which packed sequence a row, or a tile of queries, belongs to: a binary search among the sequences' first rows.
//
// Called by kernels/stages/sequences.cu and rows.cu and by sm90/backward/renormalise.cuh. Invariant: whatever the
// numbers in memory are, nothing beyond cu[batch] is read.
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

// The last sequence whose tiles of `block` queries begin at `tile` or before it, of an array as first_packed_tile has
// it, or -1. The tile may lie behind its last one.
__device__ __forceinline__ int packed_tile_before(const Problem& problem, const Sequences& sequences, int tile,
                                                  int block) {
  int low = 0, high = static_cast<int>(problem.batch);
  while (low < high) {
    const int middle = (low + high) / 2;
    const int row = static_cast<int>(max(int64_t{0}, min(int64_t{sequences.cu_q[middle]}, problem.rows_q)));
    const bool before = row / block + middle <= tile;
    (before ? low : high) = before ? middle + 1 : middle;
  }
  return low - 1;
}

}  // namespace flash_ext::cuda
