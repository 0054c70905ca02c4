// Before backward, for rows whose lse is not good enough: what their probabilities sum up to, and delta from the same
// probabilities.
//
//   Z = sum_j e^(s_j - lse)     inverse = 1 / Z     delta = (sum_j e^(s_j - lse) dP_j) / Z - dlse (unless apart)
//
// lse is a float: beyond |lse| = 2^12 (a row of finfo.min) it has lost log of the number of keys, further on more than
// e^x takes, so that in these rows the largest score takes its place, here and behind; and in float32, where
// gradients are held to 1e-7, its rounding is felt from |lse| = 16 on, and where scores are exact (tile.cuh) always;
// with few keys dP - delta cancels, which takes delta from the very numbers that it is subtracted from: a row that sees
// one key then has dS = 0 but for dlse. The gradient of slopes multiplies dS by a distance and adds up whole rows,
// where an error of delta, the same for all keys of a row, does not average out: all rows are renormalised for it.
// Blocks of queries without such a row end at once. Called by run_backward between delta and the main kernel.
// Invariant: S^T and dP^T come from the same products, in the same roles and order, as in the main kernel, so that both
// see the same bits.
#pragma once

#include "kernels/sm80/backward/parts.cuh"
#include "kernels/sm80/choose_tiles.h"
#include "kernels/sm80/dropout.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_>
struct RenormaliseTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr TileShape kTile = renormalise_tile(sizeof(T), kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static_assert(kBlockN == 16 * kWarps, "a warp owns 16 keys");
  static constexpr int kThreads = 32 * kWarps;
  static constexpr bool kFloat = sizeof(T) == 4;
  using Tile = SmemTile<T, kHeadDim>;
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
};

// NOTE: bf16 at a mean of 8, slopes: with delta from the rounded out the error was up to 2.3 of eager's, measured 0.04
// (CPU simulation of this arithmetic).
template <class Traits>
__device__ __forceinline__ bool is_inexact(const Problem& problem, float lse, int64_t visible) {
  if (lse == kMinusInf || visible == 0) return false;  // of a row that sees a sink alone delta is right as it is
  if (problem.constant_lse) return needs_renorm(lse);
  if (problem.wants_dalibi || visible < few_keys(Traits::kFloat)) return true;
  return Traits::kFloat ? fabsf(lse) > 16.f || has_exact_scores(problem) : needs_renorm(lse);
}

