// Backward on Hopper: one producer warp brings tiles of Q and dO by TMA past a tile of K and V that stays, two consumer
// warpgroups of 64 keys each multiply them by wgmma.
//
//   S^T = K Q^T   P^T = e^(S^T - lse)   dP^T = V dO^T   dS^T = P^T o (dP^T - delta)
//   dV += P^T dO       dK += dS^T Q       dQ += dS K
//
// FlashAttention-3 (arXiv:2407.08608), section 3.1 and appendix B.1: scores are computed transposed, so that P^T and
// dS^T are register operands of dV and dK. dS also goes through shared memory, because dQ sums over the keys of both
// warpgroups, which leaves by bulk reductions to a float array in the order of the fragments (rows.cuh), in
// whatever order blocks come, or in one order (order.cuh). Persistence::kStored: where one tile of keys is all there
// is, dQ is stored as it is. Called by run.cuh. Invariant: a ring's barriers as in pipeline.cuh, those of dS by an
// arrival of each warp. A stage of dS is written again when both warpgroups have handed it back, or where they do not
// (Traits::kReturnsDs), only after both have passed the barrier of the next one, before which each waited for its own
// dQ of this one. A warp's staging is its own, for dQ and, after it, for dV and dK. Persistence::kOrdered: the staging
// of all warps is full when each has arrived, and empty when the adder has read it.
#pragma once

#include "kernels/sm90/backward/producer.cuh"
#include "kernels/sm90/backward/steps.cuh"

