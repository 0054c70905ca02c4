// Rows of backward whose lse is too far from 0: as a float it has lost the log of the sum, at 10^11 thousands of powers
// of e. Such a row's probabilities are
//
//   P_j = e^(s_j - m) / Z        m = max_j s_j        Z = sum_j e^(s_j - m)
//
// Where renormalise.cuh runs it finds both. Elsewhere, in 16-bit types without a bias, the kernel that computes delta
// looks at each lse and finds them, one row a warp, and the main kernel reads them where a tile of queries has such a
// row. Called by kernels/stages/rows.cu and steps.cuh. Invariant: scores come from the same products in the same
// order as in the main kernel (kernel.cuh), so that m is one of its scores, bit for bit, and no size of scores lets a
// rounding between them matter.
#pragma once

#include "kernels/sm80/score.cuh"

namespace flash_ext::sm80 {

// Whether the lse of a row that has keys, or a score, is too far from 0 for one multiply-add before ex2, which rounds
// its product with log2(e): beyond 2^12 by half of what P is in fp16, and at finfo.min it is infinite.
__device__ __forceinline__ bool needs_renorm(float x) { return fabsf(x) > 4096.f && fabsf(x) != -kMinusInf; }

// What the search is told.
struct RenormRows {
  float2* rows;  // [b, h_q, s_q], null: none
  ScoreOptions options;
  float cap, to_cap;   // of ScoreMods
  float from_natural;  // what a score is in, of natural units
};

template <class Element>
using FarMods = ScoreMods<Element, 64, 64, 32>;

template <class Element>
RenormRows make_renorm_rows(const ForwardArgs& args, float2* rows) {
  FarMods<Element> mods;
  mods.set_cap(args.problem);
  const ScoreOptions options = ScoreOptions::of(args, true);
  return {rows, options, mods.cap, mods.to_cap, options.features & kRaw ? 1.f / options.scale : 1.f};
}

// To renorm.rows, of query `query` of a sequence: its largest score, in what the main kernel has before ex2,
// and -log2 of Z. By a whole warp, 16 keys a step; all columns of the products' second factor are the one query.
// NOTE: in the 48 registers that the kernel takes without it, which is why divisions are the host's.
template <class Element>
__device__ __forceinline__ float2 find_renorm_row(const ForwardArgs& args, const RenormRows& renorm,
                                                  const Sequence& sequence, int b, int head, int query) {
  const Problem& problem = args.problem;
  const ScoreOptions& options = renorm.options;
  const unsigned features = options.features;
  const auto row_of = [&](const TensorView& view, int of_head, int row) {
    return batch_offset(problem, view, b) + of_head * view.head_stride + row * view.row_stride;
  };
  const uint16_t* const q = static_cast<const uint16_t*>(args.q.data) + row_of(args.q, head, sequence.row_q + query);
  const int head_k = head / static_cast<int>(problem.heads_q / problem.heads_k);
  const uint16_t* const k = static_cast<const uint16_t*>(args.k.data) + row_of(args.k, head_k, sequence.row_k);
  const uint8_t* const mask = static_cast<const uint8_t*>(args.mask.data) + row_of(args.mask, head, query);
  const float slope = features & kAlibi ? static_cast<const float*>(args.alibi.data)[row_of(args.alibi, head, 0)] : 0.f;
  const int own_key = query + diagonal_of(problem, sequence);
  const auto score = [&](float x, int key) {  // as ScoreMods::apply
    if (features & kCap) {
      FarMods<Element> mods;
      mods.cap = renorm.cap;
      mods.to_cap = renorm.to_cap;
      x = mods.capped_score(x);
    } else if (!(features & kRaw)) {
      x = __fmul_rn(x, options.scale);
    }
    if (features & kAlibi) x = fmaf(-slope, fabsf(static_cast<float>(own_key - key)), x);
    return (features & kMask) && mask[key * args.mask.col_stride] == 0 ? kMinusInf : x;
  };

  float top = kMinusInf, sum = 0.f;            // of keys g and g + 8 of each 16
  if (problem.has_sinks && lane_row() == 0) {  // a sink is the first of its keys
    top = sink_of<float>(args, b, head, 0) * renorm.from_natural;
    sum = top == kMinusInf ? 0.f : 1.f;
  }
  const Range keys = make_band(problem, sequence).keys({query, query + 1}, sequence.len_k);
  const int last = static_cast<int>(keys.last), head_dim = static_cast<int>(problem.head_dim);
#pragma unroll 1
  for (int first = static_cast<int>(keys.first) + lane_row(); first - lane_row() < last; first += 16) {
    float c[4] = {};
#pragma unroll 1
    for (int col = 0; col < head_dim; col += 16) {
      // Two neighbouring columns of each half of the 16, zeros behind the last.
      const auto words = [&](const uint16_t* row, int64_t stride, uint32_t& low, uint32_t& high) {
        int at = col + 2 * lane_column();
        row += at * stride;
        const auto number = [&](int step) -> uint32_t {
          const uint32_t x = at < head_dim ? *row : 0u;
          at += step;
          row += step * no_hoist(stride);
          return x;
        };
        low = number(1);
        low |= number(7) << 16;
        high = number(1);
        high |= number(1) << 16;
      };
      uint32_t of_keys[4], of_query[2];
      words(k + min(first, last - 1) * args.k.row_stride, args.k.col_stride, of_keys[0], of_keys[2]);
      words(k + min(first + 8, last - 1) * args.k.row_stride, args.k.col_stride, of_keys[1], of_keys[3]);
      words(q, args.q.col_stride, of_query[0], of_query[1]);
      mma_m16n8k16(c, of_keys, of_query[0], of_query[1], StorageOf<Element>());
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int key = first + 8 * i;
      const float x = key < last ? score(i == 0 ? c[0] : c[2], key) : kMinusInf, before = top;
      if (x == kMinusInf) continue;
      top = fmaxf(top, x);
      sum = sum * exp2_fast((before - top) * options.to_log2) + exp2_fast((x - top) * options.to_log2);
    }
  }
#pragma unroll 1
  for (int step = 4; step < 32; step *= 2) {
    const float other = __shfl_xor_sync(~0u, top, step), more = __shfl_xor_sync(~0u, sum, step), before = top;
    top = fmaxf(top, other);
    const auto scaled = [&](float x, float from) {
      return from == top ? x : x * exp2_fast((from - top) * options.to_log2);
    };
    sum = scaled(sum, before) + scaled(more, other);
  }
  return {top, -log2f(sum)};
}

// The fragment of S^T becomes 2^shift P^T, where some rows are renormalised. lse: in shared memory, +inf past the last
// query; rows: in global memory, of the tile's first query.
template <int kM, int kN>
__device__ __forceinline__ void exponentials_of_renorm_rows(float (&s)[kM][kN][4], const float* lse, const float2* rows,
                                                            float to_log2, float shift) {
  const int column = 2 * lane_column();
  lse += column;
  rows += column;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_row = lse[n * 8 + i];
      float2 row = {0.f, minimum(-of_row * kLog2eFloat, 1e30f)};  // without keys lse = -inf, and scores are
      if (needs_renorm(of_row)) row = rows[n * 8 + i];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[m][n][2 * half + i];
          x = exp2_fast(fmaf(x - row.x, to_log2, row.y + shift));
        }
      }
    }
  }
}

}  // namespace flash_ext::sm80
