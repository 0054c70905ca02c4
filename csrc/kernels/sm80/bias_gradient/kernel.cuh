// The gradient of a broadcast bias, as a pass of its own: a block of threads owns a tile *of the gradient* and walks
// over everything that shares it (batch elements, heads, blocks of queries or keys), in a fixed order, with the sum in
// registers. No atomics, no L x S memory, deterministic.
//
//   dbias[tile] = sum over items of dS = P o (dropout(dO V^T) - delta)
//
// One stage of each operand, and each is loaded again as soon as nobody reads it: K and Q of the next item while this
// one's P and dP are made, V and dO while the next S is. What the next item shares stays.
// core/bias_gradient_plan.h has the order of the items; where parts share a tile, a second kernel adds their sums
// up in order. A bias that is broadcast over nothing, or in bf16 over few batch elements, gets its gradient from the
// main backward kernel (backward/kernel.cuh, backward/bias_boxes.cuh). Called by run_backward. Invariant: each element
// of the gradient is written exactly once.
#pragma once

#include "kernels/sm80/bias_gradient/parts.cuh"
#include "kernels/sm80/dropout.cuh"

namespace flash_ext::sm80 {

// The steps of a block. NOTE: P, dP and their sum are the kernel's own, as in forward/kernel.cuh; everything else is
// found anew wherever it is wanted, because they leave no registers to keep anything in.
template <class Traits>
struct BiasGradient {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using Mods = typename Traits::Mods;
  using Scores = typename Traits::Scores;
  using Item = BiasGradientEntry;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads, kM = Traits::kM, kN = Traits::kN;

  const BackwardArgs& args;
  const float* const delta;
  const float* const d_lse;
  const float* const inverse;
  const BiasGradientPlan& plan;
  const unsigned features;
  const int bias_bytes;
  const BiasGradientSmem& layout;
  BiasGradientProgress& progress;
  Mods& mods;
  SharedValue<ElementDropout>& dropout;
  TileBand& band;
  int& diagonal;
  // The last item, of even or odd number, with a row whose P do not sum up to 1; with one that has no key.
  int (&renormalised)[2], (&emptied)[2];
  char* const smem;
  const uint32_t base;
  const int warp;
  const bool drops;

  __device__ __forceinline__ const Problem& problem() const { return args.fwd.problem; }
  __device__ __forceinline__ Tile k_tile() const { return {base}; }
  __device__ __forceinline__ Tile q_tile() const { return {base + layout.q}; }
  __device__ __forceinline__ Tile v_tile() const { return {base + layout.v}; }
  __device__ __forceinline__ Tile d_out_tile() const { return {base + layout.d_out}; }
  __device__ __forceinline__ float* row_smem() const {  // [item % 2][lse, delta, inverse, dlse][kBlockM]
    return reinterpret_cast<float*>(smem + layout.rows);
  }
  __device__ __forceinline__ Item* ring() const { return reinterpret_cast<Item*>(smem + layout.items); }
  __device__ __forceinline__ const Item& item_at(int at) const { return ring()[no_hoist(at) % kBiasItems]; }
  __device__ __forceinline__ bool goes_on(int at) const { return progress.found > at + 1; }
  __device__ __forceinline__ bool loads_next(int at) const { return goes_on(at) && item_at(at + 1).visible; }
  static __device__ __forceinline__ int warp_key() {
    return no_hoist(threadIdx.x) / 32 % Traits::kWarpsN * Traits::kWarpKeys;
  }
  static __device__ __forceinline__ int warp_query() {
    return no_hoist(threadIdx.x) / 32 / Traits::kWarpsN * Traits::kQueries;
  }

