// Backward: one block of threads owns kBlockN keys of one key head and walks over the queries that see them, head after
// head of its group, so that dK and dV stay in registers and grouped heads need no sum in memory. Where key and value
// heads differ in number it runs twice, once grouped by key heads for dK and dQ, once by value heads for dV.
//
//   S^T = K Q^T     P^T = e^(S^T - lse)     dV += dropout(P)^T dO     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dK += dS^T Q    dQ += dS K              delta = rowsum(dO o out) - dlse
//
// FlashAttention-2 (arXiv:2307.08691), algorithm 2, with S transposed and two kinds of warps. A pair of warps, one of
// each kind, owns the same keys. One computes S^T, P^T and dV, the other dP^T, dS^T and dK; P^T and dS^T are their
// register operands. P passes from one to the other, dS to all for dQ, through shared memory. dQ of a tile is computed
// beside the next tile's softmax, and added up in float in global memory (dq_accumulate.cuh), in the order of the
// blocks of keys when deterministic. Called by rows.cpp through kernels.h, made of the steps of steps.cuh. Invariant:
// rows past a sequence's last are zeros in shared memory, with an lse of +inf; they and keys past its last are hidden
// (hidden.cuh): P = 0 and dS = 0.
#pragma once

#include "kernels/sm80/backward/steps.cuh"

namespace flash_ext::sm80 {

// What a tile of queries goes through. All pairs of warps do the same, each with its keys:
//
//                             the warp that holds dV               its partner, which holds dK
//   wait, __syncthreads (1)   Q, dO, lse, delta, bias and mask are there, and dS of the tile before;
//                             nobody reads the other stage
//   begin to load             the next tile of queries, to the other stage
//                             S^T = K Q^T                          dQ += dS K of the tile before
//                             P^T = e^(S^T - lse)                  dP^T = V dO^T
//   a barrier of the two (2)  P is there: arrives                  waits
//                             dV += P^T dO                         dS^T = P^T o (dP^T - delta), to all warps
//                             dQ += dS K of the tile before        dK += dS^T Q
//
// dQ is laid over all warps or over those alone that hold dK (dq_warps_m, dq_warps_n). With one stage of queries there
// is another __syncthreads behind dK: all of dS is there, and nobody reads Q and dO; then the next tile begins to load,
// and dQ of this one is computed. P of the next tile may be written after (1), because the partner has read this one
// before.
// A wait is for this thread's cp.async. Shared memory: K, V, then Q and dO of each stage, P, dS (two with two stages),
// lse and delta, bias, mask, dQ on its way to memory (backward_smem); dK and dV take the places of K and V.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ TileSchedule schedule, ScoreOptions options) {
  using Step = Backward<Traits>;
  using Frag = typename Traits::Frag;
  using Sums = typename Traits::Sums;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  if constexpr (!is_reachable<Traits>()) {
    __trap();
    return;
  }
  char* const smem = dynamic_shared_1024();
  const Problem& problem = args.fwd.problem;
  constexpr BackwardShape kShape = Traits::kShape;
  const BackwardSmem layout =
      backward_smem(kShape, kHeadDim, sizeof(typename Traits::T),
                    {Traits::kGeneral ? bias_bytes_of(problem) : 0, Traits::kGeneral && problem.has_mask,
                     !Traits::kGeneral || (options.features & kPApart) != 0, kHasBulkAdditions});
  float* const row_smem = reinterpret_cast<float*>(smem + layout.rows);
  __shared__ BackwardBlock<Traits> block;
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<ElementDropout> dropout;
  __shared__ float warp_values[32];
  Step step{args, scratch, schedule, options, layout, mods, dropout, warp_values, row_smem, shared_address(smem)};
  step.find(block);
  if (problem.packed) {
    __syncthreads();
    if (block.sequence.len_k == 0) return;  // behind the list's last tile
  }
  typename Step::Gradient acc;  // dV or dK
  clear(acc);
  typename Step::Flags flags;
  do {  // head after head of the group
    step.begin_head(block, acc);
    int stage = 0;
    if (Step::kDrawsAhead && step.drops() && Step::holds_dv()) step.draw(block, flags, block.last_query, 0, 1);

    // NOTE: from the last queries to the first. Under a causal band the first that see a key have the largest P; when
    // they came first, each later one was rounded to the sum's last place.
    for (int query = block.last_query; query >= block.first_query; query -= kBlockM) {
      const auto q = step.q_tile(stage), d_out = step.d_out_tile(stage);
      cp_async_wait<0>();
      __syncthreads();  // (1)
      const bool goes_on = query > block.first_query;
      if (Traits::kStages == 2 && goes_on) step.load_queries(block, query - kBlockM, stage ^ 1);
      cp_async_commit();
      make_products_exact<Frag, kHeadDim, kBlockM, kBlockN, Traits::kThreads>(problem, q, step.k_tile(), d_out,
                                                                              step.v_tile());
      typename Step::Scores s;
      if (Step::holds_dv()) {
        // S^T = K Q^T, and P^T of it
        score_product<Frag, kHeadDim, Traits::kGeneral>(options.features, s, step.k_tile(), Step::warp_key(), q, 0);
        step.score_to_p(block, s, query, stage);
        auto p = operands<Frag>(s);
        step.pass_on(p, flags, stage);                    // to the partner
        step.add_dv(block, acc, p, d_out, flags, query);  // dV += P^T dO
        if (Traits::kDeferred && Traits::kFirstDqWarp == 0 && query < block.last_query) {
          step.add_dq(block, query + kBlockM, stage ^ 1);
        }
      } else {
        if (Traits::kDeferred && query < block.last_query) step.add_dq(block, query + kBlockM, stage ^ 1);
        clear(s);
        gemm_nt<Frag, kHeadDim>(s, step.v_tile(), Step::warp_key(), d_out, 0);  // dP^T = V dO^T
        const auto ds = step.dp_to_ds(block, s, query, stage);
        step.share_ds(ds, stage);
        gemm_from_registers<Frag, Sums>(acc, ds, q, 0, 0);  // dK += dS^T Q
        step.wait_for_dbias();
      }
      if (Traits::kStages == 2) {
        stage ^= 1;
      } else {
        __syncthreads();  // dS of all warps is there; nobody reads Q and dO any more
        if (goes_on) {
          step.load_queries(block, query - kBlockM, 0);
          cp_async_commit();
        }
        step.add_dq(block, query, 0);
      }
      step.add_to_sums(block, acc, query);
    }
    step.end_head(block, stage);
  } while (step.next_head(block));

  if constexpr (kHasBulkAdditions) {
    if (threadIdx.x % 32 == 0) bulk_wait();
  }
  step.take_sums(block, acc);
  step.store(block, acc);
}

}  // namespace flash_ext::sm80
