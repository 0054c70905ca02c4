// The first pass: dK and dV of a tile of keys, see parts.cuh. Called by run.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/keys_split.cuh"

namespace flash_ext::sm90 {

// A tile of keys through a map whose boxes have 64 rows.
template <class Traits>
__device__ __forceinline__ void load_keys(uint32_t tile, uint32_t barrier, const TensorMap& map,
                                          const TwoPassWork& work) {
  barrier_expect(barrier, Traits::kKeyBytes);
#pragma unroll
  for (int first = 0; first < Traits::kKeys; first += Traits::kBlock) {
    load_panels<Traits::kKeys, Traits::kPanels>(tile + first * kPanelBytes, barrier, map,
                                                work.box(map.steps, work.head, work.first_row + first));
  }
}

template <class Traits>
__device__ __forceinline__ void produce_for_keys(const TwoPassParams& params, const typename Traits::Keys& tiles) {
  const TwoPassWork work = TwoPassWork::of_keys<Traits::kKeys, Traits::kBlock>(params);
  typename Traits::Place place;
  load_keys<Traits>(tiles.k(), tiles.k_full(), params.k, work);
  bool first = true;
  for (int member = 0; member < params.group_size; ++member) {
    const int head = work.head * params.group_size + member;
    const float* stats = params.stats + (int64_t{work.b} * params.heads_q + head) * params.padded * kQueryStats;
    for (int m = work.first; m < work.last; ++m) {
      const int row = m * Traits::kBlock;
      const auto load = [&](const Ring<Traits::kTileBytes>& ring, const TensorMap& map, int more) {
        const uint32_t full = ring.full(place.stage);
        barrier_wait(ring.empty(place.stage), place.phase ^ 1);
        barrier_expect(full, Traits::kTileBytes + more);
        load_panels<Traits::kBlock, Traits::kPanels>(ring.tile(place.stage), full, map, work.box(map.steps, head, row));
      };
      load(tiles.q(), params.q, Traits::kStatsBytes);
      bulk_load(tiles.lse(place.stage), stats + row * kQueryStats, tiles.q().full(place.stage), Traits::kStatsBytes);
      if (first) {
        load_keys<Traits>(tiles.v(), tiles.v_full(), params.v, work);
        first = false;
      }
      load(tiles.d_out(), params.d_out, 0);
      place.advance();
    }
  }
}

// The three warps beside the producer; its tiles in its order.
template <class Traits>
__device__ __forceinline__ void load_scores_of_keys(const ScoredTwoPassParams& params,
                                                    const typename Traits::Keys& tiles) {
  const TwoPassWork work = TwoPassWork::of_keys<Traits::kKeys, Traits::kBlock>(params);
  load_slots<Traits::kKeys>(params.keys_scores, tiles.scores(), work, params.len_q, params.band.len_k,
                            [&](const auto& fn) {
#pragma unroll 1
                              for (int member = 0; member < params.group_size; ++member) {
#pragma unroll 1
                                for (int m = work.first; m < work.last; ++m) {
                                  fn(work.head * params.group_size + member, m * Traits::kBlock, work.first_row);
                                }
                              }
                            });
}

// dK and dV of 64 keys.
template <class Traits>
__device__ __forceinline__ void consume_keys(const typename Traits::Params& params, const typename Traits::Keys& tiles,
                                             int consumer) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock, kKeys = Traits::kKeys, kHeadDim = Traits::kHeadDim;
  constexpr bool kScored = Traits::kScored, kLateDp = Traits::kShape.late_dp;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4, warp_row = warp * 16;  // of 128 keys
  const TwoPassWork work = TwoPassWork::of_keys<kKeys, kBlock>(params);
  const int first_key = work.first_row + consumer * 64, row = work.first_row + warp_row + lane / 4;
  const Ring<Traits::kTileBytes> q_ring = tiles.q(), d_out_ring = tiles.d_out();
  const uint64_t k_desc = k_major(tiles.k() + consumer * 64 * kPanelBytes);
  const uint64_t v_desc = k_major(tiles.v() + consumer * 64 * kPanelBytes);
  float dk_acc[kHeadDim / 2], dv_acc[kHeadDim / 2], s_acc[kBlock / 2];
  [[maybe_unused]] float dp_acc[kBlock / 2];
  auto& dp = chosen<kLateDp>(s_acc, dp_acc);
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk_acc[i] = dv_acc[i] = 0.f;
  typename Traits::Place place;
  int m = work.first, head = work.head * params.group_size;
  const bool drops = dropout_of(params).rng_state != nullptr;
  const DropoutDraws draws(dropout_of(params));
  [[maybe_unused]] ScorePlace slot = keys_slot(params);
  if (kScored && drops) draws.store_keys(tiles.draw_keys(warp));
  const float ds_scale = Traits::kScaled ? params.ds_scale(work.b, head, params.group_size) : 1.f;

