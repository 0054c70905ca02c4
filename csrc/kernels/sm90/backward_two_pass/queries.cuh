// The second pass: dQ of a tile of queries, see parts.cuh. Called by run.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/scores.cuh"

namespace flash_ext::sm90 {

template <class Traits>
__device__ __forceinline__ void produce_for_queries(const TwoPassParams& params,
                                                    const typename Traits::Queries& tiles) {
  constexpr int kBlock = Traits::kBlock;
  const TwoPassWork work = TwoPassWork::of_queries<2 * kBlock, kBlock>(params);
  const int head_k = work.head / params.group_size;
  typename Traits::Place k;
  RingPlace<1> v;
  const auto load_rows = [&](uint32_t first, uint32_t barrier, const TensorMap& map) {
    barrier_expect(barrier, 2 * Traits::kTileBytes);
    for (int consumer = 0; consumer < 2; ++consumer) {
      load_panels<Traits::kBlock, Traits::kPanels>(first + consumer * Traits::kTileBytes, barrier, map,
                                                   work.box(map.steps, work.head, work.first_row + consumer * kBlock));
    }
  };
  const auto load = [&](const Ring<Traits::kTileBytes>& ring, auto& place, const TensorMap& map, int n) {
    barrier_wait(ring.empty(place.stage), place.phase ^ 1);
    barrier_expect(ring.full(place.stage), Traits::kTileBytes);
    load_panels<Traits::kBlock, Traits::kPanels>(ring.tile(place.stage), ring.full(place.stage), map,
                                                 work.box(map.steps, head_k, n * kBlock));
    place.advance();
  };
  load_rows(tiles.q(0), tiles.q_full(), params.q);
  if (work.last > work.first) load(tiles.k(), k, params.k, work.first);
  load_rows(tiles.d_out(0), tiles.d_out_full(), params.d_out);
  for (int n = work.first; n < work.last; ++n) {
    load(tiles.v(), v, params.v, n);
    if (n + 1 < work.last) load(tiles.k(), k, params.k, n + 1);
  }
}

// The three warps beside the producer: of each tile of keys a slot of the first consumer, then one of the second.
template <class Traits>
__device__ __forceinline__ void load_scores_of_queries(const ScoredTwoPassParams& params,
                                                       const typename Traits::Queries& tiles) {
  constexpr int kBlock = Traits::kBlock;
  const TwoPassWork work = TwoPassWork::of_queries<2 * kBlock, kBlock>(params);
  load_slots<kBlock>(params.queries_scores, tiles.scores(), work, params.len_q, params.band.len_k, [&](const auto& fn) {
#pragma unroll 1
    for (int n = work.first; n < work.last; ++n) {
#pragma unroll 1
      for (int consumer = 0; consumer < 2; ++consumer) fn(work.head, work.first_row + consumer * kBlock, n * kBlock);
    }
  });
}

template <class Traits>
__device__ __forceinline__ void consume_queries(const typename Traits::Params& params,
                                                const typename Traits::Queries& tiles, int consumer) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const TwoPassWork work = TwoPassWork::of_queries<2 * kBlock, kBlock>(params);
  const int first_query = work.first_row + consumer * kBlock, row = first_query + warp_row + lane / 4;
  const Ring<Traits::kTileBytes> k_ring = tiles.k(), v_ring = tiles.v();
  const uint64_t q_desc = k_major(tiles.q(consumer)), d_out_desc = k_major(tiles.d_out(consumer));
  constexpr bool kLateDp = Traits::kShape.late_dp;
  float dq_acc[kHeadDim / 2], s_acc[kBlock / 2];
  [[maybe_unused]] float dp_acc[kBlock / 2];
#pragma unroll
  for (float& x : dq_acc) x = 0.f;
  // Queries are padded to whole tiles of 128 there.
  const float* const stats =
      params.stats + ((int64_t{work.b} * params.heads_q + work.head) * params.padded + first_query) * kQueryStats +
      row % kBlock;
  const auto stat = [&](QueryStat which, int half) { return stats[which * kBlock + half * 8]; };
  const float minus_lse[2] = {stat(kLseStat, 0), stat(kLseStat, 1)};
  const float delta[2] = {stat(kDeltaStat, 0), stat(kDeltaStat, 1)};
  [[maybe_unused]] const bool is_far = stat(kFarStat, 0) != kNotFar;  // of all rows of its tile
  // With 2^10 P, as -lse log2(e) has it.
  const float ds_scale = Traits::kScaled ? params.ds_scale(work.b, work.head, 1) : 1.f;
  typename Traits::Place k;
  RingPlace<1> v;
  const bool drops = dropout_of(params).rng_state != nullptr;
  const DropoutDraws draws(dropout_of(params));
  [[maybe_unused]] ScorePlace slot = queries_slot(params);
  [[maybe_unused]] float slope = 0.f;
  if constexpr (Traits::kScored) slope = params.queries_scores.alibi.of(work.head, work.b0, work.b1);

