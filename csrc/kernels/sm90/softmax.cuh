// Softmax of a warpgroup's 64 rows, two rows a thread, on the accumulators of wgmma; and the band's mask on them.
//
//   m' = max(m, max_j s_j)     l' = l e^(m - m') + sum_j e^(s_j - m')     O' = O e^(m - m')
//
// in units of q k^T, with scale * log2(e) folded into the multiply-add before ex2, or, with a bias, in natural units.
// Sums are of the thread's own columns until the end. Called by forward/kernel.cuh, between the wait for S and the wait
// for O. Invariant: S only is touched; O, on which wgmma may still work, is rescaled by the caller after its wait.
#pragma once

#include <limits>
#include <type_traits>

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

// The maximum of columns [kFirst, kLast) of each row that are this thread's.
template <int kFirst, int kLast, int kCount>
__device__ __forceinline__ void own_max(float (&max)[2], const float (&s)[kCount]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const c = s + kFirst / 2 + 2 * half;
    max[half] = fmaxf(c[0], c[1]);
#pragma unroll
    for (int n = 1; n < (kLast - kFirst) / 8; ++n) max[half] = fmaxf(max[half], fmaxf(c[4 * n], c[4 * n + 1]));
  }
}

// Over the four threads that share a row.
__device__ __forceinline__ float whole_row_max(float own) {
  own = fmaxf(own, __shfl_xor_sync(~0u, own, 1));
  return fmaxf(own, __shfl_xor_sync(~0u, own, 2));
}

__device__ __forceinline__ float sum_of_quad(float own) {
  own += __shfl_xor_sync(~0u, own, 1);
  return own + __shfl_xor_sync(~0u, own, 2);
}

// Maxima and sums of this thread's two rows; of the sums its own columns' part.
// In a multiply-add before ex2 score * to_log2 is exact and maximum * to_log2 is rounded, or infinite: where the
// maximum of a row is far from 0, in log2, raise() subtracts it before the multiplication, for every tile.
struct RowStats {
  static constexpr float kFar = 4096;  // there the product is rounded by half of what P is in fp16
  float row_max[2] = {kMinusInf, kMinusInf};
  float row_sum[2] = {0.f, 0.f};
  float to_log2;  // what one unit of score is in log2

  __device__ __forceinline__ explicit RowStats(float to_log2_) : to_log2(to_log2_) {}

  // -maximum in log2, which P is made with, 0 of a far row; and whether the next tile has to raise it, too: of a row
  // that is far or has no keys yet.
  struct Raised {
    float minus[2];
    bool each_time[2];
  };

  // Brings maxima and sums up to date, before P of columns [kFirst, kLast); what belongs to the old maxima is to be
  // multiplied by `factor`. own: as own_max() has them. NOTE: only here do the four threads of a row agree on its
  // maximum; when they did for each tile, it took 1 to 6 % longer.
  template <int kFirst, int kLast, int kCount>
  __device__ __forceinline__ Raised join(const float (&own)[2], float (&factor)[2], float (&s)[kCount]) {
    float far[2];  // the maximum of a row that is
    Raised raised;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = whole_row_max(own[half]);
      const float before = row_max[half], after = fmaxf(before, max);
      row_max[half] = after;
      factor[half] = before == kMinusInf ? 0.f : exp2_fast((before - after) * to_log2);
      row_sum[half] *= factor[half];
      const bool has_keys = after != kMinusInf, is_far = has_keys && fabsf(after * to_log2) > kFar;
      far[half] = is_far ? after : 0.f;
      raised.each_time[half] = !has_keys || is_far;
      raised.minus[half] = raised.each_time[half] ? 0.f : -after * to_log2;
    }
    if (!__any_sync(~0u, far[0] != 0.f || far[1] != 0.f)) return raised;
#pragma unroll
    for (int i = kFirst / 2; i < kLast / 2; ++i) s[i] -= far[i / 2 % 2];
    return raised;
  }

  // S becomes P in columns [kFirst, kLast). kSums: that are added up side by side.
  template <int kFirst, int kLast, int kSums = 1, int kCount>
  __device__ __forceinline__ float exponentiate(float (&s)[kCount], int half, float minus) const {
    float sums[kSums] = {};
#pragma unroll
    for (int n = kFirst / 8; n < kLast / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[4 * n + 2 * half + i];
        x = exp2_fast(fmaf(x, to_log2, minus));
        sums[i % kSums] += x;
      }
    }
    if constexpr (kSums == 2) sums[0] += sums[1];
    return sums[0];
  }

  // Of a row, in natural units of the score.
  __device__ __forceinline__ float natural_max(int half, float scale) const { return row_max[half] * scale; }

  // Whole-row sum, over the four threads that share a row.
  __device__ __forceinline__ float total(int half) const { return sum_of_quad(row_sum[half]); }

  // Before a new tile of queries.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_max[half] = kMinusInf;
      row_sum[half] = 0.f;
    }
  }
};

