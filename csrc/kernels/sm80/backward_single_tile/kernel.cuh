// Backward of problems whose queries and keys of a head fit one tile, as in windowed vision models: one kernel, which
// writes dQ, dK and dV itself and adds up the gradient of a broadcast bias, without scratch for dQ, lse or delta.
//
// A block of threads walks units of items (one_tile.cuh); the loads of the next item run beside the products of this
// one. A warp owns 16 queries: S, P, dP, dS and dQ are its own, with the whole row at hand, so that the softmax is
// computed anew (what backward/renormalise.cuh is for otherwise) and delta is rowsum(P o dP) - dlse. P and dS pass
// through shared memory once, because dV and dK sum over the queries of all warps; there a warp owns 16 keys.
//
// Launched by run.cuh. Invariant: the order of every sum depends on nothing but the shapes and the card;
// queries past len_q are zeros in shared memory, which make dS = 0 and add nothing to dV; keys past len_k are masked.
#pragma once

#include "kernels/sm80/backward/parts.cuh"
#include "kernels/sm80/one_tile.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_>
struct OneTileTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kOneTile;
  static constexpr int kWarps = kBlock / 16, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = one_tile_backward_blocks(kHeadDim);
  static constexpr bool kScaled = std::is_same_v<Element, Fp16>;
  using Tile = SmemTile<T, kHeadDim>;
  using ScoreTile = SmemTile<T, kBlock>;  // [query][key]
  using Mods = ScoreMods<Element, kBlock, kBlock, kThreads>;
};

enum OneTileBackwardView { kQ, kK, kV, kDOut, kDq, kDk, kDv };

// A bias that is one row, one column or one number: what the tile adds up to, in one order.
__device__ __forceinline__ void sum_rows_or_columns(const float* sums, const BiasGradientPlan& plan, float* to,
                                                    const TensorView& view, int len_q, int len_k) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= (plan.own_rows || plan.own_cols ? kOneTile : 1)) return;
  const int64_t stride = plan.own_rows ? view.row_stride : view.col_stride;
  const int size = plan.own_rows ? len_q : (plan.own_cols ? len_k : 1);
  float total = 0.f;
  for (int row = plan.own_rows ? i : 0; row < (plan.own_rows ? i + 1 : kOneTile); ++row) {
    for (int col = plan.own_cols ? i : 0; col < (plan.own_cols ? i + 1 : kOneTile); ++col) {
      total += sums[row * kOneTile + col];
    }
  }
  if (i < size) to[i * stride] = total;
}

// The steps of a block. NOTE: P, dS and the sum of the bias's gradient are the kernel's own, as in forward/kernel.cuh.
template <class Traits>
struct OneTile {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using ScoreTile = typename Traits::ScoreTile;
  using Item = OneTileItem<kOneTileBackwardViews>;
  static constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  static constexpr float kPScale = Traits::kScaled ? 1024.f : 1.f;  // normal fp16 numbers end at 2^-14
  using Scores = float[1][kBlock / 8][4];
  using Gradient = float[1][kHeadDim / 8][4];

  const BackwardArgs& args;
  const BiasGradientPlan& plan;
  const unsigned features;
  const bool is_regular;
  const OneTileBackwardSmem& layout;
  float (&largest)[Traits::kWarps];
  char* const smem;
  const uint32_t base;
  const int warp, warp_row, row;  // row: the first of this lane's two, the other is row + 8

  __device__ __forceinline__ const Problem& problem() const { return args.fwd.problem; }
  __device__ __forceinline__ int len_q() const { return static_cast<int>(problem().len_q); }
  __device__ __forceinline__ int len_k() const { return static_cast<int>(problem().len_k); }
  __device__ __forceinline__ Tile tile(int which, uint32_t n) const {
    return {base + (static_cast<int>(n % 2) * 4 + which) * Tile::bytes(kBlock)};
  }
  __device__ __forceinline__ ScoreTile p_tile() const { return {base + layout.p}; }
  __device__ __forceinline__ ScoreTile ds_tile() const { return {base + layout.ds}; }