  auto& dp = chosen<kLateDp>(s_acc, dp_acc);
  const auto issue_dp = [&] {
    barrier_wait(v_ring.full(v.stage), v.phase);
    wgmma_fence();
    issue_scores<T, kBlock, kBlock, kHeadDim>(dp, d_out_desc, v_ring.tile(v.stage));
  };
  const auto issue = [&](const typename Traits::Place& at) {
    barrier_wait(k_ring.full(at.stage), at.phase);
    wgmma_fence();
    issue_scores<T, kBlock, kBlock, kHeadDim>(s_acc, q_desc, k_ring.tile(at.stage));
    if constexpr (!kLateDp) issue_dp();
  };
  const auto release_v = [&] {
    if (lane == 0) barrier_arrive(v_ring.empty(v.stage));
    v.advance();
  };
  const auto scores_are_there = [&] {
    wgmma_wait<0>();
    fence_registers(s_acc);
    fence_registers(dp);
    fence_registers(dq_acc);
    if constexpr (!kLateDp) release_v();
  };
  int n = work.first;
  const auto subtract_far_rows = [&] {
    if (!is_far) return;
    const float far[2] = {stat(kFarStat, 0), stat(kFarStat, 1)};
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      s_acc[i] = fminf(fmaf(s_acc[i], params.natural, far[i / 2 % 2]), 0.f) * params.inverse_scale;
    }
  };
  const auto p_of = [&](int i) { return exp2_fast(fmaf(s_acc[i], params.to_log2, minus_lse[i / 2 % 2])); };
  const auto scaled = [&](float x) { return Traits::kScaled ? x * (ds_scale * (1.f / 1024.f)) : x; };
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    uint32_t ds_frag[kBlock / 4];
    if constexpr (Traits::kScored) {
      const ScoreParams& scores = params.queries_scores;
      KeptBits<1> kept = {};
      uint32_t p[kBlock / 4];  // 1 - tanh^2 where there is a softcap, then times P
      if (consumer == 1) skip_scores(scores, tiles.scores(), slot);
      take_slot<T, kBlock, false>(s_acc, kept, scores, tiles.scores(), slot, warp_row, slope,
                                  row + scores.alibi.offset - (n * kBlock + lane % 4 * 2),
                                  [&] { pack_slopes<T>(p, s_acc, scores.softcap); });
      if (consumer == 0) skip_scores(scores, tiles.scores(), slot);
      subtract_far_rows();
#pragma unroll
      for (int i = 0; i < kBlock / 2; i += 2) {
        p[i / 2] = sloped<T>(p_of(i), p_of(i + 1), p[i / 2], scores.softcap);
      }
      if constexpr (kLateDp) {
        fence_registers(p);
        fence_registers(s_acc);
        issue_dp();
        wgmma_wait<0>();
        fence_registers(dp);
        release_v();
      }
      const auto make_ds = [&](int pair, uint32_t dropped) {
        const int i = 2 * pair, half = pair % 2;
        float x, y;
        unpack(p[pair], x, y, T());
        x *= scaled(without<0>(dp[i], dropped) - delta[half]);
        y *= scaled(without<1>(dp[i + 1], dropped) - delta[half]);
        ds_frag[pair] = minus_lse[half] == kMinusInf ? 0 : pack(x, y, T());  // a row without keys, beside a NaN
      };
      if (drops) {
        draws.template with_dropped<kBlock>(work.b * params.heads_q + work.head, (first_query + warp_row) / 16,
                                            n * (kBlock / 16), make_ds);
      } else {
#pragma unroll
        for (int pair = 0; pair < kBlock / 4; ++pair) make_ds(pair, 0);
      }
      if (scores.mask.data != nullptr) clear_hidden(ds_frag, kept);
    } else {
      if constexpr (Traits::kCaps) {
        cap_scores<T, false>(s_acc, params.softcap);
      } else {
        subtract_far_rows();
      }
#pragma unroll
      for (int i = 0; i < kBlock / 2; i += 2) {
        float ds[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float p = p_of(i + j);
          if constexpr (Traits::kCaps) p *= slope_of(s_acc[i + j], params.softcap);
          ds[j] = p * scaled(dp[i + j] - delta[i / 2 % 2]);
        }
        ds_frag[i / 2] = pack(ds[0], ds[1], T());
      }
    }
    if (params.band.is_boundary(first_query, kBlock, n * kBlock, kBlock)) {
      clear_hidden(ds_frag, KeptColumns::of_queries(params.band, row, n * kBlock));
    }
    issue_gradient<T, kBlock, kHeadDim>(dq_acc, ds_frag, k_ring, k.stage);
    typename Traits::Place next = k;
    next.advance();
    if constexpr (kLast) {
      wgmma_wait<0>();
      fence_registers(dq_acc);
      fence_registers(ds_frag);
      if (lane == 0) barrier_arrive(k_ring.empty(k.stage));
    } else {
      issue(next);
      wgmma_wait<kLateDp ? 1 : 2>();
      fence_registers(dq_acc);
      fence_registers(ds_frag);
      if (lane == 0) barrier_arrive(k_ring.empty(k.stage));
      scores_are_there();
    }
    k = next;
    ++n;
  };
  barrier_wait(tiles.q_full(), 0);
  barrier_wait(tiles.d_out_full(), 0);
  if (work.last > work.first) {
    issue(k);
    scores_are_there();
    for (int left = work.last - work.first; left > 1; --left) step(std::false_type());
    step(std::true_type());
  }
  named_barrier_sync(1 + consumer, 128);  // all four warps have finished with Q
  store_rows<Traits, kBlock>(dq_acc, params.scale / ds_scale, tiles.q(consumer), warp_row, params.dq,
                             work.box(params.dq.steps, work.head, first_query + warp_row));
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    queries_kernel(const __grid_constant__ typename Traits::Params params) {
  const typename Traits::Queries tiles{tile_base()};
  constexpr TwoPassShape kShape = Traits::kShape;
  if (threadIdx.x == 0) {
    barrier_init(tiles.q_full(), 1);
    barrier_init(tiles.d_out_full(), 1);
    init_ring(tiles.k(), Traits::kStages, 8);
    init_ring(tiles.v(), 1, 8);
    if constexpr (Traits::kScored) init_ring(tiles.scores(), kScoreStages, 8, 2 * kScoreLoaders);
    fence_barrier_init();
  }
  follow_previous_kernel<Traits>();  // prepare's numbers
  const int warpgroup = enter_warpgroup<kShape.producer_registers(), kShape.consumer_registers()>();
  if (warpgroup == 0) {
    if (threadIdx.x < 32 && elect_one()) produce_for_queries<Traits>(params, tiles);
    if constexpr (Traits::kScored) {
      if (threadIdx.x >= 32) load_scores_of_queries<Traits>(params, tiles);
    }
  } else {
    const int consumer = warpgroup - 1;
    consume_queries<Traits>(params, tiles, consumer);
  }
}

}  // namespace flash_ext::sm90
