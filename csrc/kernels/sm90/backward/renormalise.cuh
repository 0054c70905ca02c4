// Tiles of queries, and of rows whose lse is far from 0 the shift and the sum that take its place:
//
//   shift = max_j s_j - what two orders of summation may differ by     Z = sum_j e^min(s_j - shift, 0)
//
// lse is a float: in a row of finfo.min it has lost the log of the number of keys, and beyond 4e8 its last place is
// more than an exponential holds. The main kernels find a score by other instructions than this; so scores that are as
// good as the largest count as equal to it, where that may be more than 1/64. Called by prepare_kernel (rows.cuh),
// which has 80 to 106 registers with it and 48 to 84 without. Invariant: as of rows.cuh.
#pragma once

#include "core/args.h"
#include "kernels/sm90/backward/parts.cuh"
#include "kernels/stages/find_sequence.cuh"

namespace flash_ext::sm90 {

constexpr int kRowThreads = 256;

// Which tile of queries a block works on: number `index` of the scratch's [b, h_q, m_blocks]; of packed sequences,
// whose batch is one, m_blocks is most_packed_tiles of them, and some tiles do not exist.
template <class Traits>
struct QueryTile {
  int64_t bh, b, head;
  int first_query;
  bool exists = true;
  Sequence sequence;  // kPacked
  __device__ __forceinline__ QueryTile(const Problem& problem, const Sequences& sequences, int m_blocks,
                                       unsigned index) {
    const unsigned m_block = index % m_blocks, flat = index / m_blocks;
    const unsigned heads = static_cast<unsigned>(problem.heads_q);
    if constexpr (Traits::kPacked) {
      const int element = cuda::packed_tile_before(problem, sequences, static_cast<int>(m_block), Traits::kBlockM);
      exists = element >= 0;
      if (!exists) return;
      sequence = sequence_of(problem, sequences, element);
      b = element;
      head = flat;
      bh = b * heads + head;
      const int tile = static_cast<int>(m_block) - first_packed_tile(sequence, element, Traits::kBlockM);
      exists = tile < block_count(sequence.len_q, Traits::kBlockM);
      first_query = exists ? tile * Traits::kBlockM : 0;
    } else {
      bh = flat;
      b = flat / heads;
      head = flat % heads;
      first_query = static_cast<int>(m_block) * Traits::kBlockM;
    }
  }
  // Of the query tensors, from the tile's first row on.
  template <class T>
  __device__ __forceinline__ T* rows(const Problem& problem, const TensorView& view) const {
    if constexpr (Traits::kPacked) {
      return static_cast<T*>(view.data) + head * view.head_stride + (sequence.row_q + first_query) * view.row_stride;
    }
    return static_cast<T*>(view.data) + batch_offset(problem, view, b) + head * view.head_stride +
           first_query * view.row_stride;
  }
  // Of its head of keys, from the first key on.
  template <class T>
  __device__ __forceinline__ const T* key_rows(const Problem& problem, const TensorView& view) const {
    const int64_t first = Traits::kPacked ? sequence.row_k * view.row_stride : batch_offset(problem, view, b);
    return static_cast<const T*>(view.data) + first + head / (problem.heads_q / problem.heads_k) * view.head_stride;
  }
  // Of lse, from query 0 on.
  __device__ __forceinline__ int64_t lse_rows(const Problem& problem) const {
    return Traits::kPacked ? head * problem.rows_q + sequence.row_q : bh * problem.len_q;
  }
  __device__ __forceinline__ int64_t len_q(const Problem& problem) const {
    return Traits::kPacked ? sequence.len_q : problem.len_q;
  }
  __device__ __forceinline__ int64_t len_k(const Problem& problem) const {
    return Traits::kPacked ? sequence.len_k : problem.len_k;
  }
  __device__ __forceinline__ Band band(const Problem& problem) const {
    if constexpr (Traits::kPacked) return make_band(problem, sequence);
    return make_band(problem);
  }
};

// Where the product of lse and log2(e) is rounded by half of what P is in fp16. Neither infinite nor a number: not far.
__device__ __forceinline__ bool needs_renorm(float lse) { return fabsf(lse) > 4096.f && lse != kMinusInf; }

// scale * product, capped, + bias - slope |i + offset - j|, -inf where the band or a mask hides it. added: the
// magnitude of what is not the product; steep: what a change of the product's score changes, 1 - tanh^2 under a
// softcap.
template <class Traits>
__device__ __forceinline__ float score_of(const ForwardArgs& args, const QueryTile<Traits>& tile, float product,
                                          float slope, int query, int key, float& added, float& steep) {
  using T = typename Traits::T;
  const Problem& problem = args.problem;
  if (!tile.band(problem).keep(query, key)) return kMinusInf;
  float more = 0.f;
  if constexpr (Traits::kScored) {
    const auto at = [&](const TensorView& view) {
      return batch_offset(problem, view, tile.b) + tile.head * view.head_stride + query * view.row_stride +
             key * view.col_stride;
    };
    if (problem.has_mask && static_cast<const char*>(args.mask.data)[at(args.mask)] == 0) return kMinusInf;
    if (problem.has_bias) {
      const int64_t i = at(args.bias);
      more = problem.bias_dtype == DType::kFloat32 ? static_cast<const float*>(args.bias.data)[i]
                                                   : static_cast<float>(static_cast<const T*>(args.bias.data)[i]);
    }
    if (problem.has_alibi) {
      const int offset = problem.bottom_right ? static_cast<int>(tile.len_k(problem) - tile.len_q(problem)) : 0;
      more = fmaf(-slope, fabsf(static_cast<float>(query + offset - key)), more);
    }
    added = fabsf(more);
  }
  if constexpr (Traits::kScored) {
    if (problem.softcap != 0.0) {
      const auto cap = static_cast<float>(problem.softcap);
      const float tanh = tanhf(product * static_cast<float>(problem.scale / problem.softcap));
      steep = fmaf(-tanh, tanh, 1.f);
      return fmaf(cap, tanh, more);
    }
  }
  return fmaf(product, static_cast<float>(problem.scale), more);
}

// The largest score, and by how much it or one that may be it is off. NOTE: not by how much any is: of finfo.min in one
// column, or of a key far below the others, that is more than all others differ.
struct Top {
  float score = kMinusInf, margin = 0.f;
  __device__ __forceinline__ void join(float other, float off) {
    if (other - off > score + margin) {
      score = other;
      margin = off;
    } else if (!(other + off < score - margin)) {
      score = fmaxf(score, other);
      margin = fmaxf(margin, off);
    }
  }
  __device__ __forceinline__ float shift() const {
    return fmaxf(margin > 0x1p-6f ? score - margin : score, -0x1.FFFFFEp127f);  // of finfo.min it would be -inf
  }
};

// Of the rows of a tile that are renormalised: -log2 Z and -shift to `stats`. 16 queries at a time, 8 keys a warp.
template <class Traits>
__device__ __forceinline__ void renormalise_rows(const BackwardArgs& args, const QueryTile<Traits>& tile,
                                                 float* stats) {
  using T = typename Traits::T;
  constexpr int kWarps = kRowThreads / 32;
  __shared__ float largest[kWarps][16], margins[kWarps][16], sums[kWarps][16], slope;  // of 16 queries
  const Problem& problem = args.fwd.problem;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int len_q = static_cast<int>(tile.len_q(problem)), len_k = static_cast<int>(tile.len_k(problem));
  const int head_dim = static_cast<int>(problem.head_dim);
  const float* const lse = static_cast<const float*>(args.fwd.lse) + tile.lse_rows(problem);
  const T* const q_rows = tile.template rows<const T>(problem, args.fwd.q);
  const T* const k_rows = tile.template key_rows<T>(problem, args.fwd.k);
  if (threadIdx.x == 0 && problem.has_alibi) {
    const int64_t at = batch_offset(problem, args.fwd.alibi, tile.b) + tile.head * args.fwd.alibi.head_stride;
    slope = static_cast<const float*>(args.fwd.alibi.data)[at];
  }
  __syncthreads();  // all see the slope
  // q k^T of two of 16 queries and two of 8 keys, and the same of the magnitudes. NOTE: Q is read again for each 8
  // keys; kept, it took prepare 45 registers more.
  const auto multiply = [&](float(&products)[4], float(&sizes)[4], int query, int key) {
#pragma unroll 1
    for (int first = 0; first < head_dim; first += 32) {  // NOTE: the same for all lanes, or mma.sync hangs
      const int col = first + 8 * t;                      // a lane's of each 32: a sum may have any order
      const auto words_of = [&](const T* rows, int64_t stride, int row, bool exists) {
        return exists && col < head_dim ? *reinterpret_cast<const uint4*>(rows + row * stride + col) : uint4{};
      };
      const uint4 x = words_of(q_rows, args.fwd.q.row_stride, query - tile.first_query, query < len_q);
      const uint4 y = words_of(q_rows, args.fwd.q.row_stride, query + 8 - tile.first_query, query + 8 < len_q);
      const uint4 b = words_of(k_rows, args.fwd.k.row_stride, key, key < len_k);
      const auto add = [&](float(&to)[4], uint32_t bits) {
        const uint32_t low[4] = {x.x & bits, y.x & bits, x.y & bits, y.y & bits};
        const uint32_t high[4] = {x.z & bits, y.z & bits, x.w & bits, y.w & bits};
        mma_m16n8k16(to, low, b.x & bits, b.y & bits, T());
        mma_m16n8k16(to, high, b.z & bits, b.w & bits, T());
      };
      add(products, ~0u);
      add(sizes, 0x7FFF7FFF);
    }
  };
#pragma unroll 1
  for (int first = 0; first < Traits::kBlockM && tile.first_query + first < len_q; first += 16) {
    const auto is_renormalised = [&](int of) {
      const int query = tile.first_query + first + of;
      return query < len_q && needs_renorm(lse[query]);
    };
    if (!__any_sync(~0u, is_renormalised(g) || is_renormalised(g + 8))) continue;  // the same in all warps
    float shift[2] = {};
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // shift, then Z
      Top top[2];
      float sum[2] = {};
#pragma unroll 1
      for (int key = warp * 8; key < len_k; key += kWarps * 8) {
        float products[4] = {}, sizes[4] = {};
        multiply(products, sizes, tile.first_query + first + g, key + g);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = tile.first_query + first + g + i / 2 * 8, column = key + 2 * t + i % 2, half = i / 2;
          if (query >= len_q || column >= len_k) continue;
          float added = 0.f, steep = 1.f;
          const float score = score_of<Traits>(args.fwd, tile, products[i], slope, query, column, added, steep);
          if (score == kMinusInf) continue;
          // The sum of a product is cut off, not rounded, once for each 16 columns. What is added rounds twice; below
          // 2^20 that is less than what rounds in the score of a 16-bit type.
          const float rounding = added > 0x1p20f ? added * 0x1p-22f : 0.f;
          float off = sizes[i] * static_cast<float>(problem.scale) * 0x1p-19f;
          if constexpr (Traits::kScored) {  // an infinite product is capped as any; 2^-16: of tanh.approx
            if (problem.softcap != 0.0) off = steep == 0.f ? 0.f : off * steep;
            off += static_cast<float>(problem.softcap) * 0x1p-16f;
          }
          top[half].join(score, off + rounding);
          if (pass == 1) sum[half] += exp2f(fminf(score - shift[half], 0.f) * kLog2eFloat);
        }
      }
      __syncthreads();  // nobody reads what was told before
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {  // over the lanes of a row
          const float other = __shfl_xor_sync(~0u, top[half].score, step);
          top[half].join(other, __shfl_xor_sync(~0u, top[half].margin, step));
          sum[half] += __shfl_xor_sync(~0u, sum[half], step);
        }
        largest[warp][g + 8 * half] = top[half].score;
        margins[warp][g + 8 * half] = top[half].margin;
        sums[warp][g + 8 * half] = sum[half];
      }
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = g + 8 * half;
        Top of_all;
        float z = 0.f;
#pragma unroll 1
        for (int w = 0; w < kWarps; ++w) {
          of_all.join(largest[w][of], margins[w][of]);
          z += sums[w][of];
        }
        const float sink = sink_of<float>(args.fwd, tile.b, tile.head, 0);
        if (sink != kMinusInf) of_all.join(sink, 0.f);
        shift[half] = of_all.shift();
        z += exp2f(fminf(sink - shift[half], 0.f) * kLog2eFloat);
        if (pass == 0 || warp > 0 || t > 0 || !is_renormalised(of)) continue;
        stats[kLseStat * Traits::kBlockM + first + of] -= log2f(z);
        stats[kRenormStat * Traits::kBlockM + first + of] = -shift[half];
      }
    }
  }
}

}  // namespace flash_ext::sm90
