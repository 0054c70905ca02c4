// The first pass: dK and dV of a tile of keys, see parts.cuh. Called by run.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/keys_split.cuh"

namespace flash_ext::sm90 {

// The block's tile of keys.
template <class Traits, int kHeadDim>
__device__ __forceinline__ void load_keys(uint32_t tile, uint32_t barrier, const TensorMap& map,
                                          const TwoPassWork& work) {
  barrier_expect(barrier, tile_bytes(Traits::kKeys, kHeadDim));
  load_boxes<Traits::kKeys, Traits::kKeyBox, panels(kHeadDim)>(tile, barrier, map,
                                                               work.box(map.steps, work.head, work.first_row));
}

template <class Traits>
__device__ __forceinline__ void produce_for_keys(const typename Traits::Params& params,
                                                 const typename Traits::Keys& tiles) {
  constexpr int kBlock = Traits::kBlock;
  const TwoPassWork work = TwoPassWork::of_keys<Traits>(params);
  typename Traits::Place place;
  load_keys<Traits, Traits::kHeadDim>(tiles.k(), tiles.k_full(), params.k, work);
  bool first = true;
  for (int member = 0; member < params.group_size; ++member) {
    const int head = work.head * params.group_size + member;
    const float* stats = params.stats + (int64_t{work.b} * params.heads_q + head) * params.padded * kQueryStats;
    for (int m = work.first; m < work.last; ++m) {
      const int row = m * Traits::kQueries;
      const auto load = [&]<int kBytes>(const Ring<kBytes>& ring, const TensorMap& map, int more) {
        const uint32_t full = ring.full(place.stage);
        barrier_wait(ring.empty(place.stage), place.phase ^ 1);
        barrier_expect(full, kBytes + more);
        load_panels<Traits::kQueries, kBytes / panel_size(Traits::kQueries)>(ring.tile(place.stage), full, map,
                                                                             work.box(map.steps, head, row));
      };
      load(tiles.q(), params.q, Traits::kStatsBytes);
      constexpr int kTiles = kBlock / Traits::kQueries;  // of a tile of the stats
      const float* const of_tile = stats + m / kTiles * (kBlock * kQueryStats) + row % kBlock;
#pragma unroll
      for (int i = 0; i < (kTiles > 1 ? kQueryStats : 1); ++i) {
        constexpr int kBytes = kTiles > 1 ? Traits::kQueries * 4 : Traits::kStatsBytes;
        bulk_load(tiles.lse(place.stage) + i * kBytes, of_tile + i * kBlock, tiles.q().full(place.stage), kBytes);
      }
      if (first) {
        load_keys<Traits, Traits::kValueDim>(tiles.v(), tiles.v_full(), params.v, work);
        first = false;
      }
      load(tiles.d_out(), params.d_out, 0);
      place.advance();
    }
  }
}

// The three warps beside the producer; its tiles in its order.
template <class Traits>
__device__ __forceinline__ void load_scores_of_keys(const typename Traits::Params& params,
                                                    const typename Traits::Keys& tiles) {
  const TwoPassWork work = TwoPassWork::of_keys<Traits>(params);
  load_slots<Traits::kQueries, Traits::kKeys>(
      params.keys_scores, tiles.scores(), work, params.len_q, params.band.len_k, [&](const auto& fn) {
#pragma unroll 1
        for (int member = 0; member < params.group_size; ++member) {
#pragma unroll 1
          for (int m = work.first; m < work.last; ++m) {
            fn(work.head * params.group_size + member, m * Traits::kQueries, work.first_row);
          }
        }
      });
}

// dK and dV of 64 keys. What a tile of queries goes through, in both consumer warpgroups, each with its keys:
//
//   there at the start   S^T (the wait at the end of the tile before)
//   wait for dO, issue   dP^T = V dO^T; kLateDp: behind P^T, in the registers of S^T
//   under it             P^T = e^(S^T - lse), with scores from their slot, which each warp hands back
//   issue                dV += P^T dO
//   wait dP^T            dS^T = P^T o (dP^T - delta)
//   issue                dK += dS^T Q
//   wait for the next Q  issue its S^T
//   wait dV and dK       each warp arrives at the empty barriers of Q and dO
//   wait                 the next S^T
//
// Shared memory: K, V, Q and dO of each stage with lse, renormalised shift and delta, slots of bias and mask
// (keys_smem); dV and dK leave through V and K.
template <class Traits>
__device__ __forceinline__ void consume_keys(const typename Traits::Params& params, const typename Traits::Keys& tiles,
                                             int consumer) {
  using T = typename Traits::T;
  using Rows = KeyRows<Traits>;
  constexpr int kQueries = Traits::kQueries, kKeys = Traits::kKeys;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  constexpr bool kLateDp = Traits::kShape.late_dp;
  Rows rows(params, tiles, threadIdx.x / 32 - 4);
  const TwoPassWork& work = rows.work;
  const int first_key = work.first_row + consumer * 64;
  const uint64_t k_desc = k_major(tiles.k() + consumer * 64 * kPanelBytes);
  const uint64_t v_desc = k_major(tiles.v() + consumer * 64 * kPanelBytes);
  float dk[kHeadDim / 2] = {}, dv[kValueDim / 2] = {};
  typename Rows::Scores s;
  [[maybe_unused]] typename Rows::Scores own_dp;
  auto& dp = chosen<kLateDp>(s, own_dp);
  if (Traits::kScored && rows.drops) rows.draws.store_keys(tiles.draw_keys(rows.warp));
  const float ds_scale = rows.ds_scale();

  const auto issue_s = [&](const typename Traits::Place& at) {
    issue_next_scores<T, kKeys, kQueries, kHeadDim>(s, k_desc, rows.q_ring, at);
  };
  const auto issue_dp = [&] {
    issue_next_scores<T, kKeys, kQueries, kValueDim>(dp, v_desc, rows.d_out_ring, rows.place);
  };
  const auto wait_s = [&] {
    wgmma_wait<0>();
    fence_registers(s);
  };
  // kLast: no tile of queries follows, whose S^T would be computed.
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    typename Rows::Packed p, ds;  // ds: at first what it is made of
    uint32_t dropped = 0;
    if constexpr (!kLateDp) issue_dp();
    rows.make_p(p, ds, dropped, s, dv, true);
    if (rows.is_boundary(first_key)) hide(p, ds, rows.kept());
    fence_registers(p);
    if constexpr (kLateDp) {
      fence_registers(s);
      issue_dp();
    }
    issue_gradient<T, kQueries, kValueDim>(dv, p, rows.d_out_ring, rows.place.stage);
    wgmma_wait<1>();
    fence_registers(dp);
    make_ds<Traits>(ds, dp, tiles.delta(rows.place.stage), dropped, ds_scale);
    if (Traits::kScored && rows.needs_renorm()) clear_emptied(ds, tiles.lse(rows.place.stage));
    issue_gradient<T, kQueries, kHeadDim>(dk, ds, rows.q_ring, rows.place.stage);
    typename Traits::Place next = rows.place;
    next.advance();
    if (!kLast) issue_s(next);
    wgmma_wait<!kLast>();
    fence_registers(dk, dv, p, ds);
    rows.advance(next);
    if (!kLast) wait_s();
  };

