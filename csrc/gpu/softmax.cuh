// The softmax of forward's rows, tile by tile, in the registers of a warp: accumulators of mma.sync.
//
// In 16-bit types m is brought up to date only when a maximum grew by more than 2^8 (FlashAttention-4's lazy
// rescaling): until then P is at most 2^8 and O needs no correction. Called by sm80's forward and by decode. Invariant:
// a row lies in four lanes of one warp; row_max is the same in all of them, row_sum is of a lane's own columns.
#pragma once

#include "core/online_softmax.h"
#include "gpu/ptx.cuh"

namespace flash_ext {

// The running softmax of a warp's rows: thread-local sums over its own columns, maxima of whole rows.
template <int kM>
struct SoftmaxRows {
  float row_max[kM][2];
  float row_sum[kM][2];
  // A row's maximum is beyond kFar, in log2. In the multiply-add before ex2 score * to_log2 is exact and maximum *
  // to_log2 is rounded, so that P is off by a factor, from one maximum to the next another: at 2^12 by half of a
  // rounding of fp16, at 2^27 by more than fp16 holds. There rescale() subtracts the maximum first.
  static constexpr float kFar = 0x1p12f;
  bool far = false;

  __device__ __forceinline__ SoftmaxRows() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      row_max[m][0] = row_max[m][1] = kMinusInf;
      row_sum[m][0] = row_sum[m][1] = 0.f;
    }
  }

  // O is rescaled where a maximum grew by more than `growth`, in log2. kFolded: one multiply-add before ex2; otherwise
  // the maximum is subtracted first, which in float rounds less. to_log2: what one unit of score is in log2.
  // NOTE: each lane asks its own columns, and a vote tells the others. When the four lanes of a row first agreed on its
  // maximum, forward took 1 to 2 % longer.
  template <bool kFolded, int kN, int kD>
  __device__ __forceinline__ void rescale(float (&s)[kM][kN][4], float (&o)[kM][kD][4], float to_log2, float growth) {
    float tile_max[kM][2];
    bool grew = far;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = kMinusInf;  // of this lane's columns
#pragma unroll
        for (int n = 0; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        tile_max[m][half] = x;
        grew |= (x - row_max[m][half]) * to_log2 > growth;  // not before subtracting: finfo.min * log2(e) is -inf
      }
    }
    if (__any_sync(~0u, grew)) {
      far = false;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x = tile_max[m][half];
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
          x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
          const float before = row_max[m][half], after = fmaxf(before, x);
          const float factor = before == kMinusInf ? 0.f : exp2_fast((before - after) * to_log2);
          row_max[m][half] = after;
          row_sum[m][half] *= factor;
#pragma unroll
          for (int n = 0; n < kD; ++n) {
            o[m][n][2 * half] *= factor;
            o[m][n][2 * half + 1] *= factor;
          }
          if (kFolded && fabsf(after * to_log2) > kFar && after != kMinusInf) {
            far = true;
#pragma unroll
            for (int n = 0; n < kN; ++n) {
              s[m][n][2 * half] -= after;
              s[m][n][2 * half + 1] -= after;
            }
          }
        }
      }
    }
  }

  // What is subtracted from the scores of a row, in log2 where kFolded.
  template <bool kFolded>
  __device__ __forceinline__ float shift(int m, int half, float to_log2) const {
    const float x = row_max[m][half] == kMinusInf ? 0.f : row_max[m][half];
    return !kFolded ? x : (fabsf(x * to_log2) > kFar ? 0.f : x * to_log2);
  }
  template <bool kFolded>
  static __device__ __forceinline__ float exponential(float x, float shift, float to_log2) {
    return kFolded ? exp2_fast(fmaf(x, to_log2, -shift)) : exp2_fast((x - shift) * to_log2);
  }

  // S becomes P. NOTE: a tile's sum is taken first, so that its rounding does not grow with the row.
  template <bool kFolded, int kN>
  __device__ __forceinline__ void exponentials(float (&s)[kM][kN][4], float to_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_shift = shift<kFolded>(m, half, to_log2);
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = exponential<kFolded>(s[m][n][i], row_shift, to_log2);
            sum += s[m][n][i];
          }
        }
        row_sum[m][half] += sum;
      }
    }
  }

  // Whole-row sums, over the four threads that share a row.
  __device__ __forceinline__ float total(int m, int half) const {
    float sum = row_sum[m][half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

}  // namespace flash_ext