namespace flash_ext::sm90 {

// What a tile of queries goes through. Both consumer warpgroups do the same, each with its 64 keys:
//
//   there at the start        S^T, dO (its full barrier)
//   issue                     dP^T = V dO^T
//   under it                  P^T = e^(S^T - lse)
//   issue                     dV += P^T dO
//   wait dP^T                 dS^T = P^T o (dP^T - delta), to shared memory: each warp arrives at dS' full barrier
//   TMA                       adds dQ of the tile before, out of the staging, to global memory
//   issue                     dK += dS^T Q
//   wait for both dS, issue   dQ = dS K; kDefers: of the tile before, whose dS has long been there
//   wait dV and dK            each warp arrives at the empty barriers of Q and dO
//   wait for the next Q       issue its S^T
//   wait dQ                   dQ -> staging, when TMA has read it; (kReturnsDs) arrive at dS' empty barrier
//   wait                      the next S^T
//
// Shared memory: K, V, Q and dO and dS of each stage, the staging of dQ, bias, mask and dropped bits of each stage,
// lse, renormalised shift and delta of each stage of Q (backward_smem). kFirst: no dQ is there that is deferred. kLast:
// no tile follows, and K and V go back. kWhole: no pair is hidden, and no row is renormalised.
template <class Traits, bool kFirst, bool kLast, bool kWhole, class C = BackwardConsumer<Traits>>
__device__ __forceinline__ void take_queries(C& step, typename C::Scores& s, typename C::Gradient& dk,
                                             typename C::Gradient& dv, typename C::KeyPart& k) {
  constexpr bool kHasDq = !C::kDefers || !kFirst;
  typename C::Scores dp;
  typename C::DqPart dq;
  typename C::Packed p, ds;
  typename C::Sloped sloped;
  const float slope = step.slope();
  if constexpr (!Traits::kLateDp) step.issue_dp(dp);
  step.template make_p<kWhole>(p, sloped, s, dv, slope);
  if constexpr (Traits::kLateDp) {
    fence_registers(sloped);
    step.issue_dp(dp);
  }
  step.add_dv_and_make_ds(dv, ds, p, sloped, dp);
  if (!kWhole) step.clear_hidden_ds(ds, p);
  if (kLast) warp_arrive(step.v_ring.empty(0));
  step.share_ds(ds);
  step.add_last_dq();
  step.at.advance(step.first_m(), step.last_m());
  step.issue_dk(dk, ds);
  if (kHasDq) step.issue_dq(dq);
  wgmma_wait<kHasDq>();
  fence_registers(dk, dv, p, ds);
  release_queries(step.q_ring, step.d_out_ring, step.place);
  step.place.advance();
  if (!kLast) step.issue_s(s, k);
  if (kHasDq) {
    step.wait_staging(step.place.stage ^ !C::kDefers);
    wgmma_wait<!kLast>();
    step.stage_dq(dq);
  }
  if constexpr (kLast) {
    step.template finish_dq<kHasDq>(dq);
  } else {
    step.wait_s(s, k);
  }
}

template <class Traits>
__device__ __forceinline__ void consume_backward(const typename Traits::Params& params,
                                                 const typename Traits::Tiles& tiles, int consumer) {
  using C = BackwardConsumer<Traits>;
  C step(params, tiles, consumer);
  for (uint32_t linear = step.next(blockIdx.x); linear < params.tiles; linear = step.next(linear + gridDim.x)) {
    typename C::Gradient dk, dv;
    typename C::Scores s;
    typename C::KeyPart k;
    step.begin(linear, dk, dv);
    const auto take = [&]<bool kFirst, bool kLast>(std::bool_constant<kFirst>, std::bool_constant<kLast>) {
      step.wait_d_out();
      if constexpr (Traits::kHasWholeStep && !(kFirst && kLast) && (Traits::kMayRenorm || !(kFirst || kLast))) {
        if (!has_mask(params) && !step.is_boundary() && !(Traits::kScored && step.needs_renorm())) {
          return take_queries<Traits, kFirst, kLast, true>(step, s, dk, dv, k);
        }
      }
      take_queries<Traits, kFirst, kLast, false>(step, s, dk, dv, k);
    };
    const std::false_type no;
    const std::true_type yes;
    const auto rest = [&] {
      for (; step.left > 1; --step.left) take(no, no);
      take(no, yes);
    };
    if (step.total > 0) {
      step.begin_products(s, k);
      if constexpr (!C::kDefers) {
        rest();
      } else if (step.total == 1) {
        take(yes, yes);
      } else {
        take(yes, no);
        --step.left;
        rest();
      }
      step.end_products();
    }
    step.store(dk, dv);
    if constexpr (Traits::kPersistence == Persistence::kOne) break;
  }
  if (elect_one()) bulk_wait_read();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kShape.threads, 1)
    backward_kernel(const __grid_constant__ typename Traits::Params params) {
  constexpr BackwardShape kShape = Traits::kShape;
  const typename Traits::Tiles tiles{tile_base()};
  if constexpr (Traits::kPacked && !Traits::kOrdered) {
    // Before prepare has ended: the list was there when that began.
    const auto work = Traits::Work::template at<Traits::kBlockM, Traits::kBlockN>(params, blockIdx.x);
    if (work.b0 < 0) {  // NOTE: in all blocks where there is no tile, and finish waits for this kernel alone
      grid_dependency_wait();
      return;
    }
    if (threadIdx.x == 0) store_shared(tiles.packed_work(), work);
  }
  if (threadIdx.x == 0) {
    constexpr int kWarps = Traits::kWarps;
    init_ring(tiles.k(), 1, kWarps);
    init_ring(tiles.v(), 1, kWarps);
    init_ring(tiles.q(), kShape.stages, kWarps);
    init_ring(tiles.d_out(), kShape.stages, kWarps);
    init_ring(tiles.ds(), kShape.ds_stages, kWarps, kWarps);
    if constexpr (Traits::kScored) {
      init_ring(tiles.scores(), kScoreStages, kWarps, slot_arrivals(params.scores));
      init_ring(tiles.drops(), kShape.stages, kWarps, 32 * drop_warps(params.scores));
    }
    if constexpr (Traits::kOrdered) {
      for (int parity = 0; parity < 2; ++parity) barrier_init(tiles.dq_full(parity), kWarps);
      barrier_init(tiles.dq_empty(), 1);
      init_ring(tiles.works(), 2, kWarps + 3);  // the keys' producer, two adders
    }
    fence_barrier_init();
    for (const TensorMap* map : {&params.q, &params.k, &params.v, &params.d_out, &params.dk, &params.dv}) {
      prefetch_map(&map->map);
    }
  }
  follow_previous_kernel();  // prepare's numbers
  const int warpgroup = enter_warpgroup<kShape.producer_registers(), kShape.consumer_registers()>();
  if (warpgroup == 0) {
    if constexpr (Traits::kOrdered) {
      if (threadIdx.x < 32) {
        if (elect_one()) load_queries_in_order<Traits>(params, tiles);
      } else if (threadIdx.x < 64) {
        load_keys_in_order<Traits>(params, tiles);
      } else if (threadIdx.x < 96) {
        if (elect_one()) add_in_order<Traits, 0>(params, tiles);
      } else {
        if (elect_one()) add_in_order<Traits, 1>(params, tiles);
      }
    } else {
      if (threadIdx.x < 32 && elect_one()) produce_backward<Traits>(params, tiles);
      if constexpr (Traits::kScored) {
        if (threadIdx.x >= 32) load_backward_scores<Traits>(params, tiles);
      }
    }
  } else {
    const int consumer = warpgroup - 1;
    consume_backward<Traits>(params, tiles, consumer);
  }
}

}  // namespace flash_ext::sm90
