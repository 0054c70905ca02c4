// One query with grouped heads, which is decoding, is the same as one head with a query for each of the group's heads:
// views and sizes say so, nothing moves, and a kernel reads each key head once instead of once a query head.
//
// Called by torch/ before a forward is planned. Invariant: out and lse lie where they did; the band, of which one query
// sees an interval of keys, becomes that interval.
#pragma once

#include <initializer_list>

#include "core/args.h"
#include "core/band.h"

namespace flash_ext {

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

inline void fold_heads(ForwardArgs& args) {
  Problem& problem = args.problem;
  if (problem.packed || problem.len_q != 1 || problem.heads_q <= problem.heads_k || problem.heads_k != problem.heads_v)
    return;
  if (problem.batch_invariant) return;  // packed sequences have no such form
  // What a query head has of its own and a query has not.
  if (problem.has_alibi || problem.dropout_p > 0.0) return;
  const Range keys = make_band(problem).keys({0, 1}, problem.len_k);
  if (keys.empty()) return;

  const int64_t group = problem.heads_q / problem.heads_k;
  for (TensorView* view : {&args.q, &args.out, &args.mask, &args.bias, &args.sinks}) {
    view->row_stride = view->head_stride;
    view->head_stride *= group;
  }
  const auto skip = [](TensorView& view, int64_t elements, int64_t element_bytes) {
    view.data = static_cast<char*>(view.data) + elements * element_bytes;
  };
  skip(args.k, keys.first * args.k.row_stride, bytes_of(problem.dtype));
  skip(args.v, keys.first * args.v.row_stride, bytes_of(problem.dtype));
  if (problem.has_mask) skip(args.mask, keys.first * args.mask.col_stride, 1);
  if (problem.has_bias) skip(args.bias, keys.first * args.bias.col_stride, bytes_of(problem.bias_dtype));
  problem.heads_q = problem.heads_k;
  problem.len_q = group;
  problem.len_k = keys.size();
  problem.causal = false;
  problem.window_left = problem.window_right = kUnbounded;
}

}  // namespace flash_ext
