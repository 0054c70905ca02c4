// Backward of problems whose queries and keys of a head fit one tile, as in windowed vision models: one kernel, which
// writes dQ, dK and dV itself and adds up the gradient of a broadcast bias, without scratch for dQ, lse or delta.
//
// A block of threads walks units of items (one_tile.cuh); the loads of the next item run beside the products of this
// one. A warp owns 16 queries: S, P, dP, dS and dQ are its own, with all keys of a row at once or in parts, so that the
// softmax is computed anew (what backward/renormalise.cuh is for otherwise) and delta is rowsum(P o dP). P and dS pass
// through shared memory once, because dV and dK sum over the queries of all warps; there a warp owns 16 keys.
//
// Launched by run.cuh. Invariant: the order of every sum depends on nothing but the shapes and the card;
// queries past len_q are zeros in shared memory, which make dS = 0 and add nothing to dV; keys past len_k are masked.
#pragma once

#include "kernels/sm80/backward/parts.cuh"
#include "kernels/sm80/one_tile.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_, int kBlock_>
struct OneTileTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_;
  static constexpr int kWarps = kBlock / 16, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = one_tile_backward_blocks(kHeadDim, kBlock);
  // NOTE: of 9 warps each has 168 registers, 72 of them for the sum of a bias's
  // gradient; S and dP of all 144 keys would be as many each, so they are multiplied twice.
  static constexpr int kPart = one_tile_part(kBlock), kParts = kBlock / kPart;
  static constexpr bool kScaled = std::is_same_v<Element, Fp16>;
  using Tile = SmemTile<T, kHeadDim>;
  using ScoreTile = SmemTile<T, aux_pitch(kBlock, 2) / 2>;  // [query][key]
  using Mods = ScoreMods<Element, kBlock, kBlock, kThreads>;
};

enum OneTileBackwardView { kQ, kK, kV, kDOut, kDq, kDk, kDv };

// A bias that is one row, one column or one number: what the tile adds up to, in one order. All threads come here.
template <int kBlock>
__device__ __forceinline__ void sum_rows_or_columns(float* sums, const BiasGradientPlan& plan, float* to,
                                                    const TensorView& view, int len_q, int len_k) {
  const int i = static_cast<int>(threadIdx.x);
  const bool is_one = !plan.own_rows && !plan.own_cols;
  const int of_line = plan.own_cols ? 1 : kBlock, in_line = plan.own_cols ? kBlock : 1;
  float total = 0.f;
  if (i < kBlock) {
    for (int j = 0; j < kBlock; ++j) total += sums[i * of_line + j * in_line];
    if (is_one) sums[i * of_line] = total;
    if (plan.own_rows && i < len_q) to[i * view.row_stride] = total;
    if (plan.own_cols && i < len_k) to[i * view.col_stride] = total;
  }
  if (!is_one) return;
  __syncthreads();
  if (i > 0) return;
  total = 0.f;
  for (int row = 0; row < kBlock; ++row) total += sums[row * kBlock];
  to[0] = total;
}

// What is known of a lane's two rows. Before finish_rows `inverse` is the sum, of several parts of the lane's own keys.
struct OneTileRows {
  float max[2] = {kMinusInf, kMinusInf};
  float inverse[2] = {0.f, 0.f};  // of the sum of e^(S - max); 0 of a row without keys
  float delta[2] = {0.f, 0.f};    // rowsum(P o dP)
  float largest[2] = {0.f, 0.f};  // |P dP|, in fp16

  __device__ __forceinline__ float exponential(float s, int i) const {
    return exp2_fast((s - (max[i] == kMinusInf ? 0.f : max[i])) * kLog2eFloat);
  }
  // The sums so far, as of a larger maximum.
  __device__ __forceinline__ void raise(const float (&to)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float before = max[i];
      max[i] = to[i];
      const float factor = exponential(before, i);
      inverse[i] *= factor;
      delta[i] *= factor;
      largest[i] *= factor;
    }
  }
};

// The steps of a block. NOTE: P, dS and the sum of the bias's gradient are the kernel's own, as in forward/kernel.cuh.
template <class Traits>
struct OneTile {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using ScoreTile = typename Traits::ScoreTile;
  using Item = OneTileItem<kOneTileBackwardViews>;
  static constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  static constexpr int kPart = Traits::kPart, kParts = Traits::kParts;
  static constexpr bool kAhead = kParts == 1;
  static constexpr float kPScale = Traits::kScaled ? 1024.f : 1.f;  // normal fp16 numbers end at 2^-14
  using Part = float[1][kPart / 8][4];                              // of S, P, dP or dS
  using Scores = float[kParts][1][kPart / 8][4];
  using Gradient = float[1][kHeadDim / 8][4];