// Maxima first. They are brought up to date when one of the warp's rows grew by more than 2^kLimit, which P stays
// below; sums are float, so nothing is lost, and most tiles skip a pass over O. NOTE: far rows are raised for every
// tile, so that the usual tile has no branch more; around or in front of the exponentials it was 2 to 8 %.
// kHasLimit: what a maximum may reach is a register beside what P is made with, and one comparison; else one number
// says both.
template <bool kHasLimit>
struct RowSoftmax : RowStats {
  static constexpr int kLimit = 8;
  float limit[2] = {std::numeric_limits<float>::quiet_NaN(),
                    std::numeric_limits<float>::quiet_NaN()};  // what a tile's maximum may reach and row_max stays, or
                                                               // minus; NaN: raise() each time
  float minus[kHasLimit ? 2 : 1] = {};

  using RowStats::RowStats;

  __device__ __forceinline__ void reset() {
    RowStats::reset();
    limit[0] = limit[1] = std::numeric_limits<float>::quiet_NaN();
  }

  __device__ __forceinline__ float minus_of(int half) const {
    if constexpr (kHasLimit) return minus[half];
    return limit[half] == limit[half] ? limit[half] : 0.f;
  }

  // Whether one of the warp's rows grew beyond the limit, or has to be raised.
  __device__ __forceinline__ bool exceeds(const float (&own)[2]) const {
    const auto grew = [&](int half) {
      if constexpr (kHasLimit) return !(own[half] <= limit[half]);
      return !(fmaf(own[half], to_log2, limit[half]) <= kLimit);
    };
    return __any_sync(~0u, grew(0) || grew(1));
  }

  template <int kFirst, int kLast, int kCount>
  __device__ __forceinline__ void raise(const float (&own)[2], float (&factor)[2], float (&s)[kCount]) {
    const Raised raised = join<kFirst, kLast>(own, factor, s);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit[half] = raised.each_time[half] ? std::numeric_limits<float>::quiet_NaN()
                    : kHasLimit            ? row_max[half] + kLimit / to_log2
                                           : raised.minus[half];
      if constexpr (kHasLimit) minus[half] = raised.minus[half];
    }
  }

  template <int kFirst, int kLast, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] += RowStats::exponentiate<kFirst, kLast>(s, half, minus_of(half));
    }
  }
};

// No maxima, as a rule: P of a tile is made with the maxima of the tiles before, and its sum says whether that was
// right. Beyond kMost lower() divides by the maximum of P. Where a sum is beyond float, S is lost; the caller
// multiplies it once more, and maxima are taken.
//
// kMost: what a thread's sum may reach. T holds it (fp16 65,504), and O does for V up to 2^80. NOTE: the larger, the
// seldomer it is met; but where one key has nearly all of a row's weight, its P is 1, and out that key's value without
// a rounding, only if the maximum is that key's.
//
// kSums: of each row, side by side. NOTE: one after the other they wait for each other, up to 3 % at head dim 96.
template <class T, int kSums>
struct SpeculativeSoftmax : RowStats {
  static constexpr float kMost = std::is_same_v<T, __half> ? 0x1p15f : 0x1p32f, kLost = 0x1p120f;
  float minus[2] = {};
  float sum[2] = {};  // of the last tile
  bool needs_maxima = true;

  __device__ __forceinline__ bool wants_maxima() const { return needs_maxima; }

  using RowStats::RowStats;

  template <int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = RowStats::exponentiate<0, 2 * kCount, kSums>(s, half, minus[half]);
  }

  // The same with maxima.
  template <int kCount>
  __device__ __forceinline__ void raise(float (&factor)[2], float (&s)[kCount]) {
    float own[2];
    own_max<0, 2 * kCount>(own, s);
    const Raised raised = join<0, 2 * kCount>(own, factor, s);
    minus[0] = raised.minus[0];
    minus[1] = raised.minus[1];
    needs_maxima = __any_sync(~0u, raised.each_time[0] || raised.each_time[1]);
    exponentiate(s);
  }

  // Whether one of the warp's sums is beyond what it may be, or NaN.
  __device__ __forceinline__ bool exceeds(float most) const { return __any_sync(~0u, !(sum[0] + sum[1] <= most)); }

  // P and sums by the maximum of P, where that is above 1; O is to be multiplied by `factor`.
  template <int kCount>
  __device__ __forceinline__ void lower(float (&factor)[2], float (&p)[kCount]) {
    float own[2];
    own_max<0, 2 * kCount>(own, p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = whole_row_max(own[half]), before = minus[half];
      if (most > 1.f) {
        minus[half] -= log2f(most);
        row_max[half] = -minus[half] / to_log2;
      }
      factor[half] = exp2_fast(minus[half] - before);  // not 1 / most: log2 of it was rounded
      row_sum[half] *= factor[half];
      sum[half] *= factor[half];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] *= factor[i / 2 % 2];
    needs_maxima = __any_sync(~0u, fabsf(minus[0]) > kFar || fabsf(minus[1]) > kFar);
  }

  __device__ __forceinline__ void add() {
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
  }
};

// Rows of an accumulator, up to column kLast, times a number each.
template <int kLast, int kCount>
__device__ __forceinline__ void scale_rows(float (&c)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kLast / 2; ++i) c[i] *= factor[i / 2 % 2];
}

}  // namespace flash_ext::sm90
