// Softmax of a warpgroup's 64 rows, two rows a thread, on the accumulators of wgmma; and the band's mask on them.
//
//   m' = max(m, max_j s_j)     l' = l e^(m - m') + sum_j e^(s_j - m')     O' = O e^(m - m')
//
// in units of q k^T, with scale * log2(e) folded into the multiply-add before ex2. Sums are of the thread's own columns
// until the end. Called by fwd.cuh, between the wait for S and the wait for O. Invariant: step() touches S only; O, on
// which wgmma may still work, is rescaled by the caller after its wait.
#pragma once

#include "attention/band.h"
#include "sm90/ptx.cuh"

namespace flash_ext::sm90 {

constexpr float kMinusInf = -__builtin_huge_valf();

// The band of a sequence whose lengths fit an int: key j is seen by query i when j - i is in [lower, upper] and j <
// len_k.
struct TileBand {
  int lower, upper, len_k;

  // True when a tile has a pair that is not kept.
  __device__ __forceinline__ bool is_boundary(int first_query, int queries, int first_key, int keys) const {
    const int shift = first_key - first_query;
    return first_key + keys > len_k || shift + keys - 1 > upper || shift - queries + 1 < lower;
  }
};

// row: of this thread's first half in the sequence; its second half is row + 8.
template <int kCount>
__device__ __forceinline__ void mask_band(float (&s)[kCount], const TileBand& band, int row, int first_key) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = row + 8 * half;
    const int low = query + band.lower - first_key - column;
    const int high = min(query + band.upper, band.len_k - 1) - first_key - column;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * n + i < low || 8 * n + i > high) s[4 * n + 2 * half + i] = kMinusInf;
      }
    }
  }
}

// The maximum is brought up to date when one of the warp's rows grew by more than 2^kLimit, which P stays below.
template <int kLimit>
struct RowSoftmax {
  float row_max[2] = {kMinusInf, kMinusInf};
  float row_sum[2] = {0.f, 0.f};
  float factor[2] = {1.f, 1.f};  // what O is to be multiplied by
  float to_log2;                 // what one unit of score is in log2

  __device__ __forceinline__ explicit RowSoftmax(float to_log2_) : to_log2(to_log2_) {}

  // S becomes P. True, for all lanes of a warp, when O must be multiplied by `factor`.
  template <int kCount>
  __device__ __forceinline__ bool step(float (&s)[kCount]) {
    float tile_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kCount / 4; ++n) x = fmaxf(x, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      tile_max[half] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    }
    // -inf - -inf is NaN, which is not above the limit.
    const bool rescale =
        __any_sync(~0u, (tile_max[0] - row_max[0]) * to_log2 > kLimit || (tile_max[1] - row_max[1]) * to_log2 > kLimit);
    if (rescale) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = row_max[half];
        row_max[half] = fmaxf(before, tile_max[half]);
        factor[half] = before == kMinusInf ? 0.f : exp2_fast((before - row_max[half]) * to_log2);
        row_sum[half] *= factor[half];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float minus = row_max[half] == kMinusInf ? 0.f : -row_max[half] * to_log2;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x = exp2_fast(fmaf(x, to_log2, minus));
          sum += x;
        }
      }
      row_sum[half] += sum;
    }
    return rescale;
  }

  // Whole-row sum, over the four threads that share a row.
  __device__ __forceinline__ float total(int half) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

// Rows of an accumulator times a number each.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&c)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) c[i] *= factor[i / 2 % 2];
}

}  // namespace flash_ext::sm90