  const BackwardArgs& args;
  const BiasGradientPlan& plan;
  const unsigned features;
  const OneTileForm& form;
  const OneTileBackwardSmem& layout;
  float (&largest)[Traits::kWarps];
  char* const smem;
  const uint32_t base;

  __device__ __forceinline__ const Problem& problem() const { return args.fwd.problem; }
  // NOTE: computed anew wherever they are used, because registers are scarce.
  static __device__ __forceinline__ int warp_row() { return static_cast<int>(no_hoist(threadIdx.x)) / 32 * 16; }
  static __device__ __forceinline__ int row() { return warp_row() + lane_row(); }  // of this lane; its other is 8 on
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
    load_one_tile<kBlock, kThreads>(tile(kQ, n), fwd.q, item.at[kQ], len_q(), cols, form.is_regular);
    load_one_tile<kBlock, kThreads>(tile(kK, n), fwd.k, item.at[kK], len_k(), cols, form.is_regular);
    load_one_tile<kBlock, kThreads>(tile(kV, n), fwd.v, item.at[kV], has_d_out ? len_k() : 0, cols_v, form.is_regular);
    load_one_tile<kBlock, kThreads>(tile(kDOut, n), args.d_out, item.at[kDOut], has_d_out ? len_q() : 0, cols_v,
                                    form.is_regular);
  }
  // dlse of row i of this lane's two. NOTE: read where it is used, because registers are scarce.
  __device__ __forceinline__ float d_lse(const Item& item, int i) const {
    const int64_t first = (item.b * problem().heads_q + item.head) * problem().len_q;
    return row() + 8 * i < len_q() ? static_cast<const float*>(args.d_lse)[first + row() + 8 * i] : 0.f;
  }

  // P and dS of queries and keys beyond the last stay 0. A __syncthreads follows.
  __device__ __forceinline__ void clear_scores() const {
    constexpr uint32_t kZeros[4] = {};
    for (int i = threadIdx.x * kChunkBytes; i < layout.items - layout.p; i += kThreads * kChunkBytes) {
      store_shared(base + layout.p + i, kZeros);
    }
  }
  // How many parts a warp has: none where its queries are beyond the last.
  __device__ __forceinline__ int parts() const {
    if (warp_row() >= len_q()) return 0;
    return kParts == 1 ? 1 : (len_k() + kPart - 1) / kPart;
  }

  // S = Q K^T of a part of the keys.
  __device__ __forceinline__ void multiply_s(uint32_t n, int part, Part& s) const {
    score_product<Frag, kHeadDim, false, kAhead>(features, s, tile(kQ, n), warp_row(), tile(kK, n), kPart * part);
  }
  // dP = dO V^T; 0 of queries beyond the last: 0 times NaN of a value that no query sees would be NaN.
  __device__ __forceinline__ void multiply_dp(uint32_t n, int part, Part& dp) const {
    clear(dp);
    gemm_nt<Frag, kHeadDim, kAhead>(dp, tile(kDOut, n), warp_row(), tile(kV, n), kPart * part);
    if (warp_row() + 16 > len_q()) for_each_row(dp, [&](float& x, int i) { x = row() + 8 * i < len_q() ? x : 0.f; });
  }

  // What lies between Q K^T and the softmax. Queries beyond the last see nothing.
  __device__ __forceinline__ void modify(const typename Traits::Mods& mods, int part, Part& s) const {
    const int col = kPart * part;
    mods.template apply<false>(features, s, warp_row(), col, diagonal_of(problem(), whole_sequence(problem())));
    hide_outside(problem(), form, s, warp_row(), col, kMinusInf);
    if (warp_row() + 16 > len_q()) {
      for_each_row(s, [&](float& x, int i) { x = row() + 8 * i < len_q() ? x : kMinusInf; });
    }
  }

  // Adds a part to what is to be known of its rows. Where it is the only one, S becomes e^(S - m).
  __device__ __forceinline__ void add_to_rows(Part& s, const Part& dp, OneTileRows& rows) const {
    if constexpr (kParts == 1) {
      exponentiate_rows(s, kLog2eFloat, rows.max, rows.inverse);
    } else {
      float max[2] = {rows.max[0], rows.max[1]};
      for_each_row(s, [&](float x, int i) { max[i] = fmaxf(max[i], x); });
      rows.raise(max);
    }
#pragma unroll
    for (int b = 0; b < kPart / 8; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float e = kParts == 1 ? s[0][b][i] : rows.exponential(s[0][b][i], i / 2);
        if (kParts > 1) rows.inverse[i / 2] += e;
        rows.delta[i / 2] = fmaf(e, dp[0][b][i], rows.delta[i / 2]);
        if (Traits::kScaled) rows.largest[i / 2] = fmaxf(rows.largest[i / 2], fabsf(e * dp[0][b][i]));
      }
    }
  }
  // ... and ends it: over the four lanes of a row.
  __device__ __forceinline__ void finish_rows(OneTileRows& rows) const {
    const auto add = [](float x, float y) { return x + y; };
    if constexpr (kParts > 1) {
      float max[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) max[i] = row_reduce(rows.max[i], [](float x, float y) { return fmaxf(x, y); });
      rows.raise(max);
#pragma unroll
      for (float& x : rows.inverse) x = row_reduce(x, add);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.inverse[i] = rows.inverse[i] == 0.f ? 0.f : 1.f / rows.inverse[i];
      rows.delta[i] = row_reduce(rows.delta[i], add) * rows.inverse[i];
      rows.largest[i] *= rows.inverse[i];
    }
  }

  // S becomes P, the softmax of its row.
  __device__ __forceinline__ void s_to_p(Part& s, const OneTileRows& rows) const {
    for_each_row(s, [&](float& x, int i) { x = (kParts == 1 ? x : rows.exponential(x, i)) * rows.inverse[i]; });
  }

  // dP becomes dS = P o (dP - delta + dlse).
  __device__ __forceinline__ void dp_to_ds(const typename Traits::Mods& mods, int part, Part& ds, const Part& p,
                                           const OneTileRows& rows, const Item& item) const {
    for_each_row(ds, [&](float& x, int i) { x -= rows.delta[i]; });
    if (args.d_lse != nullptr) {
      const float of_row[2] = {d_lse(item, 0), d_lse(item, 1)};
      for_each_row(ds, [&](float& x, int i) { x += of_row[i]; });
    }
    for_each_pair(ds, p, [](float& x, float y) { x *= y; });
    hide_outside(problem(), form, ds, warp_row(), kPart * part, 0.f);
    if ((problem().has_mask || problem().has_bias) && warp_has_special(ds)) {
      if (problem().has_mask) {
        mods.template visit_masked<false, 1, kPart / 8>(features, warp_row(), kPart * part, 0, clears_hidden(ds));
      }
      for_each_row(ds, [&](float& x, int i) { x = rows.inverse[i] == 0.f ? 0.f : x; });  // rows without keys
    }
  }

  // In fp16, a power of two for dS that all warps agree on, by what |dS| is at most: no P of a row is above its
  // inverse.
  __device__ __forceinline__ float scale_of(const OneTileRows& rows, const Item& item) const {
    if constexpr (Traits::kScaled) {
      float bound = 0.f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float of_lse = args.d_lse != nullptr ? fabsf(d_lse(item, i)) : 0.f;
        bound = fmaxf(bound, rows.largest[i] + rows.inverse[i] * (fabsf(rows.delta[i]) + of_lse));
      }
      bound = warp_max(bound);
      if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = bound;
      __syncthreads();
#pragma unroll
      for (const float of_warp : largest) bound = fmaxf(bound, of_warp);
      return fp16_scale(bound);
    } else {
      return 1.f;
    }
  }

  // A part of P and dS to shared memory; where it is all, dQ = dS K.
  __device__ __forceinline__ void pass_on(uint32_t n, int part, Part& p, Part& ds, float scale, Gradient& dq) const {
    if constexpr (Traits::kScaled) {
      for_each_row(ds, [&](float& x, int) { x *= scale; });
      for_each_row(p, [&](float& x, int) { x *= kPScale; });
    }
    const auto ds_frag = operands<Frag>(ds);
    store_scores(p_tile(), operands<Frag>(p), warp_row(), kPart * part);  // [query][key]
    store_scores(ds_tile(), ds_frag, warp_row(), kPart * part);
    if (kParts == 1 && args.dq) gemm_from_registers<Frag>(dq, ds_frag, tile(kK, n), 0, 0);
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
      store_float(c, 0, in_floats(to), warp_row());
    } else {
      store_accumulators<Frag>(c, tile(kV, n), warp_row(), 0, to, warp_row());
    }
  }
  // dQ leaves, of several parts multiplied here; dK = dS^T Q, dV = P^T dO
  __device__ __forceinline__ void multiply(const Item& item, uint32_t n, Gradient& dq, float unscale) const {
    const float factor = static_cast<float>(problem().scale) * unscale;
    if (args.dq && warp_row() < len_q()) {
      if (kParts > 1) gemm_nn<Frag, kBlock>(dq, ds_tile(), warp_row(), tile(kK, n), 0);
      store(item, n, dq, kDq, args.dq_in_accum, factor);
    }
    if (args.dk && warp_row() < len_k()) {
      Gradient c;
      clear(c);
      gemm_tn<Frag, kBlock>(c, ds_tile(), warp_row(), tile(kQ, n), 0);
      store(item, n, c, kDk, args.dk_in_accum, factor);
    }
    if (args.dv && warp_row() < len_k()) {
      Gradient c;
      clear(c);
      gemm_tn<Frag, kBlock>(c, p_tile(), warp_row(), tile(kDOut, n), 0);
      store(item, n, c, kDv, args.dv_in_accum, 1.f / kPScale);
    }
  }

  // The unit's gradient of the bias leaves, and its sum is 0 again.
  __device__ __forceinline__ void store_bias(const Item& item, Scores& sum) const {
    float* const to = (plan.partial != nullptr ? plan.partial : static_cast<float*>(args.dbias.data)) + item.bias_sum;
    const bool whole = plan.own_rows && plan.own_cols;
    float* const sums = reinterpret_cast<float*>(smem + layout.p);  // [query][key], where P and dS were
    if (!whole) __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      for_each_score<false>(sum[part], warp_row(), kPart * part, [&](float& x, int query, int key) {
        const bool inside = query < len_q() && key < len_k();
        if (!whole) {
          sums[query * kBlock + key] = inside ? x : 0.f;
        } else if (inside) {
          to[query * args.dbias.row_stride + key * args.dbias.col_stride] = x;
        }
        x = 0.f;
      });
    }
    if (!whole) {
      __syncthreads();
      sum_rows_or_columns<kBlock>(sums, plan, to, args.dbias, len_q(), len_k());
      __syncthreads();
      clear_scores();
    }
  }
};

