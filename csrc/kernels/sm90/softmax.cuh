// Softmax of a warpgroup's 64 rows, two rows a thread, on the accumulators of wgmma; and the band's mask on them.
//
//   m' = max(m, max_j s_j)     l' = l e^(m - m') + sum_j e^(s_j - m')     O' = O e^(m - m')
//
// in units of q k^T, with scale * log2(e) folded into the multiply-add before ex2, or, with a bias, in natural units.
// Sums are of the thread's own columns until the end. Called by forward/kernel.cuh, between the wait for S and the wait
// for O. Invariant: step() touches S only; O, on which wgmma may still work, is rescaled by the caller after its wait.
#pragma once

#include "core/band.h"
#include "core/online_softmax.h"
#include "gpu/ptx.cuh"

namespace flash_ext::sm90 {

// row: of this thread's first half; its second half is row + 8. row_mask: of a row, the query (forward/work.cuh).
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
// In a multiply-add before ex2 score * to_log2 is exact and maximum * to_log2 is rounded, or infinite: where the
// maximum of a row is far from 0, in log2, raise() subtracts it before the multiplication. NOTE: such rows are raised
// for every tile, so that the usual tile has no branch more; around or in front of the exponentials it was 2 to 8 %.
// kHasLimit: what a maximum may reach is a register beside what P is made with, and one comparison; else one number
// says both.
template <bool kHasLimit>
struct RowSoftmax {
  static constexpr int kLimit = 8;
  float row_max[2] = {kMinusInf, kMinusInf};
  float row_sum[2] = {0.f, 0.f};
  float limit[2] = {std::numeric_limits<float>::quiet_NaN(),
                    std::numeric_limits<float>::quiet_NaN()};  // what a tile's maximum may reach and row_max stays, or
                                                               // minus; NaN: raise() each time
  float minus[kHasLimit ? 2 : 1] = {};                         // -row_max in log2, which P is made with; 0 of a far row
  float to_log2;                                               // what one unit of score is in log2

  __device__ __forceinline__ explicit RowSoftmax(float to_log2_) : to_log2(to_log2_) {}

  // Before a new tile of queries.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = kMinusInf;
      row_sum[half] = 0.f;
      limit[half] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  __device__ __forceinline__ float minus_of(int half) const {
    if constexpr (kHasLimit) return minus[half];
    return limit[half] == limit[half] ? limit[half] : 0.f;
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

  // Whether one of the warp's rows grew beyond the limit, or has to be raised.
  __device__ __forceinline__ bool exceeds(const float (&max)[2]) const {
    const auto grew = [&](int half) {
      if constexpr (kHasLimit) return !(max[half] <= limit[half]);
      return !(fmaf(max[half], to_log2, limit[half]) <= kLimit);
    };
    return __any_sync(~0u, grew(0) || grew(1));
  }

  // Brings maxima and sums up to date, before P of columns [kFirst, kLast); what belongs to the old maxima is to be
  // multiplied by `factor`.
  template <int kFirst, int kLast, int kCount>
  __device__ __forceinline__ void raise(const float (&max)[2], float (&factor)[2], float (&s)[kCount]) {
    constexpr float kFar = 4096;  // there the product is rounded by half of what P is in fp16
    float far[2];                 // the maximum of a row that is
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = row_max[half], after = fmaxf(before, max[half]);
      row_max[half] = after;
      factor[half] = before == kMinusInf ? 0.f : exp2_fast((before - after) * to_log2);
      row_sum[half] *= factor[half];
      const bool has_keys = after != kMinusInf, is_far = has_keys && fabsf(after * to_log2) > kFar;
      far[half] = is_far ? after : 0.f;
      const float now = has_keys && !is_far ? -after * to_log2 : 0.f;
      limit[half] =
          has_keys && !is_far ? (kHasLimit ? after + kLimit / to_log2 : now) : std::numeric_limits<float>::quiet_NaN();
      if constexpr (kHasLimit) minus[half] = now;
    }
    if (!__any_sync(~0u, far[0] != 0.f || far[1] != 0.f)) return;
#pragma unroll
    for (int i = kFirst / 2; i < kLast / 2; ++i) s[i] -= far[i / 2 % 2];
  }

  // S becomes P in columns [kFirst, kLast).
  template <int kFirst, int kLast, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float shift = minus_of(half);
      float sum = 0.f;
#pragma unroll
      for (int n = kFirst / 8; n < kLast / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x = exp2_fast(fmaf(x, to_log2, shift));
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
