// Backward of problems whose queries and keys of a head fit one tile, as in windowed vision models: one kernel, which
// writes dQ, dK and dV itself and adds up the gradient of a broadcast bias, without scratch for dQ, lse or delta.
//
//   item = one (batch, head)      unit = items that share a tile of the bias's gradient
//   (core/bias_gradient_plan.h)
//
// A block of threads walks units; the loads of the next item run beside the products of this one. A warp owns 16
// queries: S, P, dP, dS and dQ are its own, with the whole row at hand, so that the softmax is computed anew (what
// backward/renormalise.cuh is for otherwise) and delta is rowsum(P o dP) - dlse. P and dS pass through shared memory
// once, because dV and dK sum over the queries of all warps; there a warp owns 16 keys.
//
// Launched by run.cuh. Invariant: the order of every sum depends on nothing but the shapes and the card;
// queries past len_q are zeros in shared memory, which make dS = 0 and add nothing to dV; keys past len_k are masked.
#pragma once

#include "core/bias_gradient_plan.h"
#include "kernels/sm80/backward/parts.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_>
struct OneTileTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kOneTile;
  static constexpr int kWarps = kBlock / 16, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = one_tile_blocks(kHeadDim);
  static constexpr bool kScaled = std::is_same_v<Element, Fp16>;
  using Tile = SmemTile<T, kHeadDim>;
  using ScoreTile = SmemTile<T, kBlock>;  // [query][key]
  using Mods = ScoreMods<Element, kBlock, kBlock, kThreads>;
};

enum OneTileOperand { kQ, kK, kV, kDOut, kDq, kDk, kDv, kOperands };

// Where an item lies. Gradients in float are addressed in their own elements.
template <class Traits>
struct OneTileItem {
  GlobalRows<typename Traits::T> rows[kOperands];
  const float* d_lse;  // null: none
  int64_t to;          // of the bias's gradient
  bool last;           // of its unit
  typename Traits::Mods mods;
};

// The items of a block of threads in their order.
struct OneTileWalk {
  uint32_t unit, index = 0, count = 0;

  __device__ __forceinline__ OneTileWalk(const BiasGradientPlan& plan, uint32_t first) : unit(first) { enter(plan); }
  __device__ __forceinline__ bool valid() const { return index < count; }
  __device__ __forceinline__ void advance(const BiasGradientPlan& plan) {
    if (++index < count) return;
    unit += gridDim.x;
    enter(plan);
  }

 private:
  __device__ __forceinline__ void enter(const BiasGradientPlan& plan) {
    index = 0;
    count = unit < plan.units() ? plan.items_of(unit) : 0;
  }
};

// A few threads find a member each. NOTE: those of one warp by the same instructions, which the whole block waits for.
template <class Traits>
__device__ __forceinline__ void find_item(const BackwardArgs& args, const BiasGradientPlan& plan,
                                          const OneTileWalk& walk, OneTileItem<Traits>& item, uint32_t bias_smem,
                                          uint32_t mask_smem) {
  using T = typename Traits::T;
  const int which = static_cast<int>(threadIdx.x);
  if (which >= kOperands && which % 32 != 0) return;
  const Problem& problem = args.fwd.problem;
  const BiasGradientItem at = plan.at(problem, walk.unit, walk.index);
  if (which < kOperands) {
    const TensorView& view = which == kQ      ? args.fwd.q
                             : which == kK    ? args.fwd.k
                             : which == kV    ? args.fwd.v
                             : which == kDOut ? args.d_out
                             : which == kDq   ? args.dq
                             : which == kDk   ? args.dk
                                              : args.dv;
    const bool of_queries = which == kQ || which == kDOut || which == kDq;
    const bool of_values = which == kV || which == kDOut || which == kDv;
    const bool in_accum =
        which == kDq ? args.dq_in_accum : (which == kDk ? args.dk_in_accum : which == kDv && args.dv_in_accum);
    const int64_t offset = batch_offset(problem, view, at.b) + at.head * view.head_stride;
    const bool is_read = view && (which != kV || args.d_out);  // lse depends on no value
    GlobalRows<T> rows = rows_of<T>(view, offset, is_read ? (of_queries ? problem.len_q : problem.len_k) : 0,
                                    of_values ? problem.head_dim_v : problem.head_dim);
    if (in_accum) rows.data = reinterpret_cast<T*>(static_cast<float*>(view.data) + offset);
    item.rows[which] = rows;
  } else if (which == 32) {
    item.mods = Traits::Mods::make(args.fwd, at.b, at.head, whole_sequence(problem), bias_smem, mask_smem);
  } else if (which == 64) {
    item.last = at.last;
    item.to = at.part * plan.part_elements + (plan.own_head ? at.head * args.dbias.head_stride : 0);
#pragma unroll
    for (int i = 0; i < kMaxBatchDims; ++i) {
      if (plan.own_batch[i]) item.to += at.batch[i] * args.dbias.batch_stride[i];
    }
  } else {
    const int64_t bh = at.b * problem.heads_q + at.head;
    item.d_lse = args.d_lse == nullptr ? nullptr : static_cast<const float*>(args.d_lse) + bh * problem.len_q;
  }
}

