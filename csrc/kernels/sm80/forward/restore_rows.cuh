// Rows of a forward in float that came out as NaN, computed again as eager attention does, in double.
//
// Three products of TF32 numbers make NaN of every infinity, which is split as inf + (inf - inf). Eager attention has
// an infinity there, of a value, or a number, where a score is -inf or a softcap bounds it. Called by kernel.cuh, by a
// warp for its 16 rows, when all else is done. NOTE: a call of its own takes no registers from the loop; one that keeps
// infinities took 20 to 100, and a split that does would be two instructions more than the three it takes. Invariant: a
// number in out stays as it is.
#pragma once

#include "gpu/ptx.cuh"
#include "kernels/sm80/fp64/parts.cuh"
#include "kernels/sm80/sequence.h"

namespace flash_ext::sm80 {

// low, high: the lanes that saw a NaN in rows g and g + 8.
__device__ __noinline__ inline void restore_rows(const ForwardArgs& args, const Sequence& shared_sequence, uint32_t bh,
                                                 int first_row, unsigned low, unsigned high) {
  __syncwarp();  // the warp's rows are in memory
  const int lane = threadIdx.x % 32;
  // NOTE: everything is found anew where it is used. Strides and pointers in registers were up to 50 more than the
  // kernel has.
  const auto problem = [&]() -> const Problem& { return no_hoist(&args)->problem; };
  const auto sequence = [&]() -> const Sequence& { return *no_hoist(&shared_sequence); };
  const auto data = [&](const TensorView& view, int64_t heads, int64_t row) {
    const Problem& p = problem();
    return static_cast<float*>(view.data) +
           fp64::head_offset(p, view, bh / p.heads_q, bh % p.heads_q / (p.heads_q / heads)) + row * view.row_stride;
  };
  const auto scores = [&] {
    const Problem& p = problem();
    return fp64::make_head_scores(*no_hoist(&args), sequence(), bh / p.heads_q, bh % p.heads_q);
  };
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int64_t query = first_row + i;
    if (query >= sequence().len_q) return;
    if (((i < 8 ? low : high) >> i % 8 * 4 & 15) == 0) continue;
    const Range keys = make_band(problem(), sequence()).keys({query, query + 1}, sequence().len_k);
    const auto score_of = [&](int64_t key) {
      double dot = 0.0;
      const ForwardArgs& a = *no_hoist(&args);
      const float* q = data(a.q, a.problem.heads_q, sequence().row_q + query);
      const float* k = data(a.k, a.problem.heads_k, sequence().row_k + key);
#pragma unroll 1
      for (int64_t e = 0; e < a.problem.head_dim && key < keys.last; ++e) {
        dot = fma(static_cast<double>(*q), static_cast<double>(*k), dot);
        q += a.q.col_stride;
        k += a.k.col_stride;
      }
      return scores().score(dot, query, key);
    };

    OnlineSoftmax<double> softmax;  // of this lane's keys
    bool is_nan = false;
    for (int64_t key = keys.first; key < keys.last && !is_nan; key += 32) {
      const double s = score_of(key + lane);
      softmax.step(s);
      softmax.add(std::exp(s - softmax.shift()));
      is_nan = __any_sync(~0u, !(s < -OnlineSoftmax<double>::kEmpty)) != 0;
    }
    if (is_nan) continue;  // as it is
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const double other_max = __shfl_xor_sync(~0u, softmax.row_max, step);
      const double other_sum = __shfl_xor_sync(~0u, softmax.row_sum, step);
      softmax.step(other_max);
      softmax.add(other_sum * std::exp(other_max - softmax.shift()));
    }
    const Problem& p = problem();
    const double sink = args.problem.has_sinks
                            ? static_cast<double>(sink_of<float>(args, bh / p.heads_q, bh % p.heads_q, query))
                            : OnlineSoftmax<double>::kEmpty;
    const OnlineSoftmax<double>::Result result = softmax.finish(sink);
    if (args.lse != nullptr && lane == 0) {
      float& lse = static_cast<float*>(
          args.lse)[row_index(problem(), sequence(), bh / problem().heads_q, bh % problem().heads_q) + query];
      if (lse != lse) lse = static_cast<float>(result.lse);
    }

    // NOTE: the probabilities once for 32 columns each. Sums of all columns at once were 50 registers more.
#pragma unroll 1
    for (int64_t col = lane; __any_sync(~0u, col < problem().head_dim_v); col += 32) {
      const auto out = [&]() -> float& {
        const ForwardArgs& a = *no_hoist(&args);
        return data(a.out, a.problem.heads_q, sequence().row_q + query)[col * a.out.col_stride];
      };
      bool is_open = col < problem().head_dim_v && out() != out();  // and the sum is no NaN
      double sum = 0.0;
      for (int64_t key = keys.first; key < keys.last && __any_sync(~0u, is_open); key += 32) {
        const double p = std::exp(score_of(key + lane) - softmax.shift()) * scores().keep_factor(query, key + lane);
        const ForwardArgs& a = *no_hoist(&args);
        const float* v = data(a.v, a.problem.heads_v, sequence().row_k + key) + col * a.v.col_stride;
#pragma unroll 1
        for (int j = 0; j < 32 && key + j < keys.last; ++j) {
          const double p_of_key = __shfl_sync(~0u, p, j);
          if (is_open) sum = fma(p_of_key, static_cast<double>(*v), sum);
          v += a.v.row_stride;
        }
        is_open = is_open && sum == sum;
      }
      if (is_open) out() = static_cast<float>(sum * result.inverse_sum);
    }
  }
}

}  // namespace flash_ext::sm80
