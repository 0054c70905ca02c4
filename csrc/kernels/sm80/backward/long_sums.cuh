// dK and dV in fp16 where very many queries see few keys, which accumulators alone do not sum up well enough.
//
// Called by steps.cuh and, for the room in scratch, run.cuh. Invariant: each block of keys of a launch has sums
// of its own, zeros before the launch and after it.
#pragma once

#include "kernels/sm80/sequence.h"
#include "kernels/sm80/tile.cuh"

namespace flash_ext::sm80 {

// Tensor cores truncate when they add to their accumulators, which over 10^5 additions is more than fp16 rounds. Where
// very many queries see few keys, dK and dV are added to a float sum in scratch after so many tiles of queries.
// NOTE: 4.3 million queries on 5 keys had 2.3 and 4.9 times the error that the rule allows.
constexpr int kSumTiles = 512;
constexpr int kSumRatio = 256;  // of queries to keys: it takes a hundredth or so of what dQ does

FLASH_DEVICE bool has_sums(int64_t len_q, int64_t len_k, int64_t block_m) {
  return len_q > 2 * kSumTiles * block_m && len_q >= kSumRatio * len_k;
}

// Of packed sequences those with sums, which are few, have places of their own for their blocks of keys: from here on,
// below the number of rows_q. No two meet, because a sequence has no more than len_q / (kSumRatio block_n) + 1 of them.
FLASH_DEVICE int64_t first_sum(int64_t row_q, int64_t block_m, int64_t block_n) {
  return row_q / (kSumRatio * block_n) + row_q / (2 * kSumTiles * block_m);
}
constexpr uint32_t kNoSums = ~0u;  // in the place of a tile's number

// The number of the block's sums.
__device__ __forceinline__ uint32_t packed_sums(const Place& place, int64_t groups, int64_t block_m, int64_t block_n) {
  const Sequence& at = place.sequence;
  if (!has_sums(at.len_q, at.len_k, block_m)) return kNoSums;
  return static_cast<uint32_t>((first_sum(at.row_q, block_m, block_n) + place.block) * groups + place.head);
}

// fn(accumulator, its sum)
template <int kThreads, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_sums(float* sums, uint32_t number, float (&acc)[kM][kN][4], const Fn& fn) {
  float* sum = sums + int64_t{number} * (kThreads * kM * kN * 4) + threadIdx.x;
  for_each_score<true>(acc, 0, 0, [&](float& x, int, int) {
    fn(x, *sum);
    sum += kThreads;
  });
}

}  // namespace flash_ext::sm80