  __device__ __forceinline__ void load(const Item& item, uint32_t n) const {
    if (!item.exists) return;
    const ForwardArgs& fwd = args.fwd;
    const int cols = static_cast<int>(problem().head_dim), cols_v = static_cast<int>(problem().head_dim_v);
    const bool has_d_out = static_cast<bool>(args.d_out);  // lse depends on no value
    load_one_tile<kThreads>(tile(kQ, n), fwd.q, item.at[kQ], len_q(), cols, is_regular);
    load_one_tile<kThreads>(tile(kK, n), fwd.k, item.at[kK], len_k(), cols, is_regular);
    load_one_tile<kThreads>(tile(kV, n), fwd.v, item.at[kV], has_d_out ? len_k() : 0, cols_v, is_regular);
    load_one_tile<kThreads>(tile(kDOut, n), args.d_out, item.at[kDOut], has_d_out ? len_q() : 0, cols_v, is_regular);
  }
  __device__ __forceinline__ void read_d_lse(const Item& item, float (&d_lse)[2]) const {
    if (args.d_lse != nullptr) {
      const int64_t first = (item.b * problem().heads_q + item.head) * problem().len_q;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        d_lse[i] = row + 8 * i < len_q() ? static_cast<const float*>(args.d_lse)[first + row + 8 * i] : 0.f;
      }
    }
  }

  // What lies between Q K^T and the softmax. dp: 0 of queries beyond the last.
  __device__ __forceinline__ void modify(const typename Traits::Mods& mods, Scores& s, Scores& dp) const {
    mods.template apply<false>(features, s, warp_row, 0, diagonal_of(problem(), whole_sequence(problem())));
    hide_outside(problem(), s, warp_row, kMinusInf);
    if (warp_row + 16 > len_q()) {  // 0 times NaN of a key that no query sees would be NaN
      for_each_row(s, [&](float& x, int i) { x = row + 8 * i < len_q() ? x : kMinusInf; });
      for_each_row(dp, [&](float& x, int i) { x = row + 8 * i < len_q() ? x : 0.f; });
    }
  }

  // S becomes P, the softmax of its row; inverse: of the row's sum. A row without keys has P = 0, and inverse is 0.
  __device__ __forceinline__ void softmax(Scores& s, float (&inverse)[2]) const {
    float max[2] = {kMinusInf, kMinusInf}, (&sum)[2] = inverse;
    exponentiate_rows(s, kLog2eFloat, max, sum);
#pragma unroll
    for (float& x : sum) x = x == 0.f ? 0.f : 1.f / x;
    for_each_row(s, [&](float& x, int i) { x *= inverse[i]; });
  }

  // dP becomes dS = P o (dP - rowsum(P o dP) + dlse).
  __device__ __forceinline__ void dp_to_ds(const typename Traits::Mods& mods, Scores& ds, const Scores& p,
                                           const float (&inverse)[2], const float (&d_lse)[2]) const {
    float delta[2] = {0.f, 0.f};
#pragma unroll
    for (int b = 0; b < kBlock / 8; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) delta[i / 2] = fmaf(p[0][b][i], ds[0][b][i], delta[i / 2]);
    }
