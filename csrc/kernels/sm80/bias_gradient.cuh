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
// main backward kernel (bwd.cuh, bias_boxes.cuh). Called by run_backward. Invariant: each element of the gradient is
// written exactly once.
#pragma once

#include "kernels/sm80/bias_gradient_parts.cuh"
#include "kernels/sm80/dropout.cuh"

namespace flash_ext::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    bias_gradient_kernel(const __grid_constant__ BackwardArgs args, const float* delta, const float* d_lse,
                         const float* inverse, const __grid_constant__ BiasGradientPlan plan, unsigned features) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using Mods = typename Traits::Mods;
  using Scores = typename Traits::Scores;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kM = Traits::kM, kN = Traits::kN;
  char* const smem = dynamic_shared_128();

  const Problem& problem = args.fwd.problem;
  const uint32_t base = shared_address(smem);
  constexpr TileShape kTile = Traits::kTile;
  const int bias_bytes = problem.bias_dtype == DType::kFloat32 ? 4 : 2;
  const BiasGradientSmem layout = bias_gradient_smem(kTile, kHeadDim, sizeof(T), bias_bytes, problem.has_mask);
  const Tile k_smem{base}, q_smem{base + layout.q}, v_smem{base + layout.v}, d_out_smem{base + layout.d_out};
  float* const row_smem =
      reinterpret_cast<float*>(smem + layout.rows);  // [item % 2][lse, delta, inverse, dlse][kBlockM]
  BiasGradientEntry* const ring = reinterpret_cast<BiasGradientEntry*>(smem + layout.items);

  __shared__ BiasGradientProgress progress;
  __shared__ Mods mods;
  __shared__ SharedValue<Dropout> dropout;
  __shared__ TileBand band;
  __shared__ int diagonal;
  // The last item, of even or odd number, with a row whose P do not sum up to 1; with one that has no key.
  __shared__ int measured[2], emptied[2];

  const int warp = threadIdx.x / 32;
  const bool drops = problem.dropout_p > 0.0;

  if (threadIdx.x == kThreads - 1) {
    mods = Mods::make(args.fwd, 0, 0, base + layout.bias, base + layout.mask);
    band = TileBand::make(problem);
    diagonal = problem.bottom_right ? static_cast<int>(problem.len_k - problem.len_q) : 0;
    if (drops) dropout.get() = make_dropout(args.fwd.rng_state[0], args.fwd.rng_state[1], problem.dropout_p);
    measured[0] = measured[1] = emptied[0] = emptied[1] = -1;
    BiasGradientEntry& before = ring[kBiasItems - 1];
    before.q = before.k = before.v = before.d_out = before.to = -1;
  }
  if (warp == 0) {
    progress = {0, 0};
    __syncwarp();
    find_items<Traits>(args, plan, ring, progress);
  }
  __syncthreads();

  const auto rows = [&](const TensorView& view, int64_t offset, int64_t count, int64_t cols) {
    return rows_of<T>(view, offset, count, cols);
  };
  const auto load_for_s = [&](const BiasGradientEntry& item, const BiasGradientEntry& before) {
    if (item.k != before.k || item.first_key != before.first_key) {
      load_operand<Traits, kBlockN>(k_smem, rows(args.fwd.k, item.k, problem.len_k, problem.head_dim), item.first_key);
    }
    if (item.q != before.q || item.first_query != before.first_query) {
      load_operand<Traits, kBlockM>(q_smem, rows(args.fwd.q, item.q, problem.len_q, problem.head_dim),
                                    item.first_query);
    }
  };
  const auto load_for_dp = [&](const BiasGradientEntry& item, const BiasGradientEntry& before, bool staged) {
    if (item.v != before.v || item.first_key != before.first_key || (staged && Traits::kStageTakesV)) {
      load_operand<Traits, kBlockN>(
          v_smem, rows(args.fwd.v, item.v, args.d_out ? problem.len_k : 0, problem.head_dim_v), item.first_key);
    }
    if (item.d_out != before.d_out || item.first_query != before.first_query || staged) {
      load_operand<Traits, kBlockM>(d_out_smem,
                                    rows(args.d_out, item.d_out, args.d_out ? problem.len_q : 0, problem.head_dim_v),
                                    item.first_query);
    }
  };
  // Items of one tile share the bias: what is summed over is what the bias lacks.
  const auto load_aux = [&](const BiasGradientEntry& item, const BiasGradientEntry& before) {
    const int first_query = plan.own_rows ? item.first_query : 0, first_key = plan.own_cols ? item.first_key : 0;
    if (item.to != before.to) {
      const int present = args.fwd.bias.row_stride != 0 ? kBlockM : 1;
      if (bias_bytes == 4) {
        load_rows<kBlockM, kBlockN / 4, Mods::kFloatPitch, kThreads>(
            mods.bias_smem, rows_of<float>(args.fwd.bias, item.bias, problem.len_q, problem.len_k), first_query,
            first_key, present);
      } else if constexpr (sizeof(T) == 2) {
        load_rows<kBlockM, kBlockN / 8, Mods::kBiasPitch, kThreads>(
            mods.bias_smem, rows(args.fwd.bias, item.bias, problem.len_q, problem.len_k), first_query, first_key,
            present);
      }
    }
    if (problem.has_mask) {
      const bool by_row = args.fwd.mask.row_stride != 0;
      load_rows<kBlockM, kBlockN / 16, Mods::kMaskPitch, kThreads>(
          mods.mask_smem, rows_of<uint8_t>(args.fwd.mask, item.mask, problem.len_q, problem.len_k),
          by_row ? item.first_query : 0, item.first_key, by_row ? kBlockM : 1);
    }
  };
  // lse, delta, 1 / sum of P and dlse pass through registers, because lse is changed on the way.
  const auto read_row = [&](const BiasGradientEntry& item) {
    const int query = item.first_query + static_cast<int>(threadIdx.x);
    float4 row = make_float4(kMinusInf, 0.f, 1.f, 0.f);
    if (threadIdx.x < kBlockM && query < problem.len_q) {
      const int64_t at = int64_t{item.bh} * problem.len_q + query;
      row.x = static_cast<const float*>(args.fwd.lse)[at];
      row.y = delta[at];
      if (inverse != nullptr) row.z = inverse[at];
      if (d_lse != nullptr && row.x != kMinusInf) row.w = d_lse[at];
    }
    return row;
  };
  const auto write_row = [&](float4 row, int at) {
    if (threadIdx.x >= kBlockM) return;
    float* const to = row_smem + at % 2 * 4 * kBlockM + threadIdx.x;
    to[0] = row.x == kMinusInf ? -kMinusInf : row.x;
    to[kBlockM] = row.y;
    to[2 * kBlockM] = row.z;
    to[3 * kBlockM] = row.w;
    if (row.z != 1.f) measured[at % 2] = at;
    if (row.x == kMinusInf) emptied[at % 2] = at;
  };

  float4 row = make_float4(kMinusInf, 0.f, 1.f, 0.f);  // of this thread's query in the next item
  if (ring[0].visible) {
    load_for_s(ring[0], ring[kBiasItems - 1]);
    load_aux(ring[0], ring[kBiasItems - 1]);
    cp_async_commit();
    load_for_dp(ring[0], ring[kBiasItems - 1], false);
    row = read_row(ring[0]);
    if (threadIdx.x == 0) mods.slope = ring[0].slope;
  }
  cp_async_commit();
  write_row(row, 0);

  Scores sum;
  clear(sum);
  const auto goes_on = [&](int at) { return progress.found > at + 1; };
  // NOTE: found anew wherever they are wanted, because sum, P and dP leave no registers to keep anything in.
  const auto warp_key = [] { return no_hoist(threadIdx.x) / 32 % Traits::kWarpsN * Traits::kWarpKeys; };
  const auto warp_query = [] { return no_hoist(threadIdx.x) / 32 / Traits::kWarpsN * Traits::kQueries; };
  for (int at = 0; at == 0 || goes_on(at - 1); ++at) {
    const auto item = [&]() -> const BiasGradientEntry& { return ring[no_hoist(at) % kBiasItems]; };
    const auto next = [&]() -> const BiasGradientEntry& { return ring[no_hoist(at + 1) % kBiasItems]; };
    const auto hides_lengths_or_band = [&] {
      return band.is_boundary(item().first_query, kBlockM, item().first_key, kBlockN) ||
             item().first_query + kBlockM > problem.len_q;
    };
    const auto with_query = [&](Scores& c, int which, const auto& fn) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float(&part)[1][kN][4] = reinterpret_cast<float(&)[1][kN][4]>(c[m]);
        for_each_column(part, row_smem + (no_hoist(at) % 2 * 4 + which) * kBlockM + warp_query(), fn);
      }
    };
    cp_async_wait<1>();
    __syncthreads();  // K, Q, bias, mask and the rows of this item are there
    if (warp == 0 && progress.found == at + 1) find_items<Traits>(args, plan, ring, progress);
    if constexpr (kMayBeExact<Frag, kHeadDim>) {
      if (has_exact_scores(problem)) {
        add_exact_columns<Frag, true, kBlockM, kThreads>(q_smem);
        add_exact_columns<Frag, false, kBlockN, kThreads>(k_smem);
        __syncthreads();
      }
    }
    Scores p_acc;
    if (item().visible)
      score_product<Frag, kHeadDim, true, false>(features, p_acc, k_smem, warp_key(), q_smem, warp_query());

    __syncthreads();  // nobody reads K and Q any more; the next item is found
    const auto loads = [&] { return goes_on(at) && next().visible; };
    row = make_float4(kMinusInf, 0.f, 1.f, 0.f);
    if (loads()) {
      load_for_s(next(), item());
      row = read_row(next());
    }
    cp_async_commit();
    if (item().visible) {
      mods.template apply<true>(features & ~kMask, p_acc, warp_key(), warp_query(),
                                item().first_query + diagonal - item().first_key);
      with_query(p_acc, 0,
                 [&](float& x, float lse) { x = exp2_fast((without_split_nan<Frag>(x, features) - lse) * kLog2e); });
      if (measured[at % 2] == at) with_query(p_acc, 2, [](float& x, float of_query) { x *= of_query; });
      if (hides_lengths_or_band()) {
        visit_hidden<kM, kN>(band, static_cast<int>(problem.len_q), item().first_query + warp_query(),
                             item().first_key + warp_key(), sets_hidden(p_acc, kMinusInf));
      }
      if (problem.has_mask) {
        mods.template visit_masked<true, kM, kN>(features, warp_key(), warp_query(), 0, sets_hidden(p_acc, kMinusInf));
      }
      if (drops) {
        visit_dropout<true>(p_acc, dropout.get(), item().bh, (item().first_query + warp_query()) / 16,
                            (item().first_key + warp_key()) / 16, [](float& x, bool kept) { x = kept ? x : -x; });
      }
    }

    write_row(row, at + 1);
    cp_async_wait<1>();
    __syncthreads();  // V and dO are there; nobody reads bias and mask any more
    if (loads()) {
      load_aux(next(), item());
      if (threadIdx.x == 0) mods.slope = next().slope;
    }
    cp_async_commit();
    Scores dp_acc;
    clear(dp_acc);
    if constexpr (kMayHaveExactDp<Frag, kHeadDim>) {
      if (has_exact_dp(problem)) {
        add_exact_columns<Frag, true, kBlockM, kThreads>(d_out_smem);
        add_exact_columns<Frag, false, kBlockN, kThreads>(v_smem);
        __syncthreads();
      }
    }
    if (item().visible) gemm_nt<Frag, kHeadDim, false>(dp_acc, v_smem, warp_key(), d_out_smem, warp_query());

    __syncthreads();  // nobody reads V and dO any more
    if (loads() && !item().last) load_for_dp(next(), item(), false);
    if (item().visible) {
      if (drops) {
        const float dropout_scale = static_cast<float>(dropout.get().scale);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) dp_acc[m][n][i] = p_acc[m][n][i] > 0.f ? dp_acc[m][n][i] * dropout_scale : 0.f;
          }
        }
      }
      with_query(dp_acc, 1, [](float& x, float of_query) { x -= of_query; });
      if (d_lse != nullptr) with_query(dp_acc, 3, [](float& x, float of_query) { x += of_query; });
      if (emptied[at % 2] == at) with_query(dp_acc, 0, [](float& x, float lse) { x = lse == -kMinusInf ? 0.f : x; });
      if (problem.has_mask || hides_lengths_or_band()) {  // what is hidden has an infinite P
        const auto is_hidden = [](float p) { return fabsf(p) == -kMinusInf; };
        for_each_pair(dp_acc, p_acc, [&](float& x, float p) { x = is_hidden(p) ? 0.f : x; });
        for_each_score<true>(p_acc, 0, 0, [&](float& p, int, int) { p = is_hidden(p) ? 0.f : p; });
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[m][n][i] = fmaf(fabsf(p_acc[m][n][i]), dp_acc[m][n][i], sum[m][n][i]);
        }
      }
    }
    if (item().last) {
      const SumsTo<T> to = SumsTo<T>{reinterpret_cast<char*>(plan.partial != nullptr ? plan.partial : args.dbias.data),
                                     (no_hoist(features) & kNarrowDbias) != 0} +
                           item().to;
      const int stage = layout.rows - Traits::kStage;
      const int left_rows = static_cast<int>(problem.len_q) - item().first_query;
      const int left_cols = static_cast<int>(problem.len_k) - item().first_key;
      if (plan.own_rows && plan.own_cols) {
        store_sums<Traits>(sum, base + stage + warp * Traits::kStageBytes,
                           to + (warp_query() * args.dbias.row_stride + warp_key() * args.dbias.col_stride), args.dbias,
                           left_rows - warp_query(), left_cols - warp_key());
      } else {
        store_reduced<Traits>(sum, reinterpret_cast<float*>(smem + stage), to, args.dbias, plan, left_rows, left_cols);
      }
      clear(sum);
      __syncthreads();  // nobody reads the stage any more
      if (loads()) load_for_dp(next(), item(), true);
    }
    cp_async_commit();
  }
}

}  // namespace flash_ext::sm80