  // What is read once an item, and the first items.
  __device__ __forceinline__ void find() const {
    if (threadIdx.x == kThreads - 1) {
      mods = Mods::make(args.fwd, 0, 0, whole_sequence(problem()), base + layout.bias, base + layout.mask);
      band = make_tile_band(problem(), whole_sequence(problem()));
      diagonal = diagonal_of(problem(), whole_sequence(problem()));
      if (drops) dropout.get() = dropout_of(args.fwd, 0);
      renormalised[0] = renormalised[1] = emptied[0] = emptied[1] = -1;
      Item& before = ring()[kBiasItems - 1];
      before.q = before.k = before.v = before.d_out = before.to = -1;
    }
    if (warp == 0) {
      progress = {0, 0};
      __syncwarp();
      find_items<Traits>(args, plan, ring(), progress);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void find_more(int at) const {
    if (warp == 0 && progress.found == at + 1) find_items<Traits>(args, plan, ring(), progress);
  }

  // ---- Loads

  template <int kRows>
  __device__ __forceinline__ void load(Tile tile, const TensorView& view, int64_t offset, int64_t rows, int64_t cols,
                                       int first_row) const {
    load_operand<Traits, kRows>(tile, rows_of<T>(view, offset, rows, cols), first_row);
  }
  __device__ __forceinline__ void load_for_s(const Item& item, const Item& before) const {
    if (item.k != before.k || item.first_key != before.first_key) {
      load<kBlockN>(k_tile(), args.fwd.k, item.k, problem().len_k, problem().head_dim, item.first_key);
    }
    if (item.q != before.q || item.first_query != before.first_query) {
      load<kBlockM>(q_tile(), args.fwd.q, item.q, problem().len_q, problem().head_dim, item.first_query);
    }
  }
  __device__ __forceinline__ void load_for_dp(const Item& item, const Item& before, bool staged) const {
    if (item.v != before.v || item.first_key != before.first_key || (staged && Traits::kStageTakesV)) {
      load<kBlockN>(v_tile(), args.fwd.v, item.v, args.d_out ? problem().len_k : 0, problem().head_dim_v,
                    item.first_key);
    }
    if (item.d_out != before.d_out || item.first_query != before.first_query || staged) {
      load<kBlockM>(d_out_tile(), args.d_out, item.d_out, args.d_out ? problem().len_q : 0, problem().head_dim_v,
                    item.first_query);
    }
  }
  // Items of one tile share the bias: what is summed over is what the bias lacks.
  __device__ __forceinline__ void load_scores(const Item& item, const Item& before) const {
    const int first_query = plan.own_rows ? item.first_query : 0, first_key = plan.own_cols ? item.first_key : 0;
    if (item.to != before.to) {
      const int present = args.fwd.bias.row_stride != 0 ? kBlockM : 1;
      if (bias_bytes == 4) {
        load_rows<kBlockM, kBlockN / 4, Mods::kFloatPitch, kThreads>(
            mods.bias_smem, rows_of<float>(args.fwd.bias, item.bias, problem().len_q, problem().len_k), first_query,
            first_key, present);
      } else if constexpr (sizeof(T) == 2) {
        load_rows<kBlockM, kBlockN / 8, Mods::kBiasPitch, kThreads>(
            mods.bias_smem, rows_of<T>(args.fwd.bias, item.bias, problem().len_q, problem().len_k), first_query,
            first_key, present);
      }
    }
    if (problem().has_mask) {
      const bool by_row = args.fwd.mask.row_stride != 0;
      load_rows<kBlockM, kBlockN / 16, Mods::kMaskPitch, kThreads>(
          mods.mask_smem, rows_of<uint8_t>(args.fwd.mask, item.mask, problem().len_q, problem().len_k),
          by_row ? item.first_query : 0, item.first_key, by_row ? kBlockM : 1);
    }
  }

  // lse, delta, 1 / sum of P and dlse of this thread's query pass through registers, because lse is changed on the way.
  static __device__ __forceinline__ float4 no_row() { return make_float4(kMinusInf, 0.f, 1.f, 0.f); }
  __device__ __forceinline__ float4 read_row(const Item& item) const {
    const int query = item.first_query + static_cast<int>(threadIdx.x);
    float4 row = no_row();
    if (threadIdx.x < kBlockM && query < problem().len_q) {
      const int64_t at = int64_t{item.bh} * problem().len_q + query;
      row.x = static_cast<const float*>(args.fwd.lse)[at];
      row.y = delta[at];
      if (inverse != nullptr) row.z = inverse[at];
      if (d_lse != nullptr && row.x != kMinusInf) row.w = d_lse[at];
    }
    return row;
  }
  __device__ __forceinline__ void write_row(float4 row, int at) const {
    if (threadIdx.x >= kBlockM) return;
    float* const to = row_smem() + at % 2 * 4 * kBlockM + threadIdx.x;
    to[0] = row.x == kMinusInf ? -kMinusInf : row.x;
    to[kBlockM] = row.y;
    to[2 * kBlockM] = row.z;
    to[3 * kBlockM] = row.w;
    if (row.z != 1.f) renormalised[at % 2] = at;
    if (row.x == kMinusInf) emptied[at % 2] = at;
  }

  // Everything of the first item begins to arrive.
  __device__ __forceinline__ void begin() const {
    float4 row = no_row();
    if (ring()[0].visible) {
      load_for_s(ring()[0], ring()[kBiasItems - 1]);
      load_scores(ring()[0], ring()[kBiasItems - 1]);
      cp_async_commit();
      load_for_dp(ring()[0], ring()[kBiasItems - 1], false);
      row = read_row(ring()[0]);
      if (threadIdx.x == 0) mods.slope = ring()[0].slope;
    }
    cp_async_commit();
    write_row(row, 0);
  }

  // ---- Scores

  __device__ __forceinline__ bool hides_lengths_or_band(int at) const {
    return band.is_boundary(item_at(at).first_query, kBlockM, item_at(at).first_key, kBlockN) ||
           item_at(at).first_query + kBlockM > problem().len_q;
  }
  // fn(value, number `which` of its query)
  template <class Fn>
  __device__ __forceinline__ void with_query(Scores& c, int at, int which, const Fn& fn) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float(&part)[1][kN][4] = reinterpret_cast<float(&)[1][kN][4]>(c[m]);
      for_each_column(part, row_smem() + (no_hoist(at) % 2 * 4 + which) * kBlockM + warp_query(), fn);
    }
  }