// NOTE: the second bound is there for registers: without it ptxas stops at 128 and spills in half of the instances.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    renormalise_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                       int64_t m_blocks, unsigned features) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kWarps = Traits::kWarps;
  char* const smem = dynamic_shared_128();

  const Problem& problem = args.fwd.problem;
  const int64_t of_grid = blockIdx.x / m_blocks;  // (b, head) or, packed, head
  const Place place =
      place_of(problem, {of_grid / problem.heads_q, of_grid % problem.heads_q, int64_t{blockIdx.x} % m_blocks},
               scratch.renorm_tiles);
  if (place.is_empty()) return;
  const int64_t b = place.b, head = place.head;
  const Sequence sequence = place.sequence;
  const int len_q = sequence.len_q, len_k = sequence.len_k, first_query = static_cast<int>(place.block) * kBlockM;
  const Band band = make_band(problem, sequence);
  const int64_t row = row_index(problem, sequence, b, head) + first_query;
  bool inexact = false, renorm = false;
  if (threadIdx.x < kBlockM && first_query + static_cast<int>(threadIdx.x) < len_q) {
    const int64_t query = first_query + static_cast<int>(threadIdx.x);
    const float lse = static_cast<const float*>(args.fwd.lse)[row + threadIdx.x];
    inexact = is_inexact<Traits>(problem, lse, band.keys({query, query + 1}, len_k).size());
    renorm = needs_renorm(lse);
    scratch.inverse[row + threadIdx.x] = 1.f;
    scratch.shift[row + threadIdx.x] = lse;
  }
  if (!__syncthreads_or(inexact)) return;

  constexpr int kRow = kHeadDim * static_cast<int>(sizeof(T));
  const uint32_t base = shared_address(smem);
  const Tile q_smem{base}, d_out_smem{base + kBlockM * kRow}, k_smem{base + 2 * kBlockM * kRow},
      v_smem{base + (2 * kBlockM + kBlockN) * kRow};
  const uint32_t bias_smem = base + 2 * (kBlockM + kBlockN) * kRow;
  __shared__ typename Traits::Mods mods;
  if (threadIdx.x == 0) {
    mods = Traits::Mods::make(args.fwd, b, head, sequence, bias_smem, bias_smem + kBlockM * aux_pitch(kBlockN, 4));
  }
  __syncthreads();
  const auto k = head_rows<T>(problem, args.fwd.k, b, head / (problem.heads_q / problem.heads_k), sequence.row_k, len_k,
                              problem.head_dim);
  const auto v = head_rows<T>(problem, args.fwd.v, b, head / (problem.heads_q / problem.heads_v), sequence.row_k,
                              args.d_out ? len_k : 0, problem.head_dim_v);
  load_tile<kBlockM, kThreads>(
      q_smem, head_rows<T>(problem, args.fwd.q, b, head, sequence.row_q, len_q, problem.head_dim), first_query);
  load_tile<kBlockM, kThreads>(
      d_out_smem,
      head_rows<T>(problem, args.d_out, b, head, sequence.row_q, args.d_out ? len_q : 0, problem.head_dim_v),
      first_query);

  const bool drops = problem.dropout_p > 0.0;
  ElementDropout dropout;
  if (drops) dropout = dropout_of(args.fwd, b);
  const float dropout_scale = static_cast<float>(dropout.scale);
  const int diagonal = diagonal_of(problem, sequence);
  const TileBand tile_band = make_tile_band(problem, sequence);
  const int warp = threadIdx.x / 32, warp_key = warp * 16;
  constexpr int kN = kBlockM / 8;  // blocks of 8 queries
  __shared__ float lse_smem[kBlockM], sums[kWarps][3][kBlockM];
  if (threadIdx.x < kBlockM) {
    const bool inside = first_query + static_cast<int>(threadIdx.x) < len_q;
    const float lse = inside ? static_cast<const float*>(args.fwd.lse)[row + threadIdx.x] : kMinusInf;
    lse_smem[threadIdx.x] = lse == kMinusInf ? -kMinusInf : lse;
  }
  // -inf where there is none.
  const auto sink = [&] { return sink_of<float>(args.fwd, b, head, 0); };
  // The largest scores of renormalised rows, of a thread's own keys, become what is subtracted.
  const auto find_shifts = [&](float(&most)[1][kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = fmaxf(most[0][n][i], most[0][n][i + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
        if (threadIdx.x % 32 < 4) sums[warp][0][n * 8 + threadIdx.x % 4 * 2 + i] = x;
      }
    }
    __syncthreads();
    if (renorm) {
      float x = kMinusInf;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x = fmaxf(x, sums[w][0][threadIdx.x]);
      x = fmaxf(x, sink());
      lse_smem[threadIdx.x] = scratch.shift[row + threadIdx.x] = x;
    }
    clear(most);
  };
  float sum[1][kN][4], product[1][kN][4], rest[1][kN][4];  // rest: what rounding took from the products
  clear(sum);
  clear(product);
  clear(rest);

  const Range keys = band.keys({first_query, min(first_query + kBlockM, len_q)}, len_k);
  const int first_key = static_cast<int>(keys.first) / kBlockN * kBlockN;
  // Where a row is renormalised its largest score is found first; `sum` has the maxima then.
  bool searches = __syncthreads_or(renorm) != 0;
  if (searches) for_each_score<true>(sum, 0, 0, [](float& x, int, int) { x = kMinusInf; });
  for (int key = first_key; key < keys.last; key += kBlockN) {
    __syncthreads();  // nobody reads the last tiles any more
    load_tile<kBlockN, kThreads>(k_smem, k, key);
    load_tile<kBlockN, kThreads>(v_smem, v, key);
    mods.load(features, first_query, key);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // all tiles are there
    make_products_exact<Frag, kHeadDim, kBlockM, kBlockN, kThreads>(problem, q_smem, k_smem, d_out_smem, v_smem);
    float p_acc[1][kN][4], dp_acc[1][kN][4];
    clear(dp_acc);
    score_product<Frag, kHeadDim>(features, p_acc, k_smem, warp_key, q_smem, 0);
    mods.template apply<true>(features, p_acc, warp_key, 0, first_query + diagonal - key);
    if (tile_band.is_boundary(first_query, kBlockM, key, kBlockN)) {
      mask_band<true>(p_acc, warp_key, 0, tile_band, first_query, key);
    }
    if (searches) {
      for_each_pair(sum, p_acc, [](float& x, float y) { x = fmaxf(x, y); });
      if (key + kBlockN < keys.last) continue;
      searches = false;
      find_shifts(sum);
      key = first_key - kBlockN;
      continue;
    }
    for_each_column(p_acc, lse_smem, [&](float& x, float lse) { x = p_of_score<Frag>(x, lse, features); });
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[0][n][i] += p_acc[0][n][i];
    }
    gemm_nt<Frag, kHeadDim>(dp_acc, v_smem, warp_key, d_out_smem, 0);
    if (drops) {
      visit_dropout<true>(
          dp_acc, dropout,
          dropout.first.at(static_cast<uint32_t>(b * problem.heads_q + head), first_query, key + warp_key),
          // What is no number stays none, which the main kernel then has of delta.
          [&](float& x, bool kept) { x *= kept ? dropout_scale : 0.f; });
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = __fmul_rn(p_acc[0][n][i], dp_acc[0][n][i]);  // not to be fused with the sum
        product[0][n][i] += x;
        rest[0][n][i] += fmaf(p_acc[0][n][i], dp_acc[0][n][i], -x);
      }
    }
  }

  // Over the 16 keys of the warp, then over the warps.
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = sum[0][n][i] + sum[0][n][i + 2], y = product[0][n][i] + product[0][n][i + 2];
      float z = rest[0][n][i] + rest[0][n][i + 2];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(~0u, x, step);
        y += __shfl_xor_sync(~0u, y, step);
        z += __shfl_xor_sync(~0u, z, step);
      }
      if (threadIdx.x % 32 < 4) {
        const int query = n * 8 + threadIdx.x % 4 * 2 + i;
        sums[warp][0][query] = x;
        sums[warp][1][query] = y;
        sums[warp][2][query] = z;
      }
    }
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= kBlockM || first_query + i >= len_q || lse_smem[i] == -kMinusInf) return;
  float x = 0.f, y = 0.f, z = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    x += sums[w][0][i];
    y += sums[w][1][i];
    z += sums[w][2][i];
  }
  const bool joined = args.d_lse != nullptr && scratch.d_lse == nullptr;
  const float d_lse = joined ? static_cast<const float*>(args.d_lse)[row + i] : 0.f;
  if (problem.has_sinks) x += expf(sink() - lse_smem[i]);
  scratch.inverse[row + i] = 1.f / x;
  if (has_one_float_key(problem) || problem.constant_lse) return;
  // With the remainder of the division (y + z) / x is rounded once, and of one key it is its dP, bit for bit.
  const float quotient = y / x;
  scratch.delta[row + i] = quotient + (fmaf(-quotient, x, y) + z) / x - d_lse;
}

}  // namespace flash_ext::sm80