  const int total = rows.total();
  barrier_wait(tiles.k_full(), 0);
  if (total > 0) {
    barrier_wait(tiles.v_full(), 0);
    issue_s(rows.place);
    wait_s();
    for_tiles(total, step);
  }
  named_barrier_sync(kOwnBarrier + consumer, 128);  // all four warps have finished with their rows of K and V
  const int out_row = work.first_row + rows.warp_row;
  if (params.wants_dv) {
    store_rows<Traits, kKeys>(dv, value_scale<Traits>(params), tiles.v(), rows.warp_row, params.dv,
                              work.box(params.dv.steps, work.head, out_row));
  }
  if (params.wants_dk) {
    store_rows<Traits, kKeys>(dk, params.scale / ds_scale, tiles.k(), rows.warp_row, params.dk,
                              work.box(params.dk.steps, work.head, out_row));
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    keys_kernel(const __grid_constant__ typename Traits::Params params) {
  const typename Traits::Keys tiles{tile_base()};
  constexpr TwoPassShape kShape = Traits::kShape;
  if (threadIdx.x == 0) {
    barrier_init(tiles.k_full(), 1);
    barrier_init(tiles.v_full(), 1);
    init_ring(tiles.q(), Traits::kStages, 8);
    init_ring(tiles.d_out(), Traits::kStages, 8);
    init_ring(tiles.p(), Traits::kStages, 4, 4);
    if constexpr (Traits::kScored) {
      init_ring(tiles.scores(), kScoreStages, kShape.splits_gradients() ? 4 : 8, 2 * kScoreLoaders);
    }
    fence_barrier_init();
  }
  follow_previous_kernel();  // prepare's numbers
  const int warpgroup = enter_warpgroup<kShape.producer_registers(), kShape.consumer_registers()>();
  if (warpgroup == 0) {
    if (threadIdx.x < 32 && elect_one()) produce_for_keys<Traits>(params, tiles);
    if constexpr (Traits::kScored) {
      if (threadIdx.x >= 32) load_scores_of_keys<Traits>(params, tiles);
    }
  } else {
    const int consumer = warpgroup - 1;
    if constexpr (!Traits::kShape.splits_gradients()) {
      consume_keys<Traits>(params, tiles, consumer);
    } else if (consumer == 0) {
      consume_one_gradient<Traits, true>(params, tiles);
    } else {
      consume_one_gradient<Traits, false>(params, tiles);
    }
  }
}

}  // namespace flash_ext::sm90