// All warps do the same, those with queries or keys: 16 rows of S, P and dS each, later 16 keys of dK and dV. An item:
//
// clang-format off
//   wait, __syncthreads (1)   Q, K, V and dO are there, and what is to be known; nobody reads what the last left
//   find                      32 items ahead, after as many; what is done to the next item's scores
//   begin to load             bias and mask, where they are new; then Q, K, V and dO of the next item
//   S = Q K^T, dP = dO V^T    where all keys are one part
//   (wait, __syncthreads)     bias and mask are there, where they are new
//   rows                      what is to be known of them; of several parts S and dP for this alone, part after part
//   (__syncthreads)           in fp16, for the largest dS of all warps
//   P, dS                     to shared memory; dQ, where all keys are one part; else S and dP again
//   __syncthreads (2)         P and dS are there; V becomes the stage of the gradients
//   dQ, dK, dV                the sum of the bias's gradient after the last item of a unit
// clang-format on
//
// Shared memory: two stages of Q, K, V and dO; P; dS; the items, in a ring, and what is done to scores; bias; mask.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    one_tile_backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BiasGradientPlan plan,
                             bool sums_bias, unsigned features, OneTileForm form) {
  using Step = OneTile<Traits>;
  char* const smem = dynamic_shared_128();
  __shared__ float largest[Traits::kWarps];
  const Problem& problem = args.fwd.problem;
  const OneTileBackwardSmem layout =
      one_tile_backward_smem(Traits::kHeadDim, Traits::kBlock, bias_bytes_of(problem), problem.has_mask);
  const uint32_t base = shared_address(smem);
  const Step step{args, plan, features, form, layout, largest, smem, base};
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
  step.clear_scores();
  items.find_first(base + layout.bias, base + layout.mask);
  __syncthreads();
  step.load(items.item(0), 0);
  cp_async_commit();

  typename Step::Scores bias_sum;
#pragma unroll
  for (auto& part : bias_sum) clear(part);
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
    const int parts = step.parts();
    typename Step::Part s, dp;
    OneTileRows rows;
    if (Step::kParts == 1 && parts > 0) {
      step.multiply_s(n, 0, s);
      step.multiply_dp(n, 0, dp);
    }
    if (new_scores) {
      cp_async_wait<1>();
      __syncthreads();  // bias and mask are there
    }
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      if (Step::kParts > 1) step.multiply_s(n, part, s);
      step.modify(mods, part, s);
      if (Step::kParts > 1) step.multiply_dp(n, part, dp);
      step.add_to_rows(s, dp, rows);
    }
    step.finish_rows(rows);
    const float scale = step.scale_of(rows, item);

    typename Step::Gradient dq;
    clear(dq);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      if (Step::kParts > 1) {
        step.multiply_s(n, part, s);
        step.modify(mods, part, s);
      }
      step.s_to_p(s, rows);
      if (Step::kParts > 1) step.multiply_dp(n, part, dp);
      step.dp_to_ds(mods, part, dp, s, rows, item);
      if (sums_bias) {
#pragma unroll  // NOTE: with parts of 16 and the loop itself unrolled, its instructions were more than the cache holds
        for (int i = 0; i < Step::kParts; ++i) {
          if (i == part) for_each_pair(bias_sum[i], dp, [](float& x, float y) { x += y; });
        }
      }
      step.pass_on(n, part, s, dp, scale, dq);
    }
    __syncthreads();  // (2)
    step.multiply(item, n, dq, 1.f / scale);
    if (sums_bias && item.last) step.store_bias(item, bias_sum);
  }
}

}  // namespace flash_ext::sm80