// fn(value, number of its row), numbers[i] of rows g + 8 i.
template <int kN, class Fn>
__device__ __forceinline__ void for_each_row(float (&c)[1][kN][4], const Fn& fn) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fn(c[0][n][i], i / 2);
  }
}

// Over the four lanes of a row.
template <class Fn>
__device__ __forceinline__ float row_reduce(float x, const Fn& fn) {
  x = fn(x, __shfl_xor_sync(~0u, x, 1));
  return fn(x, __shfl_xor_sync(~0u, x, 2));
}

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
  using Item = OneTileItem<Traits>;
  static constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  static constexpr float kPScale = Traits::kScaled ? 1024.f : 1.f;  // normal fp16 numbers end at 2^-14
  using Scores = float[1][kBlock / 8][4];
  using Gradient = float[1][kHeadDim / 8][4];
  static_assert(sizeof(Item) <= kOneTileItemBytes);

  const BackwardArgs& args;
  const BiasGradientPlan& plan;
  const unsigned features;
  const OneTileSmem& layout;
  float (&largest)[Traits::kWarps];
  char* const smem;
  const uint32_t base;
  const TileBand band;
  const int diagonal, len_q, len_k;
  const int warp, warp_row, row;  // row: the first of this lane's two, the other is row + 8
  const void *bias_there = nullptr, *mask_there = nullptr;

  __device__ __forceinline__ const Problem& problem() const { return args.fwd.problem; }
  __device__ __forceinline__ Item& item_at(uint32_t n) const {
    return reinterpret_cast<Item*>(smem + layout.items)[n % 3];
  }
  __device__ __forceinline__ Tile tile(int which, uint32_t n) const {
    return {base + (static_cast<int>(n % 2) * 4 + which) * Tile::bytes(kBlock)};
  }
  __device__ __forceinline__ ScoreTile p_tile() const { return {base + layout.p}; }
  __device__ __forceinline__ ScoreTile ds_tile() const { return {base + layout.ds}; }

  __device__ __forceinline__ void find(const OneTileWalk& walk, uint32_t n) const {
    find_item<Traits>(args, plan, walk, item_at(n), base + layout.bias, base + layout.mask);
  }
  __device__ __forceinline__ void load(uint32_t n) const {
    const Item& item = item_at(n);
    load_tile<kBlock, kThreads>(tile(kQ, n), item.rows[kQ], 0);
    load_tile<kBlock, kThreads>(tile(kK, n), item.rows[kK], 0);
    load_tile<kBlock, kThreads>(tile(kV, n), item.rows[kV], 0);
    load_tile<kBlock, kThreads>(tile(kDOut, n), item.rows[kDOut], 0);
  }
  // Whether the item's bias or mask is not the last one's, and so begins to arrive.
  __device__ __forceinline__ bool load_scores(const Item& item) {
    const bool is_new = (problem().has_bias && item.mods.bias.data != bias_there) ||
                        (problem().has_mask && item.mods.mask.data != mask_there);
    if (is_new) item.mods.load(features, 0, 0);
    bias_there = item.mods.bias.data;
    mask_there = item.mods.mask.data;
    return is_new;
  }
  __device__ __forceinline__ void read_d_lse(const Item& item, float (&d_lse)[2]) const {
    if (item.d_lse != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) d_lse[i] = row + 8 * i < len_q ? item.d_lse[row + 8 * i] : 0.f;
    }
  }

  // What lies between Q K^T and the softmax. dp: 0 of queries beyond the last.
  __device__ __forceinline__ void modify(const Item& item, Scores& s, Scores& dp, bool hides) const {
    item.mods.template apply<false>(features, s, warp_row, 0, diagonal);
    if (hides) mask_band<false>(s, warp_row, 0, band, 0, 0);
    if (warp_row + 16 > len_q) {  // 0 times NaN of a key that no query sees would be NaN
      for_each_row(s, [&](float& x, int i) { x = row + 8 * i < len_q ? x : kMinusInf; });
      for_each_row(dp, [&](float& x, int i) { x = row + 8 * i < len_q ? x : 0.f; });
    }
  }

  // S becomes P, the softmax of its row; inverse: of the row's sum. A row without keys has P = 0, and inverse is 0.
  __device__ __forceinline__ void softmax(Scores& s, float (&inverse)[2]) const {
    float top[2] = {kMinusInf, kMinusInf}, (&sum)[2] = inverse;
    for_each_row(s, [&](float x, int i) { top[i] = fmaxf(top[i], x); });
#pragma unroll
    for (float& x : top) x = row_reduce(x, [](float x, float y) { return fmaxf(x, y); });
    for_each_row(s, [&](float& x, int i) {
      x = exp2_fast((x - (top[i] == kMinusInf ? 0.f : top[i])) * kLog2eFloat);
      sum[i] += x;
    });
#pragma unroll
    for (float& x : sum) {
      x = row_reduce(x, [](float x, float y) { return x + y; });
      x = x == 0.f ? 0.f : 1.f / x;
    }
    for_each_row(s, [&](float& x, int i) { x *= inverse[i]; });
  }

  // dP becomes dS = P o (dP - rowsum(P o dP) + dlse).
  __device__ __forceinline__ void dp_to_ds(const Item& item, Scores& ds, const Scores& p, const float (&inverse)[2],
                                           const float (&d_lse)[2], bool hides) const {
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
    if (hides) mask_band<false>(ds, warp_row, 0, band, 0, 0, 0.f);
    if ((problem().has_mask || problem().has_bias) && warp_has_special(ds)) {
      if (problem().has_mask) {
        item.mods.template visit_masked<false, 1, kBlock / 8>(features, warp_row, 0, 0, clears_hidden(ds));
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

  __device__ __forceinline__ void store(uint32_t n, Gradient& c, int which, bool in_accum, float factor) const {
    for_each_row(c, [&](float& x, int) { x *= factor; });
    const GlobalRows<T>& to = item_at(n).rows[which];
    if (in_accum) {
      store_float(c, 0, in_floats(to), warp_row);
    } else {
      store_accumulators<Frag>(c, tile(kV, n), warp_row, 0, to, warp_row);
    }
  }
  // dQ = dS K, dK = dS^T Q, dV = P^T dO
  __device__ __forceinline__ void multiply(uint32_t n, const Operands<Frag, 1, kBlock / 8>& ds, float unscale) const {
    const float factor = static_cast<float>(problem().scale) * unscale;
    if (args.dq) {
      Gradient c;
      clear(c);
      gemm_from_registers<Frag>(c, ds, tile(kK, n), 0, 0);
      store(n, c, kDq, args.dq_in_accum, factor);
    }
    if (args.dk) {
      Gradient c;
      clear(c);
      gemm_tn<Frag, kBlock>(c, ds_tile(), warp_row, tile(kQ, n), 0);
      store(n, c, kDk, args.dk_in_accum, factor);
    }
    if (args.dv) {
      Gradient c;
      clear(c);
      gemm_tn<Frag, kBlock>(c, p_tile(), warp_row, tile(kDOut, n), 0);
      store(n, c, kDv, args.dv_in_accum, 1.f / kPScale);
    }
  }

  // The unit's gradient of the bias leaves, and its sum is 0 again.
  __device__ __forceinline__ void store_bias(const Item& item, Scores& sum) const {
    float* const to = (plan.partial != nullptr ? plan.partial : static_cast<float*>(args.dbias.data)) + item.to;
    const bool whole = plan.own_rows && plan.own_cols;
    float* const sums = reinterpret_cast<float*>(smem + layout.p);  // [query][key], where P and dS were
    if (!whole) __syncthreads();
    for_each_score<false>(sum, warp_row, 0, [&](float& x, int query, int key) {
      const bool inside = query < len_q && key < len_k;
      if (!whole) {
        sums[query * kBlock + key] = inside ? x : 0.f;
      } else if (inside) {
        to[query * args.dbias.row_stride + key * args.dbias.col_stride] = x;
      }
      x = 0.f;
    });
    if (!whole) {
      __syncthreads();
      sum_rows_or_columns(sums, plan, to, args.dbias, len_q, len_k);
    }
  }
};

// All warps do the same: 16 rows of S, P and dS each, later 16 keys of dK and dV. What an item goes through:
//
// clang-format off
//   wait, __syncthreads (1)   Q, K, V and dO are there, and where the next item lies; nobody reads what the last left
//   begin to load             bias and mask, where they are new; then Q, K, V and dO of the next item
//   S = Q K^T, dP = dO V^T
//   (wait, __syncthreads)     bias and mask are there, where they are new
//   P, dS                     in fp16 a __syncthreads for the largest dS of all warps
//   P and dS to shared memory
//   __syncthreads (2)         P and dS are there; V becomes the stage of the gradients
//   dQ, dK, dV                the sum of the bias's gradient after the last item of a unit
//   find                      the item after the next
// clang-format on
//
// Shared memory: two stages of Q, K, V and dO; P; dS; three items, which are the last, this and the next; bias; mask.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    one_tile_backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BiasGradientPlan plan,
                             bool sums_bias, unsigned features) {
  using Step = OneTile<Traits>;
  using Frag = typename Traits::Frag;
  constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim;
  char* const smem = dynamic_shared_128();
  __shared__ float largest[Traits::kWarps];
  const Problem& problem = args.fwd.problem;
  const OneTileSmem layout = one_tile_smem(kHeadDim, bias_bytes_of(problem), problem.has_mask);
  const int warp = threadIdx.x / 32, warp_row = 16 * warp;
  Step step{args,
            plan,
            features,
            layout,
            largest,
            smem,
            shared_address(smem),
            make_tile_band(problem, whole_sequence(problem)),
            diagonal_of(problem, whole_sequence(problem)),
            static_cast<int>(problem.len_q),
            static_cast<int>(problem.len_k),
            warp,
            warp_row,
            warp_row + lane_row()};

  OneTileWalk walk(plan, blockIdx.x), next = walk;
  if (!walk.valid()) return;
  step.find(walk, 0);
  next.advance(plan);
  if (next.valid()) step.find(next, 1);
  __syncthreads();
  step.load(0);
  cp_async_commit();

  typename Step::Scores bias_sum;
  clear(bias_sum);
  for (uint32_t n = 0; walk.valid(); ++n) {
    const auto& item = step.item_at(n);
    cp_async_wait<0>();
    __syncthreads();  // (1)
    const bool new_scores = step.load_scores(item);
    cp_async_commit();
    if (next.valid()) step.load(n + 1);
    cp_async_commit();
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
    const bool hides = step.band.is_boundary(0, kBlock, 0, kBlock);
    step.modify(item, p, ds, hides);
    step.softmax(p, inverse);
    step.dp_to_ds(item, ds, p, inverse, d_lse, hides);
    if (sums_bias) for_each_pair(bias_sum, ds, [](float& x, float y) { x += y; });

    const float unscale = step.scale(ds, p);
    const auto ds_frag = operands<Frag>(ds);
    store_scores(step.p_tile(), operands<Frag>(p), warp_row);
    store_scores(step.ds_tile(), ds_frag, warp_row);
    __syncthreads();  // (2)
    step.multiply(n, ds_frag, unscale);
    if (sums_bias && item.last) step.store_bias(item, bias_sum);
    walk = next;
    if (next.valid()) next.advance(plan);
    if (next.valid()) step.find(next, n + 2);
  }
}

}  // namespace flash_ext::sm80
