// What the groups of warps of a block have of a segment becomes rows of out, or a part in scratch; and how parts merge:
//
//   max = max_i max_i   sum = sum_i 2^(max_i - max) sum_i   out = sum_i 2^(max_i - max) out_i / sum   lse = ln sum
//
// maxima in log2, out_i not divided. Called by kernel.cuh, and by merge.cu for the parts of blocks. Invariant:
// something without keys has (-inf, 0) and zeros, and changes no bit of another.
#pragma once

#include <cmath>

#include "kernels/decode/query.cuh"

namespace flash_ext::decode {

// Scratch: of each part sums [part_rows] of (max, sum), behind them all out [part_rows, head_dim].
struct Parts {
  float2* sums;
  float* out;
  int rows;
  int2* places;  // with plan.tells_places, of each work: its first tile among all, and the tiles of a run

  __device__ __forceinline__ float2* sums_of(int part) const { return sums + int64_t{part} * rows; }
  template <int kHeadDim>
  __device__ __forceinline__ float* out_of(int part) const {
    return out + int64_t{part} * rows * kHeadDim;
  }
};

// The factor of something whose maximum is `max`. NOTE: NaN and +inf give NaN.
__device__ __forceinline__ float merge_factor(float max, float of_all) {
  return of_all == -INFINITY ? 1.f : exp2_fast(max - of_all);
}

// A row of out, four columns from `col`.
template <class T>
__device__ __forceinline__ void store_row(const DecodeArgs& args, int b, const QueryRow& row, int col, float4 x) {
  const int64_t at = ((int64_t{b} * args.len_q + row.i) * args.heads_q + row.head) * args.head_dim + col;
  *reinterpret_cast<uint2*>(static_cast<T*>(args.out) + at) = make_uint2(pack(x.x, x.y, T()), pack(x.z, x.w, T()));
}

// The end of a row: four columns from `col`, divided by the sum, times v_descale, in the type of out; and lse with the
// first of them. A sink, where there is one, joins the maximum and the sum.
__device__ __forceinline__ void finish_row(const DecodeArgs& args, const Segment& segment, const QueryRow& row, int col,
                                           float4 x, float max, float sum) {
  float keys = 1.f;
  const float sink = args.sinks.at(segment.b, row.head, -INFINITY) * kLog2eFloat;
  if (sink != -INFINITY) {
    const float top = fmaxf(max, sink);
    keys = merge_factor(max, top);
    sum = fmaf(sum, keys, exp2_fast(sink - top));
    max = top;
  }
  if (args.lse != nullptr && col == 0) {
    args.lse[(int64_t{segment.b} * args.heads_q + row.head) * args.len_q + row.i] =
        sum == 0.f ? -INFINITY : max * kLn2Float + logf(sum);
  }
  float factor = sum == 0.f ? 0.f : keys * reciprocal_fast(sum);  // the sum is at least 1
  if (args.fp8 && factor != 0.f) factor *= args.v_descale.at(segment.b, segment.head, 1.f);
  x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
  if (args.dtype == DType::kFloat16) return store_row<__half>(args, segment.b, row, col, x);
  store_row<__nv_bfloat16>(args, segment.b, row, col, x);
}

// Of the groups of a block, whose out lies in `from` [groups, rows, kOutPitch] and whose sums in `sums` [groups, rows].
template <class Traits>
__device__ __forceinline__ void write_segment(const DecodeArgs& args, const DecodePlan& plan, const Segment& segment,
                                              const float* from, const float2* sums, const Parts& parts) {
  constexpr int kRows = Traits::kRows, kQuarter = Traits::kHeadDim / 4;
  for (int item = static_cast<int>(threadIdx.x); item < kRows * kQuarter; item += Traits::kThreads) {
    const int row = item / kQuarter, col = item % kQuarter * 4;
    if (row >= parts.rows) break;
    float max = -INFINITY, sum = 0.f;
#pragma unroll
    for (int group = 0; group < Traits::kGroups; ++group) max = fmaxf(max, sums[group * kRows + row].x);
    float4 x = {};
#pragma unroll
    for (int group = 0; group < Traits::kGroups; ++group) {
      const float2 own = sums[group * kRows + row];
      const float factor = merge_factor(own.x, max);
      sum = fmaf(own.y, factor, sum);
      const float4 add = *reinterpret_cast<const float4*>(from + (group * kRows + row) * Traits::kOutPitch + col);
      x = make_float4(fmaf(add.x, factor, x.x), fmaf(add.y, factor, x.y), fmaf(add.z, factor, x.z),
                      fmaf(add.w, factor, x.w));
    }
    if (!segment.whole) {
      *reinterpret_cast<float4*>(parts.out_of<Traits::kHeadDim>(segment.part) + row * Traits::kHeadDim + col) = x;
      if (col == 0) parts.sums_of(segment.part)[row] = make_float2(max, sum);
      continue;
    }
    const QueryRow to(args, plan, segment, row);
    if (!to.exists) continue;
    finish_row(args, segment, to, col, x, max, sum);
  }
}

}  // namespace flash_ext::decode
