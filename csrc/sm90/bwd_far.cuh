// Tiles of queries, and of those whose lse is far from 0, which only a bias makes, what their probabilities sum up to:
//
//   Z = sum_j e^(s_j - lse)
//
// lse is a float: in a row of finfo.min it has lost the log of the number of keys, and Z is that number. Called by
// prepare_kernel (bwd_rows.cuh), whose normal case it must not cost registers. Invariant: as of bwd_rows.cuh.
#pragma once

#include "attention/args.h"
#include "sm90/bwd_parts.cuh"

namespace flash_ext::sm90 {

constexpr int kRowThreads = 256;

// Which tile of queries a block works on.
template <class Traits>
struct QueryTile {
  int64_t bh, b, head;
  int first_query;
  __device__ __forceinline__ QueryTile(const Problem& problem, int m_blocks, unsigned index) {
    const unsigned m_block = index % m_blocks, flat = index / m_blocks;
    const unsigned heads = static_cast<unsigned>(problem.heads_q);
    bh = flat;
    b = flat / heads;
    head = flat % heads;
    first_query = static_cast<int>(m_block) * Traits::kBlockM;
  }
  template <class T>
  __device__ __forceinline__ T* rows(const Problem& problem, const TensorView& view) const {
    return static_cast<T*>(view.data) + batch_offset(problem, view, b) + head * view.head_stride +
           first_query * view.row_stride;
  }
};

// Where the distance of two floats is more than one of a 16-bit type's in P. Neither infinite nor a number: not far.
__device__ __forceinline__ bool is_far(float lse) { return fabsf(lse) > 32768.f && lse != kMinusInf; }

// What is added to the score of a query and a key, for code that reads few of them.
template <class T>
struct ScoreReader {
  const Problem& problem;
  const char *bias, *mask;
  int64_t bias_row, bias_col, mask_row, mask_col;

  __device__ __forceinline__ ScoreReader(const ForwardArgs& args, int64_t b, int64_t head) : problem(args.problem) {
    const auto of = [&](const TensorView& view, int element) {
      return static_cast<const char*>(view.data) + (batch_offset(problem, view, b) + head * view.head_stride) * element;
    };
    bias = of(args.bias, problem.bias_dtype == DType::kFloat32 ? 4 : 2);
    mask = of(args.mask, 1);
    bias_row = args.bias.row_stride, bias_col = args.bias.col_stride;
    mask_row = args.mask.row_stride, mask_col = args.mask.col_stride;
  }

  // scale * product + bias - slope |i + offset - j|, -inf where the mask holds 0.
  __device__ __forceinline__ float score(float product, float slope, int query, int key) const {
    if (problem.has_mask && mask[query * mask_row + key * mask_col] == 0) return kMinusInf;
    float added = 0.f;
    if (problem.has_bias) {
      const int64_t at = query * bias_row + key * bias_col;
      added = problem.bias_dtype == DType::kFloat32 ? reinterpret_cast<const float*>(bias)[at]
                                                    : static_cast<float>(reinterpret_cast<const T*>(bias)[at]);
    }
    if (problem.has_alibi) {
      const int offset = problem.bottom_right ? static_cast<int>(problem.len_k - problem.len_q) : 0;
      added = fmaf(-slope, fabsf(static_cast<float>(query + offset - key)), added);
    }
    return fmaf(product, static_cast<float>(problem.scale), added);
  }
};

// Subtracts log2 Z from stats[row] for the rows of a tile that are far. 16 queries at a time, 8 keys a warp.
template <class Traits>
__device__ __forceinline__ void measure_rows(const BackwardArgs& args, const QueryTile<Traits>& tile, float* stats) {
  using T = typename Traits::T;
  constexpr int kSteps = (Traits::kHeadDim + 31) / 32;
  __shared__ float sums[Traits::kBlockM], slope;  // in a register it would be one too many
  const Problem& problem = args.fwd.problem;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int len_q = static_cast<int>(problem.len_q), len_k = static_cast<int>(problem.len_k);
  const int head_dim = static_cast<int>(problem.head_dim);
  const Band band = make_band(problem);
  const ScoreReader<T> scores(args.fwd, tile.b, tile.head);
  const T* const q_rows = tile.template rows<const T>(problem, args.fwd.q) + 8 * t;
  const T* const k_rows = static_cast<const T*>(args.fwd.k.data) + batch_offset(problem, args.fwd.k, tile.b) +
                          tile.head / (problem.heads_q / problem.heads_k) * args.fwd.k.head_stride + 8 * t;
  for (int row = threadIdx.x; row < Traits::kBlockM; row += kRowThreads) sums[row] = 0.f;
  if (threadIdx.x == 0 && problem.has_alibi) {
    const int64_t at = batch_offset(problem, args.fwd.alibi, tile.b) + tile.head * args.fwd.alibi.head_stride;
    slope = static_cast<const float*>(args.fwd.alibi.data)[at];
  }
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < Traits::kBlockM && tile.first_query + first < len_q; first += 16) {
    float lse[2];
    uint32_t a[2 * kSteps][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + g + 8 * half, query = tile.first_query + row;
      lse[half] = query < len_q ? static_cast<const float*>(args.fwd.lse)[tile.bh * len_q + query] : 0.f;
      // Lane t has columns 8 t to 8 t + 7 of each 32, of Q and of K: a sum may have any order.
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint4 words = {};
        if (query < len_q && 32 * i + 8 * t < head_dim) {
          words = *reinterpret_cast<const uint4*>(q_rows + row * args.fwd.q.row_stride + 32 * i);
        }
        a[2 * i][half] = words.x, a[2 * i][2 + half] = words.y;
        a[2 * i + 1][half] = words.z, a[2 * i + 1][2 + half] = words.w;
      }
    }
    if (!__any_sync(~0u, is_far(lse[0]) || is_far(lse[1]))) continue;
    float sum[2] = {};
#pragma unroll 1
    for (int key = warp * 8; key < len_k; key += kRowThreads / 4) {
      float c[4] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        uint4 words = {};
        if (key + g < len_k && 32 * i + 8 * t < head_dim) {
          words = *reinterpret_cast<const uint4*>(k_rows + (key + g) * args.fwd.k.row_stride + 32 * i);
        }
        mma_16_8_16(c, a[2 * i], words.x, words.y, T());
        mma_16_8_16(c, a[2 * i + 1], words.z, words.w, T());
      }
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int query = tile.first_query + first + g + i / 2 * 8, column = key + 2 * t + i % 2;
        const float of_row = i < 2 ? lse[0] : lse[1], product = i == 0 ? c[0] : i == 1 ? c[1] : i == 2 ? c[2] : c[3];
        if (!is_far(of_row) || column >= len_k || !band.keep(query, column)) continue;
        const float p = exp2f((scores.score(product, slope, query, column) - of_row) * static_cast<float>(kLog2e));
        (i < 2 ? sum[0] : sum[1]) += p;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (sum[half] != 0.f) atomicAdd(&sums[first + g + 8 * half], sum[half]);
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < Traits::kBlockM; row += kRowThreads) {
    if (sums[row] > 0.f) stats[row] -= log2f(sums[row]);
  }
}

}  // namespace flash_ext::sm90