  const auto issue_s = [&](const typename Traits::Place& at) {
    barrier_wait(q_ring.full(at.stage), at.phase);
    wgmma_fence();
    issue_scores<T, kKeys, kBlock, kHeadDim>(s_acc, k_desc, q_ring.tile(at.stage));
  };
  const auto issue_dp = [&] {
    barrier_wait(d_out_ring.full(place.stage), place.phase);
    wgmma_fence();
    issue_scores<T, kKeys, kBlock, kHeadDim>(dp, v_desc, d_out_ring.tile(place.stage));
  };
  // kLast: no tile of queries follows, whose S^T would be computed.
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    uint32_t p[kBlock / 4], ds[kBlock / 4], dropped = 0;  // ds: at first what it is made of
    if constexpr (!kLateDp) issue_dp();
    if constexpr (kScored) {
      const ScoreParams& scores = params.keys_scores;
      KeptBits<1> kept = {};
      take_slot<T, kKeys, true>(
          s_acc, kept, scores, tiles.scores(), slot, warp_row, scores.alibi.of(head, work.b0, work.b1),
          row - (m * kBlock + lane % 4 * 2) - scores.alibi.offset, [&] { pack_slopes<T>(ds, s_acc, scores.softcap); });
      if (is_far_tile(tiles.far(place.stage))) {
        subtract_far(s_acc, tiles.far(place.stage), params.natural, params.inverse_scale);
        if (drops) keep_nan(dv_acc, s_acc, tiles.far(place.stage));
      }
      make_p<Traits>(p, ds, s_acc, params, tiles.lse(place.stage), scores.softcap);
      if (scores.mask.data != nullptr) hide(p, ds, kept);
      if (drops) {
        dropped = draws.transposed_bits(tiles.draw_keys(warp), work.b * params.heads_q + head, m * (kBlock / 16),
                                        (work.first_row + warp_row) / 16);
#pragma unroll
        for (int i = 0; i < kBlock / 4; ++i) p[i] &= ~spread_high_bits(dropped << i);
      }
    } else {
      if (is_far_tile(tiles.far(place.stage))) {
        subtract_far(s_acc, tiles.far(place.stage), params.natural, params.inverse_scale);
      }
      make_p<Traits>(p, ds, s_acc, params, tiles.lse(place.stage), params.softcap);
    }
    if (params.is_boundary(m * kBlock, kBlock, first_key, 64)) {
      hide(p, ds, KeptColumns::of_keys(params.band, params.len_q, row, m * kBlock));
    }
    fence_registers(p);
    if constexpr (kLateDp) {
      fence_registers(s_acc);
      issue_dp();
    }
    issue_gradient<T, kBlock, kHeadDim>(dv_acc, p, d_out_ring, place.stage);
    wgmma_wait<1>();
    fence_registers(dp);
    make_ds<Traits>(ds, dp, tiles.delta(place.stage), dropped, ds_scale);
    if (kScored && is_far_tile(tiles.far(place.stage))) clear_emptied(ds, tiles.lse(place.stage));
    issue_gradient<T, kBlock, kHeadDim>(dk_acc, ds, q_ring, place.stage);
    typename Traits::Place next = place;
    next.advance();
    if constexpr (!kLast) issue_s(next);
    wgmma_wait<!kLast>();
    fence_registers(dk_acc);
    fence_registers(dv_acc);
    fence_registers(p);
    fence_registers(ds);
    __syncwarp();  // all lanes have read their lse and delta
    if (lane == 0) {
      barrier_arrive(q_ring.empty(place.stage));
      barrier_arrive(d_out_ring.empty(place.stage));
    }
    place = next;
    if (++m == work.last) {
      m = work.first;
      ++head;
    }
    if constexpr (!kLast) {
      wgmma_wait<0>();
      fence_registers(s_acc);
    }
  };

  const int total = (work.last - work.first) * params.group_size;
  barrier_wait(tiles.k_full(), 0);
  if (total > 0) {
    barrier_wait(tiles.v_full(), 0);
    issue_s(place);
    wgmma_wait<0>();
    fence_registers(s_acc);
    for (int left = total; left > 1; --left) step(std::false_type());
    step(std::true_type());
  }
  named_barrier_sync(1 + consumer, 128);  // all four warps have finished with their rows of K and V
  const int out_row = work.first_row + warp_row;
  if (params.wants_dv) {
    store_rows<Traits, kKeys>(dv_acc, value_scale<Traits>(params), tiles.v(), warp_row, params.dv,
                              work.box(params.dv.steps, work.head, out_row));
  }
  if (params.wants_dk) {
    store_rows<Traits, kKeys>(dk_acc, params.scale / ds_scale, tiles.k(), warp_row, params.dk,
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
  follow_previous_kernel<Traits>();  // prepare's numbers
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