  // S^T becomes P^T; a dropped P turns negative, a hidden one infinite.
  __device__ __forceinline__ void score_to_p(Scores& p, int at) const {
    mods.template apply<true>(features & ~kMask, p, warp_key(), warp_query(),
                              item_at(at).first_query + diagonal - item_at(at).first_key);
    with_query(p, at, 0, [&](float& x, float lse) { x = p_of_score<Frag>(x, lse, features); });
    if (renormalised[at % 2] == at) with_query(p, at, 2, [](float& x, float of_query) { x *= of_query; });
    if (hides_lengths_or_band(at)) {
      visit_hidden<kM, kN>(band, static_cast<int>(problem().len_q), item_at(at).first_query + warp_query(),
                           item_at(at).first_key + warp_key(), sets_hidden(p, kMinusInf));
    }
    if (problem().has_mask) {
      mods.template visit_masked<true, kM, kN>(features, warp_key(), warp_query(), 0, sets_hidden(p, kMinusInf));
    }
    if (drops) {
      visit_dropout<true>(p, dropout.get(),
                          dropout.get().first.at(item_at(at).bh_of_dropout, item_at(at).first_query + warp_query(),
                                                 item_at(at).first_key + warp_key()),
                          [](float& x, bool kept) { x = kept ? x : -x; });
    }
  }

  // sum += dS^T = P^T o (dropout(dP^T) - delta + dlse)
  __device__ __forceinline__ void add_ds(Scores& sum, Scores& p, Scores& dp, int at) const {
    if (drops) {
      const float dropout_scale = static_cast<float>(dropout.get().scale);
      for_each_pair(dp, p, [&](float& x, float of_p) { x = of_p > 0.f ? x * dropout_scale : 0.f; });
    }
    with_query(dp, at, 1, [](float& x, float of_query) { x -= of_query; });
    if (d_lse != nullptr) with_query(dp, at, 3, [](float& x, float of_query) { x += of_query; });
    if (emptied[at % 2] == at) with_query(dp, at, 0, [](float& x, float lse) { x = lse == -kMinusInf ? 0.f : x; });
    if (problem().has_mask || hides_lengths_or_band(at)) {  // what is hidden has an infinite P
      const auto is_hidden = [](float x) { return fabsf(x) == -kMinusInf; };
      for_each_pair(dp, p, [&](float& x, float of_p) { x = is_hidden(of_p) ? 0.f : x; });
      for_each_score<true>(p, 0, 0, [&](float& x, int, int) { x = is_hidden(x) ? 0.f : x; });
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = fmaf(fabsf(p[m][n][i]), dp[m][n][i], sum[m][n][i]);
      }
    }
  }

  // A unit's sum to the gradient, through shared memory where V and dO were.
  __device__ __forceinline__ void store(const Scores& sum, const Item& item) const {
    const SumsTo<T> to = SumsTo<T>{reinterpret_cast<char*>(plan.partial != nullptr ? plan.partial : args.dbias.data),
                                   (no_hoist(features) & kNarrowDbias) != 0} +
                         item.to;
    const int stage = layout.rows - Traits::kStage;
    const int left_rows = static_cast<int>(problem().len_q) - item.first_query;
    const int left_cols = static_cast<int>(problem().len_k) - item.first_key;
    if (plan.own_rows && plan.own_cols) {
      store_sums<Traits>(sum, base + stage + warp * Traits::kStageBytes,
                         to + (warp_query() * args.dbias.row_stride + warp_key() * args.dbias.col_stride), args.dbias,
                         left_rows - warp_query(), left_cols - warp_key());
    } else {
      store_reduced<Traits>(sum, reinterpret_cast<float*>(smem + stage), to, args.dbias, plan, left_rows, left_cols);
    }
  }
};