#pragma unroll
    for (float& x : delta) x = row_reduce(x, [](float x, float y) { return x + y; });
    for_each_row(ds, [&](float& x, int i) { x -= delta[i]; });
    for_each_row(ds, [&](float& x, int i) { x += d_lse[i]; });
    for_each_pair(ds, p, [](float& x, float y) { x *= y; });
    hide_outside(problem(), ds, warp_row, 0.f);
    if ((problem().has_mask || problem().has_bias) && warp_has_special(ds)) {
      if (problem().has_mask) {
        mods.template visit_masked<false, 1, kBlock / 8>(features, warp_row, 0, 0, clears_hidden(ds));
      }
      for_each_row(ds, [&](float& x, int i) { x = inverse[i] == 0.f ? 0.f : x; });  // rows without keys
    }
  }

  // In fp16 dS by a power of two that all warps agree on, and P by 2^10. What takes dS back is returned.
  __device__ __forceinline__ float scale(Scores& ds, Scores& p) const {
    float unscale = 1.f;
    if constexpr (Traits::kScaled) {
      float bound = 0.f;
      for_each_row(ds, [&](float x, int) { bound = fmaxf(bound, fabsf(x)); });
      bound = warp_max(bound);
      if (threadIdx.x % 32 == 0) largest[warp] = bound;
      __syncthreads();
#pragma unroll
      for (const float of_warp : largest) bound = fmaxf(bound, of_warp);
      const float scale = fp16_scale(bound);
      unscale = 1.f / scale;
      for_each_row(ds, [&](float& x, int) { x *= scale; });
      for_each_row(p, [&](float& x, int) { x *= kPScale; });
    }
    return unscale;
  }

  __device__ __forceinline__ void store(const Item& item, uint32_t n, Gradient& c, int which, bool in_accum,
                                        float factor) const {
    for_each_row(c, [&](float& x, int) { x *= factor; });
    const TensorView& view = which == kDq ? args.dq : which == kDk ? args.dk : args.dv;
    const int rows = which == kDq ? len_q() : len_k();
    const int64_t cols = which == kDv ? problem().head_dim_v : problem().head_dim;
    GlobalRows<T> to = rows_of<T>(view, item.at[which], rows, cols);
    if (in_accum) {
      to.data = reinterpret_cast<T*>(static_cast<float*>(view.data) + item.at[which]);
      store_float(c, 0, in_floats(to), warp_row);
    } else {
      store_accumulators<Frag>(c, tile(kV, n), warp_row, 0, to, warp_row);
    }
  }
  // dQ = dS K, dK = dS^T Q, dV = P^T dO
  __device__ __forceinline__ void multiply(const Item& item, uint32_t n, const Operands<Frag, 1, kBlock / 8>& ds,
                                           float unscale) const {
    const float factor = static_cast<float>(problem().scale) * unscale;
    if (args.dq) {
      Gradient c;
      clear(c);
      gemm_from_registers<Frag>(c, ds, tile(kK, n), 0, 0);
      store(item, n, c, kDq, args.dq_in_accum, factor);
    }
    if (args.dk) {
      Gradient c;
      clear(c);
      gemm_tn<Frag, kBlock>(c, ds_tile(), warp_row, tile(kQ, n), 0);
      store(item, n, c, kDk, args.dk_in_accum, factor);
    }
    if (args.dv) {
      Gradient c;
      clear(c);
      gemm_tn<Frag, kBlock>(c, p_tile(), warp_row, tile(kDOut, n), 0);
      store(item, n, c, kDv, args.dv_in_accum, 1.f / kPScale);
    }
  }

  // The unit's gradient of the bias leaves, and its sum is 0 again.
  __device__ __forceinline__ void store_bias(const Item& item, Scores& sum) const {
    float* const to = (plan.partial != nullptr ? plan.partial : static_cast<float*>(args.dbias.data)) + item.bias_sum;
    const bool whole = plan.own_rows && plan.own_cols;
    float* const sums = reinterpret_cast<float*>(smem + layout.p);  // [query][key], where P and dS were
    if (!whole) __syncthreads();
    for_each_score<false>(sum, warp_row, 0, [&](float& x, int query, int key) {
      const bool inside = query < len_q() && key < len_k();
      if (!whole) {
        sums[query * kBlock + key] = inside ? x : 0.f;
      } else if (inside) {
        to[query * args.dbias.row_stride + key * args.dbias.col_stride] = x;
      }
      x = 0.f;
    });
    if (!whole) {
      __syncthreads();
      sum_rows_or_columns(sums, plan, to, args.dbias, len_q(), len_k());
    }
  }
};

