// Softmax of a warpgroup's 64 rows, two rows a thread, on the accumulators of wgmma; and the band's mask on them.
//
//   m' = max(m, max_j s_j)     l' = l e^(m - m') + sum_j e^(s_j - m')     O' = O e^(m - m')
//
// in units of q k^T, with scale * log2(e) folded into the multiply-add before ex2, or, with a bias, in natural units.
// Sums are of the thread's own columns until the end. Called by fwd.cuh, between the wait for S and the wait for O.
// Invariant: step() touches S only; O, on which wgmma may still work, is rescaled by the caller after its wait.
#pragma once

#include "attention/band.h"
#include "sm90/ptx.cuh"

namespace flash_ext::sm90 {

constexpr float kMinusInf = -__builtin_huge_valf();
constexpr double kLog2e = 1.4426950408889634;

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

// row: of this thread's first half; its second half is row + 8. row_mask: of a row, the query (work.cuh).
template <int kCount>
__device__ __forceinline__ void mask_band(float (&s)[kCount], const TileBand& band, int row, int first_key,
                                          int row_mask = -1) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = (row + 8 * half) & row_mask;
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

// Maxima are brought up to date when one of the warp's rows grew by more than 2^kLimit, which P stays below; sums are
// float, so nothing is lost, and most tiles skip a pass over O.
// kBiased: scores may be as low as finfo.min, whose product with log2(e) is infinite. Where a maximum of the warp's
// rows is far from 0 it is subtracted before the multiplication.
template <bool kBiased>
struct RowSoftmax {
  static constexpr int kLimit = 8;
  float row_max[2] = {kMinusInf, kMinusInf};
  float row_sum[2] = {0.f, 0.f};
  bool far = false;
  float to_log2;  // what one unit of score is in log2

  __device__ __forceinline__ explicit RowSoftmax(float to_log2_) : to_log2(to_log2_) {}

  // Before a new tile of queries.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = kMinusInf;
      row_sum[half] = 0.f;
    }
  }

  // The maximum of columns [kFirst, kLast) of each row.
  template <int kFirst, int kLast, int kCount>
  static __device__ __forceinline__ void tile_max(float (&max)[2], const float (&s)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const c = s + kFirst / 2 + 2 * half;
      float x = fmaxf(c[0], c[1]);
#pragma unroll
      for (int n = 1; n < (kLast - kFirst) / 8; ++n) x = fmaxf(x, fmaxf(c[4 * n], c[4 * n + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      max[half] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    }
  }

  // Whether one of the warp's rows grew beyond the limit.
  __device__ __forceinline__ bool exceeds(const float (&max)[2]) const {
    // -inf - -inf is NaN, which is not above the limit.
    return __any_sync(~0u, (max[0] - row_max[0]) * to_log2 > kLimit || (max[1] - row_max[1]) * to_log2 > kLimit);
  }

  // Brings maxima and sums up to date; what belongs to the old maxima is to be multiplied by `factor`.
  __device__ __forceinline__ void raise(const float (&max)[2], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = row_max[half];
      row_max[half] = fmaxf(before, max[half]);
      factor[half] = before == kMinusInf ? 0.f : exp2_fast((before - row_max[half]) * to_log2);
      row_sum[half] *= factor[half];
    }
    if constexpr (kBiased) {
      constexpr float kFar = 32768;
      const auto is_far = [](float x) { return fabsf(x) > kFar && x != kMinusInf; };
      far = __any_sync(~0u, is_far(row_max[0]) || is_far(row_max[1]));
    }
  }

  // S becomes P in columns [kFirst, kLast).
  template <int kFirst, int kLast, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
    if (kBiased && far) {
      exponentiate_as<true, kFirst, kLast>(s);
    } else {
      exponentiate_as<false, kFirst, kLast>(s);
    }
  }

  template <bool kShiftFirst, int kFirst, int kLast, int kCount>
  __device__ __forceinline__ void exponentiate_as(float (&s)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float minus = row_max[half] == kMinusInf ? 0.f : -row_max[half] * (kShiftFirst ? 1.f : to_log2);
      float sum = 0.f;
#pragma unroll
      for (int n = kFirst / 8; n < kLast / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x = exp2_fast(kShiftFirst ? (x + minus) * to_log2 : fmaf(x, to_log2, minus));
          sum += x;
        }
      }
      row_sum[half] += sum;
    }
  }

  // Whole-row sum, over the four threads that share a row.
  __device__ __forceinline__ float total(int half) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

// Rows of an accumulator, up to column kLast, times a number each.
template <int kLast, int kCount>
__device__ __forceinline__ void scale_rows(float (&c)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kLast / 2; ++i) c[i] *= factor[i / 2 % 2];
}

}  // namespace flash_ext::sm90