// All warps do the same, each with its kWarpKeys x kQueries of S^T, dP^T and their sum. What an item goes through:
//
//   wait, __syncthreads (1)   K, Q, bias, mask and the rows' numbers are there
//   S^T = K Q^T               warp 0 looks for more items before it, where there are none
//   __syncthreads (2)         nobody reads K and Q any more; the next item is known
//   begin to load             K and Q of the next item; its rows' numbers to registers
//   P^T                       the rows' numbers to shared memory, of which there are two stages
//   wait, __syncthreads (3)   V and dO are there; nobody reads bias and mask any more
//   begin to load             bias and mask of the next item
//   dP^T = V dO^T
//   __syncthreads (4)         nobody reads V and dO any more
//   begin to load             V and dO of the next item
//   sum += dS^T
//   store the sum, (5)        after the last item of a tile, through the place of V and dO, which are loaded after it
//
// A wait leaves the copies of one commit under way: those of V and dO at (1), those of K and Q at (3). Shared memory:
// K, Q, V, dO, the rows' numbers, the ring of items, bias, mask.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    bias_gradient_kernel(const __grid_constant__ BackwardArgs args, const float* delta, const float* d_lse,
                         const float* inverse, const __grid_constant__ BiasGradientPlan plan, unsigned features) {
  using Step = BiasGradient<Traits>;
  using Frag = typename Traits::Frag;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads;
  constexpr TileShape kTile = Traits::kTile;
  char* const smem = dynamic_shared_128();
  const Problem& problem = args.fwd.problem;
  const int bias_bytes = problem.bias_dtype == DType::kFloat32 ? 4 : 2;
  const BiasGradientSmem layout =
      bias_gradient_smem(kTile, kHeadDim, sizeof(typename Traits::T), bias_bytes, problem.has_mask);
  __shared__ BiasGradientProgress progress;
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<ElementDropout> dropout;
  __shared__ TileBand band;
  __shared__ int diagonal;
  __shared__ int renormalised[2], emptied[2];
  const Step step{args,
                  delta,
                  d_lse,
                  inverse,
                  plan,
                  features,
                  bias_bytes,
                  layout,
                  progress,
                  mods,
                  dropout,
                  band,
                  diagonal,
                  renormalised,
                  emptied,
                  smem,
                  shared_address(smem),
                  static_cast<int>(threadIdx.x / 32),
                  problem.dropout_p > 0.0};
  step.find();
  step.begin();
  typename Step::Scores sum;
  clear(sum);
  for (int at = 0; at == 0 || step.goes_on(at - 1); ++at) {
    const auto item = [&]() -> const BiasGradientEntry& { return step.item_at(at); };
    const auto next = [&]() -> const BiasGradientEntry& { return step.item_at(at + 1); };
    cp_async_wait<1>();
    __syncthreads();  // (1)
    step.find_more(at);
    make_product_exact<kMayBeExact<Frag, kHeadDim>, Frag, kBlockM, kBlockN, kThreads>(has_exact_scores(problem),
                                                                                      step.q_tile(), step.k_tile());
    typename Step::Scores p, dp;
    if (item().visible) {  // S^T = K Q^T
      score_product<Frag, kHeadDim, true, false>(features, p, step.k_tile(), Step::warp_key(), step.q_tile(),
                                                 Step::warp_query());
    }
    __syncthreads();  // (2)
    float4 row = Step::no_row();
    if (step.loads_next(at)) {
      step.load_for_s(next(), item());
      row = step.read_row(next());
    }
    cp_async_commit();
    if (item().visible) step.score_to_p(p, at);
    step.write_row(row, at + 1);

    cp_async_wait<1>();
    __syncthreads();  // (3)
    if (step.loads_next(at)) {
      step.load_scores(next(), item());
      if (threadIdx.x == 0) mods.slope = next().slope;
    }
    cp_async_commit();
    clear(dp);
    make_product_exact<kMayHaveExactDp<Frag, kHeadDim>, Frag, kBlockM, kBlockN, kThreads>(
        has_exact_dp(problem), step.d_out_tile(), step.v_tile());
    if (item().visible) {  // dP^T = V dO^T
      gemm_nt<Frag, kHeadDim, false>(dp, step.v_tile(), Step::warp_key(), step.d_out_tile(), Step::warp_query());
    }
    __syncthreads();  // (4)
    if (step.loads_next(at) && !item().last) step.load_for_dp(next(), item(), false);
    if (item().visible) step.add_ds(sum, p, dp, at);
    if (item().last) {
      step.store(sum, item());
      clear(sum);
      __syncthreads();  // (5), nobody reads the stage any more
      if (step.loads_next(at)) step.load_for_dp(next(), item(), true);
    }
    cp_async_commit();
  }
}

}  // namespace flash_ext::sm80