// All warps do the same: 16 rows of S, P and dS each, later 16 keys of dK and dV. What an item goes through:
//
// clang-format off
//   wait, __syncthreads (1)   Q, K, V and dO are there, and what is to be known; nobody reads what the last left
//   find                      32 items ahead, after as many; what is done to the next item's scores
//   begin to load             bias and mask, where they are new; then Q, K, V and dO of the next item
//   S = Q K^T, dP = dO V^T
//   (wait, __syncthreads)     bias and mask are there, where they are new
//   P, dS                     in fp16 a __syncthreads for the largest dS of all warps
//   P and dS to shared memory
//   __syncthreads (2)         P and dS are there; V becomes the stage of the gradients
//   dQ, dK, dV                the sum of the bias's gradient after the last item of a unit
// clang-format on
//
// Shared memory: two stages of Q, K, V and dO; P; dS; the items, in a ring, and what is done to scores; bias; mask.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    one_tile_backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BiasGradientPlan plan,
                             bool sums_bias, unsigned features, bool is_regular) {
  using Step = OneTile<Traits>;
  using Frag = typename Traits::Frag;
  constexpr int kHeadDim = Traits::kHeadDim;
  char* const smem = dynamic_shared_128();
  __shared__ float largest[Traits::kWarps];
  const Problem& problem = args.fwd.problem;
  const OneTileBackwardSmem layout = one_tile_backward_smem(kHeadDim, bias_bytes_of(problem), problem.has_mask);
  const int warp = threadIdx.x / 32, warp_row = 16 * warp;
  const uint32_t base = shared_address(smem);
  const Step step{args, plan, features, is_regular, layout, largest, smem, base, warp, warp_row, warp_row + lane_row()};
  const auto view_of = [&](int i) -> OneTileView {
    const TensorView& view = i == kQ      ? args.fwd.q
                             : i == kK    ? args.fwd.k
                             : i == kV    ? args.fwd.v
                             : i == kDOut ? args.d_out
                             : i == kDq   ? args.dq
                             : i == kDk   ? args.dk
                                          : args.dv;
    return {view, problem.heads_q};
  };
  const OneTileItems<typename Traits::Mods, kOneTileBackwardViews, decltype(view_of)> items{
      args.fwd, plan, args.dbias, features, smem + layout.items, smem + layout.bias - 3 * kOneTileModsBytes, view_of};
  const uint32_t count = items.count();
  if (count == 0) return;
  items.find_first(base + layout.bias, base + layout.mask);
  __syncthreads();
  step.load(items.item(0), 0);
  cp_async_commit();

  typename Step::Scores bias_sum;
  clear(bias_sum);
  for (uint32_t n = 0; n < count; ++n) {
    cp_async_wait<0>();
    __syncthreads();  // (1)
    items.find_next(n);
    const auto& item = items.item(n);
    const auto& mods = items.mods_of(n);
    const bool exists = item.exists, new_scores = exists && item.new_scores;
    if (new_scores) mods.load(features, 0, 0);
    cp_async_commit();
    if (n + 1 < count) step.load(items.item(n + 1), n + 1);
    cp_async_commit();
    if (!exists) continue;
    float d_lse[2] = {0.f, 0.f}, inverse[2] = {0.f, 0.f};
    step.read_d_lse(item, d_lse);

    typename Step::Scores p, ds;
    score_product<Frag, kHeadDim>(features, p, step.tile(kQ, n), warp_row, step.tile(kK, n), 0);  // S = Q K^T
    clear(ds);
    gemm_nt<Frag, kHeadDim>(ds, step.tile(kDOut, n), warp_row, step.tile(kV, n), 0);  // dP = dO V^T
    if (new_scores) {
      cp_async_wait<1>();
      __syncthreads();  // bias and mask are there
    }
    step.modify(mods, p, ds);
    step.softmax(p, inverse);
    step.dp_to_ds(mods, ds, p, inverse, d_lse);
    if (sums_bias) for_each_pair(bias_sum, ds, [](float& x, float y) { x += y; });

    const float unscale = step.scale(ds, p);
    const auto ds_frag = operands<Frag>(ds);
    store_scores(step.p_tile(), operands<Frag>(p), warp_row);
    store_scores(step.ds_tile(), ds_frag, warp_row);
    __syncthreads();  // (2)
    step.multiply(item, n, ds_frag, unscale);
    if (sums_bias && item.last) step.store_bias(item, bias_sum);
  }
}

}  // namespace flash_ext::sm80
